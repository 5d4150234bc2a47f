"""Jobs of one cluster that lack the hosts they need at least: whoever has enough leaves the next seats to them.

Their coordinators say so themselves, until that many hosts have joined. Ray's placement groups would not do: between
the end of the one by which a waiting job has got its seats and the start of the one for its hosts there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray

from elastic_train.controller.ray_actors import NAMESPACE, coordinator_name
from elastic_train.controller.ray_nodes import all_seats

_LOOK_SECONDS = 2.0
_ANSWER_SECONDS = 0.5
"""Who does not answer within that, as a frozen coordinator, is not waited for."""


class OtherJobs:
    """What other jobs of the cluster wait for, as one job's controller sees it.

    Args:
        own: name of the job that asks.
        tell: called with the names of the jobs to which seats are left, each time these change.
    """

    def __init__(self, own: str, tell: Callable[[list[str]], Any]) -> None:
        self._own, self._tell = own, tell
        self._looked: float | None = None
        self._waiting: dict[str, int] = {}
        self._told: list[str] = []

    def waiting(self) -> dict[str, int]:
        """Name -> how many hosts it lacks, of the jobs that have fewer than ``hosts.min``; asked every two seconds.

        A job that needs more seats than the cluster has at all is not among them: seats that are left free for it are
        of no use to anybody.
        """
        now = time.monotonic()
        if self._looked is None or now - self._looked >= _LOOK_SECONDS:
            self._waiting, self._looked = self._ask(), now
        return self._waiting

    def leave_seats_to(self, names: list[str]) -> None:
        """Say so once; [] when seats are not left to anybody any more."""
        if names != self._told:
            self._told = names
            self._tell(names)

    def _ask(self) -> dict[str, int]:
        questions = {}
        for actor in ray.util.list_named_actors(all_namespaces=True):
            prefix, _, name = actor["name"].partition(coordinator_name(""))
            if actor["namespace"] != NAMESPACE or prefix or name in ("", self._own):
                continue
            try:
                coordinator: Any = ray.get_actor(actor["name"], namespace=NAMESPACE)
                questions[coordinator.lacks.remote()] = name
            except (ValueError, AttributeError):  # it has ended meanwhile, or is of an older release
                continue
        return {name: hosts for name, hosts in self._answers(questions) if hosts}

    def _answers(self, questions: dict[Any, str]) -> list[tuple[str, int]]:
        """Name and number of hosts that it lacks, 0 where nothing is to be waited for."""
        if not questions:
            return []
        answers = []
        for ref in ray.wait(list(questions), num_returns=len(questions), timeout=_ANSWER_SECONDS)[0]:
            try:
                lacks = ray.get(ref)
            except ray.exceptions.RayError:
                continue
            can_be = lacks is not None and all_seats(lacks["seat"]).total() >= lacks["hosts"]
            answers.append((questions[ref], lacks["missing"] if can_be else 0))
        return sorted(answers)
