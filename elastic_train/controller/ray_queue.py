"""Jobs of one cluster that lack the hosts they need at least: whoever has enough leaves the next seats to them.

Their coordinators say so themselves, until that many hosts have joined. Ray's placement groups would not do: between
the end of the one by which a waiting job has got its seats and the start of the one for its hosts there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray

from elastic_train.controller.ray_actors import NAMESPACE, coordinator_name
from elastic_train.controller.ray_nodes import all_seats

_LOOK_SECONDS = 2.0
_ANSWER_SECONDS = 0.5
_BELIEVED_SECONDS = 30.0
"""So long counts the last answer of a coordinator that is too busy to answer in time, or frozen."""


class OtherJobs:
    """What other jobs of the cluster wait for, as one job's controller sees it.

    Args:
        own: name of the job that asks.
        tell: called with the names of the jobs to which seats are left, each time these change.
    """

    def __init__(self, own: str, tell: Callable[[list[str]], Any]) -> None:
        self._own, self._tell = own, tell
        self._looked: float | None = None
        self._heard: dict[str, tuple[float, int]] = {}
        """name of a job -> when it answered (monotonic clock), and how many hosts it lacked"""
        self._told: list[str] = []

    def waiting(self) -> dict[str, int]:
        """Name -> how many hosts it lacks, of the jobs that have fewer than ``hosts.min``; asked every two seconds.

        A job that needs more seats than the cluster has at all is not among them: seats that are left free for it are
        of no use to anybody.
        """
        now = time.monotonic()
        if self._looked is None or now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._listen(self._questions())
        lacking = {name: hosts for name, (heard, hosts) in self._heard.items() if now - heard < _BELIEVED_SECONDS}
        return {name: hosts for name, hosts in sorted(lacking.items()) if hosts}

    def leave_seats_to(self, names: list[str]) -> None:
        """Say so once; [] when seats are not left to anybody any more."""
        if names != self._told:
            self._told = names
            self._tell(names)

    def _questions(self) -> dict[Any, str]:
        """What each of the other coordinators is asked -> name of its job."""
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
        return questions

    def _listen(self, questions: dict[Any, str]) -> None:
        there = set(questions.values())
        self._heard = {name: answer for name, answer in self._heard.items() if name in there}
        answered = (
            ray.wait(list(questions), num_returns=len(questions), timeout=_ANSWER_SECONDS)[0] if questions else []
        )
        for ref in answered:
            with suppress(ray.exceptions.RayError):
                lacks = ray.get(ref)
                possible = lacks is not None and all_seats(lacks["seat"]).total() >= lacks["hosts"]
                self._heard[questions[ref]] = time.monotonic(), lacks["missing"] if possible else 0
