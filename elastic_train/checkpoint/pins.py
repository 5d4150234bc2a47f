"""Pins: checkpoints that retention leaves alone until somebody takes the pin away."""

from __future__ import annotations

import json
from collections.abc import Iterable

from elastic_train.checkpoint.manifest import FOLDER, CheckpointId
from elastic_train.storage.errors import NotFound
from elastic_train.storage.formats import KEY, newer_than
from elastic_train.storage.store import Entry, Store

FORMAT_VERSION = 1
_FOLDER = f"{FOLDER}pins/"


def pin(store: Store, checkpoint: CheckpointId, reason: str) -> None:
    """Pins ``checkpoint`` of the job folder ``store``; pinning again replaces the reason."""
    store.write(_path(checkpoint), [json.dumps({KEY: FORMAT_VERSION, "reason": reason}).encode()])


def unpin(store: Store, checkpoint: CheckpointId) -> None:
    """Takes the pin away; one that is not there is no error."""
    store.delete(_path(checkpoint))


def pinned(entries: Iterable[Entry]) -> set[CheckpointId]:
    """The pinned checkpoints, from a LIST of ``checkpoints/`` (``Catalog.entries``)."""
    found = (CheckpointId.of(entry.path.replace(_FOLDER, FOLDER, 1)) for entry in entries if _is_pin(entry))
    return {checkpoint for checkpoint in found if checkpoint is not None}


def pin_reason(store: Store, checkpoint: CheckpointId) -> str | None:
    """Why ``checkpoint`` is pinned; None when it is not. A pin counts whatever it says, also one of a later release."""
    try:
        pin = json.loads(store.read(_path(checkpoint)))
        later = newer_than(pin.get(KEY), FORMAT_VERSION)
        return f"(the pin {later})" if later else str(pin["reason"])
    except NotFound:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        return "(the pin cannot be read)"


def _is_pin(entry: Entry) -> bool:
    return entry.path.startswith(_FOLDER)


def _path(checkpoint: CheckpointId) -> str:
    return checkpoint.path.replace(FOLDER, _FOLDER, 1)
