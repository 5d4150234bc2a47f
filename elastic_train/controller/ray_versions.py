"""Which versions of Ray work: we use more of it than its public API."""

from __future__ import annotations

import importlib

TESTED_RAY_VERSIONS = ("2.60.0",)
"""Those that ``test_ray_contract.py`` and the tests with real raylets have passed with."""


def require_ray() -> None:
    """Import all that we use of Ray.

    Raises:
        ImportError: the installed Ray lacks some of it; the sentence names it and the versions that have it.
    """
    import ray

    try:
        importlib.import_module("elastic_train.controller.ray_internals")
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"Ray {ray.__version__} lacks something that elastic_train uses: {error}; "
            f"versions that work: {', '.join(TESTED_RAY_VERSIONS)}"
        ) from error
