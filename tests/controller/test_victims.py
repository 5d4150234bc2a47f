from __future__ import annotations

from collections import Counter
from typing import Any

from elastic_train.config.faults import Fault, Kind
from elastic_train.controller.victims import choose


def host(number: int, node: str, trainer: int | None, rank: int | None) -> dict[str, Any]:
    return {
        "id": number,
        "node": node,
        "address": "10.0.0.1",
        "pid": 100 + number,
        "trainer_pid": trainer,
        "rank": rank,
        "state": "training" if trainer else "spare",
    }


HOSTS = [host(1, "a", 11, 0), host(2, "a", 12, 1), host(3, "b", 13, 2), host(4, "c", None, None)]


def test_every_victim_is_chosen_equally_often_and_fits() -> None:
    picks = [number / 100 for number in range(100)]

    def struck(kind: Kind, spared: list[str]) -> Counter[Any]:
        victims = [choose(Fault(0.0, kind, pick, 1.0), HOSTS, spared) for pick in picks]
        return Counter((v.node, v.trainer_pid) for v in victims if v is not None)

    trainers = struck(Kind.KILL_TRAINER, [])
    assert set(trainers) == {("a", 11), ("a", 12), ("b", 13)}
    assert max(trainers.values()) - min(trainers.values()) <= 1
    assert len(struck(Kind.KILL_HOST, [])) == 4
    assert {node for node, _ in struck(Kind.KILL_NODE, [])} == {"a", "b", "c"}
    assert {node for node, _ in struck(Kind.DRAIN, ["a"])} == {"b", "c"}
    assert set(struck(Kind.HANG, ["a", "b", "c"])) == set(trainers)  # only nodes as a whole are spared


def test_without_a_victim_there_is_none() -> None:
    assert choose(Fault(0.0, Kind.KILL_TRAINER, 0.5, 1.0), HOSTS[3:]) is None
    assert choose(Fault(0.0, Kind.KILL_NODE, 0.5, 1.0), HOSTS, ["a", "b", "c"]) is None
    assert choose(Fault(0.0, Kind.KILL_HOST, 0.5, 1.0), []) is None


def test_the_label_says_who_it_was() -> None:
    victim = choose(Fault(0.0, Kind.KILL_TRAINER, 0.0, 1.0), HOSTS)
    assert victim is not None
    assert victim.label == "rank 0, host 1 on node a"
    spare = choose(Fault(0.0, Kind.KILL_HOST, 0.99, 1.0), HOSTS)
    assert spare is not None
    assert spare.label == "spare, host 4 on node c"
