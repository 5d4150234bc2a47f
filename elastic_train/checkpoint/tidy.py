"""What comes after a commit: retention, which may fail without harm to the checkpoint that has just been made."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_train.checkpoint.claims import Claim
from elastic_train.checkpoint.errors import CheckpointError, Fenced
from elastic_train.checkpoint.retention import Removed, apply_retention, plan_retention
from elastic_train.config.operation import CheckpointConfig
from elastic_train.storage.errors import StorageError
from elastic_train.storage.store import Store


@dataclass(frozen=True, slots=True)
class Tidied:
    """What retention has removed, and in ``error`` why it ended early; the checkpoint is there all the same."""

    removed: Removed = field(default_factory=Removed)
    error: str = ""


def tidy(store: Store, claim: Claim, config: CheckpointConfig) -> Tidied:
    """Plans and applies retention. Raises Fenced only: then somebody else decides what stays."""
    try:
        return Tidied(apply_retention(store, plan_retention(store, config, claim), claim))
    except Fenced:
        raise
    except (CheckpointError, StorageError) as error:
        return Tidied(error=f"{type(error).__name__}: {error}")
