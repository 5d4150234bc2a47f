"""What the trainers of the running generation say: how far they are, what they need, what has gone wrong."""

from __future__ import annotations

import time
from collections.abc import Callable

from elastic_train.controller.bad_steps import BadSteps
from elastic_train.controller.copies import Copies
from elastic_train.controller.current_run import CurrentRun
from elastic_train.controller.directions import Directions
from elastic_train.controller.finished_steps import FinishedSteps
from elastic_train.controller.generation import Generation
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.setbacks import Setbacks, how_it_ended, what_it_said
from elastic_train.controller.trouble import Trouble
from elastic_train.controller.wire import Message


class TrainerMessages:
    """Decides what each message of a trainer, passed on by its host, means.

    Args:
        trouble: called when the generation cannot go on.
    """

    def __init__(
        self,
        run: CurrentRun,
        finished_steps: FinishedSteps,
        copies: Copies,
        bad_steps: BadSteps,
        setbacks: Setbacks,
        directions: Directions,
        trouble: Callable[[Generation, Trouble], None],
    ) -> None:
        self._run, self._finished_steps, self._copies = run, finished_steps, copies
        self._bad_steps, self._setbacks, self._directions, self._trouble = bad_steps, setbacks, directions, trouble

    def handle(self, host: HostRecord, generation: Generation, message: Message) -> None:
        """``message`` is of the trainer of ``host`` in ``generation``, the one that is running."""
        kind, rank = message["type"], message["rank"]
        generation.last_progress = time.time()
        if kind == "forked":
            host.trainer_pid = message["pid"]
            self._on_phase(generation, "forked")
        elif kind == "phase":
            self._on_phase(generation, message["name"], message["seconds"])
        elif kind == "restored":
            self._on_restored(generation, rank, message)
        elif kind == "described":
            self._directions.described(host, generation, rank, message["description"])
        elif kind == "stepped":
            generation.says(rank, message)
            for node in [node for node in message["copies"] if self._is_gone(generation, node)]:
                generation.is_refused(message["step"], rank, node)
            self._finished_steps.hold(generation.number, rank, message["step"], host.node, message["image"])
        elif kind == "error":
            self._on_error(host, generation, message)
        elif kind == "trainer_ended":
            host.trainer_pid = None
            self._trouble(generation, how_it_ended(host, message))
        elif kind == "copy_refused":
            self._copies.refused(message["node"], message["error"])
            self._do_without(generation, message)
        elif kind == "copy_dropped":
            self._copies.dropped(message["node"], message["error"])
            self._do_without(generation, message)
        elif kind == "copy_failed":
            self._trouble(generation, _failed_copy(host, generation, message))

    def _is_gone(self, generation: Generation, node: str) -> bool:
        """Nobody is left who could take copies there, and no member was: its host has not heard of it yet."""
        return node not in self._run.members.by_node and not generation.is_on(node)

    def _on_phase(self, generation: Generation, name: str, seconds: float = 0.0) -> None:
        begins = generation.formation.did(name, time.time(), seconds)
        if begins is not None and not generation.troubles:
            self._run.time.enter(begins)

    def _on_restored(self, generation: Generation, rank: int, message: Message) -> None:
        for source, count in message["bytes"].items():
            generation.restored[source] = generation.restored.get(source, 0) + count
        if message["passed_over"]:
            self._run.record("restore_passed_over", rank=rank, detail="; ".join(message["passed_over"]))

    def _do_without(self, generation: Generation, message: Message) -> None:
        """The step does without a copy, and those to come once the watch has looked."""
        generation.is_refused(message["step"], message["rank"], message["node"])
        self._finished_steps.finish_if_whole(generation.number, message["step"])

    def _on_error(self, host: HostRecord, generation: Generation, message: Message) -> None:
        trouble = what_it_said(host, message)
        if trouble.kind == "no_room":
            self._setbacks.no_room(host, generation, message["sentence"])
        elif trouble.kind == "unreadable":
            dropped = [self._drop(generation, copy["rank"], copy["node"]) for copy in message["copies"]]
            if not any(dropped):
                trouble.kind = "exception"  # it would be chosen again
        elif trouble.kind == "bad_step":
            self._bad_steps.refused(message["step"], trouble)
        self._trouble(generation, trouble)

    def _drop(self, generation: Generation, rank: int, node: str) -> bool:
        """Forget an image that could not be restored."""
        source = generation.restore.snapshots if generation.restore is not None else None
        return source is not None and self._run.inventory.drop(source.generation, rank, source.step, node)


def _failed_copy(host: HostRecord, generation: Generation, message: Message) -> Trouble:
    """Either end may be why."""
    rank, node = message["rank"], message["node"]
    partners = (partner for partner in generation.partners[rank] if partner.node == node)
    return Trouble("copy_failed", f"rank {rank}: {message['error']}", hosts=(host, *partners))
