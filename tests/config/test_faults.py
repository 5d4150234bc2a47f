from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from elastic_train.config.faults import LLAMA3_FAILURES, Fault, Kind, TraceError, every, llama3, read_trace


def test_one_per_period_and_the_same_for_the_same_seed() -> None:
    faults = every(Kind.HANG, 30.0, 600.0, seed=1, seconds=5.0)
    assert [fault.at for fault in faults] == [30.0 * number for number in range(1, 21)]
    assert faults == every(Kind.HANG, 30.0, 600.0, seed=1, seconds=5.0)
    assert faults != every(Kind.HANG, 30.0, 600.0, seed=2, seconds=5.0)
    assert every(Kind.HANG, 30.0, 29.0, seed=1, seconds=5.0) == []


def test_llama_3_in_a_thousandth_of_the_time_is_one_failure_per_11_seconds() -> None:
    assert sum(cause.count for cause in LLAMA3_FAILURES.values()) == 419
    faults = llama3(54 * 86.4, 1000, seed=3, seconds=5.0)
    assert abs(len(faults) - 419) < 3 * math.sqrt(419)  # three standard deviations of a Poisson count
    assert pytest.approx(11.13, abs=0.01) == 54 * 86.4 / 419
    kinds = Counter(fault.kind for fault in faults)
    assert kinds[Kind.KILL_TRAINER] > len(faults) / 2
    assert {Kind.HANG, Kind.DRAIN, Kind.KILL_NODE, Kind.KILL_HOST} <= set(kinds)
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)


def test_a_trace_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"at": 20, "kind": "drain", "seconds": 3}, {"at": 1.5, "kind": "kill-node", "pick": 0.5}]
    trace.write_text("\n\n".join(map(json.dumps, lines)))
    first, second = read_trace(trace, seed=1, seconds=9.0)
    assert first == Fault(1.5, Kind.KILL_NODE, 0.5, 9.0)
    assert (second.at, second.kind, second.seconds) == (20.0, Kind.DRAIN, 3.0)
    assert read_trace(trace, seed=1, seconds=9.0) == [first, second]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no faults"),
        ("{", "line 1 is not JSON: '{'"),
        ('{"at": 1, "kind": "hang"}\n[]', "line 2: an object with at, kind"),
        ('{"at": 1}', "an object with at, kind"),
        ('{"at": 1, "kind": "hang", "why": 2}', "an object with at, kind"),
        ('{"at": 1, "kind": "explode"}', "kind='explode' is none of kill-trainer, kill-host, "),
        ('{"at": 1, "kind": ["hang"]}', "is none of"),
        ('{"at": -1, "kind": "hang"}', "at=-1 must be a number of at least 0"),
        ('{"at": true, "kind": "hang"}', "at=True must be a number"),
        ('{"at": NaN, "kind": "hang"}', "at=nan must be a number"),
        ('{"at": 1, "kind": "hang", "pick": 1}', "pick=1 must be below 1"),
        ('{"at": 1, "kind": "hang", "node": 7}', "node=7 must be the name of a node"),
        ('{"at": 1, "kind": "hang", "node": ""}', "node='' must be the name of a node"),
        ('{"at": 1, "kind": "hang", "away": "1h"}', "away='1h' must be a number of at least 0"),
        ('{"at": 1, "kind": "drain", "seconds": "3"}', "seconds='3' must be a number"),
    ],
)
def test_a_trace_that_cannot_be_read_is_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(text)
    with pytest.raises(TraceError) as error:
        read_trace(trace, seed=1, seconds=9.0)
    assert str(trace) in str(error.value)
    assert sentence in str(error.value)


def test_a_trace_of_a_real_cluster_names_nodes(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"at": 1, "kind": "kill-node", "node": "gpu-17", "away": 7200}\n{"at": 2, "kind": "hang"}\n')
    first, second = read_trace(trace, seed=1, seconds=9.0)
    assert (first.node, first.away, second.node, second.away) == ("gpu-17", 7200.0, None, None)


def test_a_missing_trace_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.jsonl cannot be read"):
        read_trace(tmp_path / "none.jsonl", seed=1, seconds=9.0)
