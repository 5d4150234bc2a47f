"""Versions of the formats of files: what an older release wrote is read, what a later one wrote is refused.

Every file that is kept says its format in ``format_version``. A release reads all formats up to the one that it writes.
"""

from __future__ import annotations

from elastic_train import __version__
from elastic_train.storage.errors import FutureFormat

KEY = "format_version"


def newer_than(found: object, newest: int) -> str | None:
    """What is wrong with a file of the format ``found`` when formats up to ``newest`` are read; None if it is no later.

    Anything but an integer is left to whoever checks the file.
    """
    if not isinstance(found, int) or found <= newest:
        return None
    known = f"format {newest}" if newest == 1 else f"formats 1 to {newest}"
    return (
        f"is of format {found}, and this release of elastic_train ({__version__}) reads {known}; "
        "use the release that wrote it, or a later one"
    )


def require_known(uri: str, found: object, newest: int) -> None:
    """Raises FutureFormat when the file ``uri`` is of a later format than ``newest``."""
    problem = newer_than(found, newest)
    if problem is not None:
        raise FutureFormat(uri, problem)
