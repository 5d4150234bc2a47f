"""Proof from the step log that every step was trained on its own samples, all of them, once.

A line of ``steps.jsonl`` says which slots were computed (``slots``, told by the ranks that computed them) and what was
in them (``batch``, the digest of ``consumed``, which ranks make of the very arrays that they train on). The audit
makes both anew from the data sets and the job's settings, and follows the samples through their epochs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from elastic_train.data.consumed import batch_digest
from elastic_train.data.step_lines import parse_lines

if TYPE_CHECKING:
    from elastic_train.data.batches import StepBatches
    from elastic_train.data.step_lines import StepLine


@dataclass(frozen=True, slots=True)
class Problem:
    """One departure.

    ``gap``: something is missing; ``repeat``: it was used twice; ``foreign``: there is no such sample; ``differs``: a
    step was trained on other samples, or on other bytes, than the order and the data sets give.
    """

    kind: Literal["gap", "repeat", "foreign", "differs"]
    message: str


@dataclass(slots=True)
class Audit:
    """What was looked at, and what is wrong.

    ``steps_compared``: those whose bytes were made anew. ``unrecorded``: those of which nobody has said what they were
    trained on (lines of an older release, and steps whose last words were lost with a coordinator). ``skipped``: those
    that changed nothing, whose samples count as used.
    """

    steps: int = 0
    steps_compared: int = 0
    unrecorded: int = 0
    skipped: int = 0
    samples: int = 0
    epochs: list[float] = field(default_factory=list)
    """how often the samples of each source were used"""
    problems: list[Problem] = field(default_factory=list)


class Epochs:
    """Follows the samples of one source: in each epoch every one of them must come once.

    Args:
        name: of the source, for messages; "" when it is the only one.
    """

    def __init__(self, num_samples: int, name: str = "") -> None:
        self._seen = np.zeros(num_samples, np.uint8)
        self._used = 0
        self._where = f"source {name}, " if name else ""
        self.problems: list[Problem] = []

    def use(self, sample: int) -> None:
        """The source's next sample."""
        if 0 <= sample < len(self._seen):
            self._seen[sample] += self._seen[sample] < 255
        else:
            self._tell("foreign", f"sample {sample} is none of the {len(self._seen)} samples")
        self._used += 1
        if self._used % len(self._seen) == 0:
            self._check(whole=True)
            self._seen[:] = 0

    def end(self) -> float:
        """There are no more; returns how many epochs there were. Of an unfinished one only repeats can be told."""
        if self._used % len(self._seen):
            self._check(whole=False)
        return self._used / len(self._seen)

    def _check(self, *, whole: bool) -> None:
        for sample in np.flatnonzero(self._seen > 1):
            self._tell("repeat", f"sample {sample} was used {self._seen[sample]} times", ended=whole)
        for sample in np.flatnonzero(self._seen == 0) if whole else ():
            self._tell("gap", f"sample {sample} was never used", ended=True)

    def _tell(self, kind: Literal["gap", "repeat", "foreign"], message: str, *, ended: bool = False) -> None:
        epoch = (self._used - ended) // len(self._seen)
        self.problems.append(Problem(kind, f"{self._where}epoch {epoch}: {message}"))


def audit_steps(
    lines: Iterable[dict[str, Any]],
    batches: StepBatches,
    sources: Sequence[tuple[str, int]],
    reached: int = 0,
    *,
    compare_bytes: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Audit:
    """Compare the lines of ``steps.jsonl`` with what ``batches`` give.

    Args:
        sources: name and number of samples of each data set, in the order of the ids.
        reached: a step that the job is known to have come to, by other evidence than its log.
        compare_bytes: make every step's arrays anew, which reads all the data that was used.
        progress: called with (steps done, steps in all).

    Raises:
        DataError, StorageError: a line is none of a step, or the data sets cannot be read.
    """
    told = parse_lines(lines)
    steps = [line for _, line in sorted({line.step: line for line in told}.items())]
    ends = list(accumulate(size for _, size in sources))
    epochs = [Epochs(size, name if len(sources) > 1 else "") for name, size in sources]
    audit = Audit(steps=len(steps))
    last = max(steps[-1].step if steps else 0, reached)
    missing = _missing([line.step for line in steps], last)
    audit.problems += _not_rising([line.step for line in told]) + missing
    for line in steps:
        for sample in _audit_step(audit, line, batches, compare_bytes=compare_bytes):
            source = min(bisect_right(ends, sample), len(ends) - 1)
            epochs[source].use(sample - ends[source] + sources[source][1])
        progress(line.step, last)
    if not missing:
        audit.epochs = [used.end() for used in epochs]
        audit.problems += [problem for used in epochs for problem in used.problems]
    return audit


def _not_rising(steps: list[int]) -> list[Problem]:
    """A job that goes back cuts the lines of those steps off its log, so that each line is of a later step."""
    problems = [
        Problem("repeat", f"step {step} has {count} lines") for step, count in Counter(steps).items() if count > 1
    ]
    seen: set[int] = set()
    for before, step in pairwise(steps):
        seen.add(before)
        if step < before and step not in seen:
            problems.append(Problem("differs", f"step {step} comes after step {before}"))
    return problems


def _missing(steps: list[int], last: int) -> list[Problem]:
    """``steps`` ascend."""
    problems = []
    for before, step in pairwise([0, *steps, last + 1]):
        if step - before == 2:
            problems.append(Problem("gap", f"step {before + 1} is missing"))
        elif step - before > 2:
            problems.append(Problem("gap", f"steps {before + 1} to {step - 1} are missing"))
    return problems


def _audit_step(audit: Audit, line: StepLine, batches: StepBatches, *, compare_bytes: bool) -> list[int]:
    """Adds what is wrong with one step; returns the samples that it was trained on, by the log if that has them."""
    step = line.step
    audit.skipped += line.skipped
    ordered = batches.sample_ids(step)
    ids = line.samples if line.samples is not None else ordered
    audit.samples += len(ids)
    if ids != ordered:
        place = next((n for n, pair in enumerate(zip(ids, ordered, strict=False)) if pair[0] != pair[1]), None)
        detail = f"{len(ids)} samples instead of {len(ordered)}"
        if place is not None:
            detail = f"sample {ids[place]} at place {place} instead of {ordered[place]}"
        audit.problems.append(Problem("differs", f"step {step}: {detail}"))
    if line.slots is None:
        audit.unrecorded += 1
        return ids
    audit.problems += _audit_slots(step, line.slots, batches.slots)
    if compare_bytes:
        audit.steps_compared += 1
        numbers = range(batches.slots)
        expected = batch_digest(numbers, batches.load(step, numbers))
        if line.batch != expected:
            detail = f"batch {line.batch}; the data sets give {expected}"
            audit.problems.append(Problem("differs", f"step {step}: trained on other bytes: {detail}"))
    return ids


def _audit_slots(step: int, ranges: Iterable[Sequence[int]], slots: int) -> list[Problem]:
    counts = [0] * slots
    problems = []
    for first, end in ranges:
        if not 0 <= first < end <= slots:
            problems.append(
                Problem("foreign", f"step {step}: slots {first} to {end - 1} are not all of its {slots} slots")
            )
        for slot in range(max(first, 0), min(end, slots)):
            counts[slot] += 1
    for slot, count in enumerate(counts):
        if count == 0:
            problems.append(Problem("gap", f"step {step}: slot {slot} was computed by no rank"))
        elif count > 1:
            problems.append(Problem("repeat", f"step {step}: slot {slot} was computed {count} times"))
    return problems
