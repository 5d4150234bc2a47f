"""What a coordinator that comes back makes of its journal and of what hosts tell it."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_train.config.layout import Layout
from elastic_train.controller.host_record import HostRecord
from elastic_train.controller.inventory import Inventory
from elastic_train.controller.returning import BROKEN_SECONDS, PastRun, Stories, Verdict, cause_of
from tests.controller.records import hosts

DP2 = Layout(dp_shard=2)
PATIENCE = 10.0


def generation(number: int, step: int, **more: Any) -> dict[str, Any]:
    line = {"time": 1.0, "generation": number, "layout": DP2.as_dict(), "step": step, "cause": "start"}
    return line | {"reason": "why", "cost": 4.0} | more


def past(*lines: dict[str, Any]) -> PastRun:
    found = PastRun.read([{"claim": 1} | line for line in ({"run": "us"}, *lines)], "us")
    assert found.began
    assert not found.superseded
    return found


def story(rank: int, last: int, *, number: int = 1, first: int = 5, **more: Any) -> dict[str, Any]:
    """Of a rank that has told of the steps ``first`` to ``last``."""
    part = {"generation": number, "rank": rank, "layout": DP2.as_dict(), "start_step": 0, "running": True}
    said = [{"step": step, "image": f"i{rank}", "copies": [], "generation": number} for step in range(first, last + 1)]
    message = {"type": "story", "part": part, "description": "{}", "last_words": [], "trainer_pid": 9}
    return message | {"steps": [{"message": one, "held": {}} for one in said], "finished_step": last - 1} | more


def returned(run: PastRun) -> tuple[Stories, list[HostRecord]]:
    stories = Stories(run, PATIENCE)
    stories.listen(100.0)
    return stories, hosts("ab")


def test_a_run_is_its_own_and_not_another() -> None:
    assert not PastRun.read([], "us").began
    assert not PastRun.read([{"run": "them"}, generation(1, 0)], "us").began
    run = PastRun.read([{"run": "us"}], "us")  # what it decided had not come to storage, if anything
    assert (run.began, run.superseded, run.decisions) == (True, False, [])
    run = PastRun.read([{"run": "us"}, generation(1, 0), {"run": "them"}, generation(2, 5)], "us")
    assert (run.began, run.superseded) == (True, True)
    run = PastRun.read([{"run": "them"}, generation(1, 0), {"run": "us"}, generation(2, 10)], "us")
    assert [decision.generation for decision in run.decisions] == [2]


def test_what_a_superseded_coordinator_decided_is_nothing() -> None:
    run = past(generation(1, 0, claim=1), {"returned": True, "claim": 3}, {"waiting_after": 5, "claim": 1})
    assert not run.waiting
    assert [decision.generation for decision in run.decisions] == [1]


def test_steps_that_were_given_up_stay_so() -> None:
    """Generation 1 came to 9, generation 2 went on from 4: images of 9 that a node brings back are of no use."""
    inventory = Inventory()
    past(generation(1, 0), generation(2, 4)).replay(inventory)
    assert inventory.add(1, 0, 9, "a", "image") is None
    assert inventory.add(1, 0, 4, "a", "image") is not None
    assert inventory.add(2, 0, 9, "a", "image") is not None
    past(generation(1, 0), {"waiting_after": 7}).replay(inventory)
    assert inventory.add(1, 0, 8, "a", "image") is None


def test_without_any_generation_the_job_begins() -> None:
    stories, _ = returned(past())
    assert stories.verdict(105.0, 0) is Verdict.WAIT
    assert stories.verdict(111.0, 0) is Verdict.BEGIN
    stories, (first, second) = returned(past())
    stories.tell(first, story(0, 8))
    stories.tell(second, story(1, 8))
    assert stories.verdict(105.0, 4) is Verdict.ADOPT  # the hosts know more than the journal


def test_generation_is_adopted_once_all_of_it_is_back() -> None:
    stories, (first, second) = returned(past(generation(1, 0)))
    stories.tell(first, story(0, 8))
    assert stories.verdict(105.0, 4) is Verdict.WAIT
    stories.tell(second, story(1, 9))
    assert stories.verdict(105.0, 4) is Verdict.ADOPT
    assert stories.finished_step == 8
    rebuilt = stories.rebuilt(6)
    assert rebuilt is not None
    assert (rebuilt.number, rebuilt.members, sorted(rebuilt.stepped)) == (1, [first, second], [7, 8, 9])
    assert [member.trainer_pid for member in rebuilt.members] == [9, 9]


@pytest.mark.parametrize(
    "other",
    [
        story(1, 4),  # has not come to a step: its groups may not be made
        story(1, 8, last_words=[{"type": "trainer_ended", "rank": 1, "cause": "SIGKILL", "out_of_memory": None}]),
        story(1, 8, first=7),
    ],
    ids=["no step", "dead", "gap"],
)
def test_generation_that_is_back_and_cannot_go_on_is_replaced_at_once(other: dict[str, Any]) -> None:
    stories, (first, second) = returned(past(generation(1, 0)))
    stories.tell(first, story(0, 8, first=7))
    stories.tell(second, other)
    assert stories.verdict(100.0, 4) is Verdict.REPLACE


def test_host_that_is_lost_again_does_not_step_on() -> None:
    stories, (first, second) = returned(past(generation(1, 0)))
    for rank, host in enumerate((first, second)):
        stories.tell(host, story(rank, 8))
    stories.lose(second)
    assert stories.verdict(100.0, 4) is Verdict.REPLACE


def test_missing_host_is_waited_for_as_long_as_a_lease() -> None:
    stories, (first, _) = returned(past(generation(1, 0)))
    stories.tell(first, story(0, 8))
    assert stories.verdict(100.0 + PATIENCE - 1, 4) is Verdict.WAIT
    assert stories.verdict(100.0 + PATIENCE, 4) is Verdict.REPLACE


@pytest.mark.parametrize(("step", "expected"), [(3, Verdict.WAIT), (4, Verdict.REPLACE)])
def test_missing_host_of_a_broken_generation_is_waited_for_only_while_images_miss(step: int, expected: Verdict) -> None:
    stories, (first, _) = returned(past(generation(1, 0)))
    stories.join({"images": [{"generation": 1, "rank": rank, "step": step} for rank in (0, 1)]})
    echo = {"type": "error", "kind": "peer"}
    stories.tell(first, story(0, 8, last_words=[echo]))
    assert stories.verdict(100.0 + BROKEN_SECONDS - 0.1, 4) is Verdict.WAIT
    assert stories.verdict(100.0 + BROKEN_SECONDS, 4) is expected


def test_generation_that_the_journal_does_not_know_yet_counts() -> None:
    """Lines of the journal come to S3 some seconds late."""
    stories, (first, second) = returned(past(generation(1, 0)))
    stories.tell(first, story(0, 8, number=2))
    stories.tell(second, story(1, 8, number=2))
    assert stories.verdict(100.0, 4) is Verdict.ADOPT
    assert stories.decision is not None and stories.decision.generation == 2


def test_cause_is_the_death_and_not_its_echo() -> None:
    stories, (first, second) = returned(past(generation(1, 0)))
    stories.tell(
        first,
        story(
            0, 8, last_words=[{"type": "error", "kind": "peer", "rank": 0, "step": 9, "error": "gloo", "traceback": ""}]
        ),
    )
    stories.tell(second, story(1, 8))
    death = {"type": "trainer_ended", "rank": 1, "cause": "SIGKILL", "out_of_memory": None}
    stories.tell(second, death)
    assert cause_of(trouble for _, trouble in stories.last_words()).kind == "trainer_killed"
    assert cause_of([]).kind == "coordinator_lost"
