"""Is there a Ray cluster at all? Asked before Ray is: it retries a dead address for minutes."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

CONNECT_SECONDS = 3.0


def cluster_problem(address: str | None) -> str | None:
    """One sentence when nobody listens at the cluster's address; None when somebody does, or when Ray has to find it.

    The address is the given one, else that of RAY_ADDRESS; ``auto`` is what Ray wrote down for this machine.
    """
    wanted = address or os.environ.get("RAY_ADDRESS") or "auto"
    if wanted == "local":
        return None
    place = _noted() if wanted == "auto" else wanted.rpartition("://")[2]
    host, _, port = (place or "").rpartition(":")
    if not place or not port.isdigit():
        return None
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        return f"no Ray cluster answers at {place} ({error.strerror or error}); start one or give --address"
    return None


def _noted() -> str | None:
    """The address of the cluster that was last started on this machine, from Ray's own note."""
    note = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray" / "ray_current_cluster"
    try:
        return note.read_text().strip() or None
    except OSError:
        return None
