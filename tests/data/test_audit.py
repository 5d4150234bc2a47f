"""The audit of a made-up log: whatever is changed in it is found and named."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from elastic_train.config.training import TrainingConfig
from elastic_train.data.audit import Audit, audit_steps
from elastic_train.data.batches import StepBatches
from elastic_train.data.consumed import batch_digest
from elastic_train.data.errors import DataError
from elastic_train.data.mixture import MixedOrder, Mixture
from elastic_train.data.order import SampleOrder
from elastic_train.data.samples import Sample
from tests.samples import OneByOne

SIZES = (30, 7)
"""Samples of two sources."""
STEPS = 12
Log = list[dict[str, Any]]


class Numbered(OneByOne):
    """Samples that begin with their number."""

    sequence_length = 2

    def __len__(self) -> int:
        return sum(SIZES)

    def sample(self, index: int) -> Sample:
        return Sample(np.array([index, 1]), np.array([1, index]), np.zeros(2, np.int64))


ORDER = MixedOrder(Mixture([(0, [3.0, 1.0])], 1), [SampleOrder(size, f"1 {size}") for size in SIZES])
BATCHES = StepBatches(Numbered(), ORDER, TrainingConfig(steps=STEPS, global_batch=8, micro_batch=2))
NAMES = ("prose", "code")


def log(*, samples: bool = True) -> Log:
    """What a job without any fault writes."""
    slots = range(BATCHES.slots)
    lines: Log = []
    for step in range(1, STEPS + 1):
        digest = batch_digest(slots, BATCHES.load(step, slots))
        lines.append({"step": step, "slots": [[0, BATCHES.slots]], "batch": digest})
        if samples:
            lines[-1]["samples"] = BATCHES.sample_ids(step)
    return lines


def audit(lines: Log, **options: Any) -> Audit:
    return audit_steps(lines, BATCHES, list(zip(NAMES, SIZES, strict=True)), **options)


def told(lines: Log, **options: Any) -> list[tuple[str, str]]:
    return [(problem.kind, problem.message) for problem in audit(lines, **options).problems]


@pytest.mark.parametrize("samples", [True, False])
def test_a_log_without_fault(samples: bool) -> None:
    found = audit(log(samples=samples))
    assert (found.steps, found.steps_compared, found.samples, found.problems) == (STEPS, STEPS, 96, [])
    assert min(found.epochs) > 1
    assert sum(epochs * size for epochs, size in zip(found.epochs, SIZES, strict=True)) == 96
    assert audit([]).problems == []  # the command says that there is nothing to audit


def test_a_line_that_is_put_in_or_moved() -> None:
    lines = log()
    assert told([*lines[:5], lines[4], *lines[5:]]) == [("repeat", "step 5 has 2 lines")]
    assert told([*lines[:4], lines[4] | {"batch": "0" * 16}, *lines[4:]]) == [("repeat", "step 5 has 2 lines")]
    assert told([*lines[:5], *lines[3:]]) == [("repeat", "step 4 has 2 lines"), ("repeat", "step 5 has 2 lines")]
    assert told([*lines[:2], lines[3], lines[2], *lines[4:]]) == [("differs", "step 3 comes after step 4")]
    assert told([*lines[:5], lines[1], *lines[5:]]) == [("repeat", "step 2 has 2 lines")]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"step": None}, "step: "),
        ({"step": "3"}, "step: "),
        ({"step": True}, "step: "),
        ({"step": 3.0}, "step: "),
        ({"step": 0}, "step: "),
        ({"slots": [5]}, "slots.0: "),
        ({"slots": [[0]]}, "slots.0: "),
        ({"slots": [["a", "b"]]}, "slots.0.0: "),
        ({"slots": [[0.0, 4.0]]}, "slots.0.0: "),
        ({"samples": "all"}, "samples: "),
        ({"samples": [1.5] * 8}, "samples.0: "),
        ({"batch": 7}, "batch: "),
    ],
)
def test_a_line_that_is_none_of_a_step(change: dict[str, Any], problem: str) -> None:
    lines = log()
    lines[2] |= change
    with pytest.raises(DataError, match=rf"^steps.jsonl, line 3: {problem}"):
        audit(lines)
    with pytest.raises(DataError, match="line 1: step: Field required"):
        audit([{"loss": 1.0}])


def test_a_step_that_is_missing() -> None:
    lines = log()
    assert told([*lines[:3], *lines[4:]]) == [("gap", "step 4 is missing")]


@pytest.mark.parametrize(
    ("ranges", "problems"),
    [
        ([[0, 2], [3, 4]], [("gap", "step 2: slot 2 was computed by no rank")]),
        ([[0, 3], [2, 4]], [("repeat", "step 2: slot 2 was computed 2 times")]),
        ([[0, 5]], [("foreign", "step 2: slots 0 to 4 are not all of its 4 slots")]),
        (
            [[0, 3], [-1, 0]],
            [
                ("foreign", "step 2: slots -1 to -1 are not all of its 4 slots"),
                ("gap", "step 2: slot 3 was computed by no rank"),
            ],
        ),
        ([[0, 4], [4, 10**12]], [("foreign", "step 2: slots 4 to 999999999999 are not all of its 4 slots")]),
    ],
)
def test_slots(ranges: list[list[int]], problems: list[tuple[str, str]]) -> None:
    lines = log()
    lines[1]["slots"] = ranges
    assert told(lines) == problems


def test_other_bytes_under_the_right_numbers() -> None:
    lines = log()
    lines[6]["batch"] = lines[7]["batch"]
    (problem,) = told(lines)
    assert problem[0] == "differs"
    assert problem[1].startswith("step 7: trained on other bytes: batch ")
    assert told(lines, compare_bytes=False) == []


def test_a_sample_that_takes_anothers_place() -> None:
    """Within one epoch: once as an exchange, which loses nothing, once as a repeat, which does."""
    lines = log()
    of_prose = [(n, i) for n in range(2) for i, sample in enumerate(lines[n]["samples"]) if sample < SIZES[0]]
    (first, here), (second, there) = of_prose[0], of_prose[-1]
    exchanged = copy.deepcopy(lines)
    a, b = lines[first]["samples"][here], lines[second]["samples"][there]
    exchanged[first]["samples"][here], exchanged[second]["samples"][there] = b, a
    assert [kind for kind, _ in told(exchanged)] == ["differs", "differs"]
    repeated = copy.deepcopy(lines)
    repeated[first]["samples"][here] = b
    assert told(repeated) == [
        ("differs", f"step {first + 1}: sample {b} at place {here} instead of {a}"),
        ("repeat", f"source prose, epoch 0: sample {b} was used 2 times"),
        ("gap", f"source prose, epoch 0: sample {a} was never used"),
    ]
    strange = copy.deepcopy(lines)
    strange[first]["samples"][here] = sum(SIZES)
    assert ("foreign", f"source code, epoch 0: sample {SIZES[1]} is none of the {SIZES[1]} samples") in told(strange)


def test_a_single_data_set_has_no_name() -> None:
    batches = StepBatches(Numbered(), SampleOrder(37, 1), TrainingConfig(steps=5, global_batch=8, micro_batch=2))
    lines = [{"step": step, "samples": batches.sample_ids(step)} for step in range(1, 6)]
    first, second = lines[0]["samples"][:2]
    assert audit_steps(lines, batches, [("", 37)]).problems == []
    lines[0]["samples"][1] = first
    assert [problem.message for problem in audit_steps(lines, batches, [("", 37)]).problems] == [
        f"step 1: sample {first} at place 1 instead of {second}",
        f"epoch 0: sample {first} was used 2 times",
        f"epoch 0: sample {second} was never used",
    ]


def test_lines_of_an_older_release_say_nothing_of_slots() -> None:
    lines = [{"step": line["step"], "samples": line["samples"]} for line in log()]
    found = audit([*lines[:5], *log()[5:]])
    assert (found.unrecorded, found.steps_compared, found.problems) == (5, STEPS - 5, [])


def test_a_log_whose_end_is_lost() -> None:
    assert told(log()[:-2], reached=STEPS) == [("gap", "steps 11 to 12 are missing")]
    assert told(log(), reached=10**15) == [("gap", f"steps {STEPS + 1} to {10**15} are missing")]  # as fast as two


def test_steps_that_were_left_out_are_counted() -> None:
    lines = log()
    lines[3]["skipped"] = True
    assert (audit(lines).skipped, audit(lines).problems) == (1, [])
