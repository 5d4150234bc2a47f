"""Pins: checkpoints that retention leaves alone until somebody takes the pin away."""

from __future__ import annotations

import json
from collections.abc import Iterable

from elastic_train.checkpoint.manifest import FOLDER, CheckpointId
from elastic_train.storage.errors import NotFound
from elastic_train.storage.store import Entry, Store

_FOLDER = f"{FOLDER}pins/"


def pin(store: Store, checkpoint: CheckpointId, reason: str) -> None:
    """Pins ``checkpoint`` of the job folder ``store``; pinning again replaces the reason."""
    store.write(_path(checkpoint), [json.dumps({"reason": reason}).encode()])


def unpin(store: Store, checkpoint: CheckpointId) -> None:
    """Takes the pin away; one that is not there is no error."""
    store.delete(_path(checkpoint))


def pinned(entries: Iterable[Entry]) -> set[CheckpointId]:
    """The pinned checkpoints, from a LIST of ``checkpoints/`` (``Catalog.entries``)."""
    found = (CheckpointId.of(entry.path.replace(_FOLDER, FOLDER, 1)) for entry in entries if _is_pin(entry))
    return {checkpoint for checkpoint in found if checkpoint is not None}


def pin_reason(store: Store, checkpoint: CheckpointId) -> str | None:
    """Why ``checkpoint`` is pinned; None when it is not."""
    try:
        return str(json.loads(store.read(_path(checkpoint)))["reason"])
    except NotFound:
        return None
    except (ValueError, KeyError, TypeError):
        return "(the pin cannot be read)"


def _is_pin(entry: Entry) -> bool:
    return entry.path.startswith(_FOLDER)


def _path(checkpoint: CheckpointId) -> str:
    return checkpoint.path.replace(FOLDER, _FOLDER, 1)
