"""What Ray uploads of a folder, and whether that is too much: told before anything is packed or sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path


class TreeTooLarge(Exception):
    """Ray's job server would refuse the folder; one sentence names what is large in it."""


def uploaded_files(folder: Path, excludes: Sequence[str]) -> dict[Path, int]:
    """Sizes in bytes of the files that Ray packs, which is without compression, by their path below ``folder``.

    Left out are ``excludes`` (patterns as in .gitignore) and what a .gitignore or .rayignore in any folder names.
    """
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    sizes: dict[Path, int] = {}

    def note(path: Path) -> None:
        if path.is_file():
            sizes[path.relative_to(folder)] = path.stat().st_size

    _dir_travel(folder, [_get_excludes(folder, list(excludes))], note, include_gitignore=True)
    return sizes


def upload_limit() -> int:
    """Bytes that the job server takes in one request."""
    from ray._private.ray_constants import DASHBOARD_CLIENT_MAX_SIZE
    from ray._private.runtime_env.packaging import GCS_STORAGE_MAX_SIZE

    return int(min(DASHBOARD_CLIENT_MAX_SIZE, GCS_STORAGE_MAX_SIZE))


def check_size(folder: Path, excludes: Sequence[str]) -> None:
    """Raises TreeTooLarge."""
    sizes = uploaded_files(folder, excludes)
    total, limit = sum(sizes.values()), upload_limit()
    if total < limit:
        return
    by_entry: Counter[str] = Counter()
    for path, size in sizes.items():
        by_entry[path.parts[0] + ("/" if len(path.parts) > 1 else "")] += size
    listed = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in by_entry.most_common(3))
    raise TreeTooLarge(
        f"{folder} holds {total / 2**20:,.0f} MiB to upload, and a cluster's job server takes {limit / 2**20:,.0f}; "
        f"largest: {listed}; name what the job does not need in .rayignore or .gitignore "
        f"(left out already: {', '.join(excludes)})"
    )
