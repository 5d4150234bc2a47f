"""The causes of a host's seconds: the words of the ledger's time accounts, the simulator's and those of pictures."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """What a host's second was spent on."""

    USEFUL = "useful"  # computing steps that had never been finished before
    START = "start"  # from a host's arrival until it can train, and the whole forming of the first generation
    DATA_WAIT = "data_wait"  # a step fetched its samples
    CHECKPOINT_STALL = "checkpoint_stall"  # an update waited for the snapshot of the step before
    EVALUATION = "evaluation"
    SKIPPED = "skipped"  # computing steps that were bad and left out: no weight has changed
    REPLAYED = "replayed"  # computing steps that had been finished before, and were lost
    LOST_STEP = "lost_step"  # a step that was never finished, until the failure or the stop
    DETECTION = "detection"  # from the failure until the coordinator knew
    TEARDOWN = "teardown"  # the decision, the end of the old trainers, the fork of the new ones
    FORM = "form"  # process group and model are built
    RESTORE = "restore"  # the state is read
    FIRST_STEP = "first_step"  # what the first step of a generation takes beyond a usual one
    IDLE_SPARE = "idle_spare"  # ready, and the layout has no place for it
    WAITING = "waiting"  # ready, but the others are too few, or storage is away
    FINISHING = "finishing"  # from the last step to the end: the last checkpoint
