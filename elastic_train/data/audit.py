"""Proof from the step log that every sample was used exactly once per epoch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Problem:
    """One departure: ``gap`` (something is missing), ``repeat`` (used twice) or ``foreign`` (no such sample)."""

    kind: Literal["gap", "repeat", "foreign"]
    message: str


def audit_samples(lines: Iterable[dict[str, Any]], num_samples: int) -> list[Problem]:
    """Problems in the ``samples`` of ``steps.jsonl`` lines, [] when there are none.

    A step that was rolled back and done again counts once: its last line does. Of an unfinished epoch only repeats
    can be told.
    """
    steps = {line["step"]: line for line in lines}
    problems: list[Problem] = []
    trace: list[int] = []
    for step in range(1, max(steps, default=0) + 1):
        if step not in steps:
            problems.append(Problem("gap", f"step {step} is missing"))
        elif "samples" not in steps[step]:
            problems.append(Problem("gap", f"step {step} has no samples; they are logged with log.samples: true"))
        else:
            trace += steps[step]["samples"]
    if problems:
        return problems  # epochs cannot be told apart in a trace with holes
    for start in range(0, len(trace), num_samples):
        problems += _audit_epoch(start // num_samples, trace[start : start + num_samples], num_samples)
    return problems


def _audit_epoch(epoch: int, ids: list[int], num_samples: int) -> list[Problem]:
    counts = Counter(ids)
    problems = [
        Problem("repeat", f"epoch {epoch}: sample {i} was used {n} times") for i, n in sorted(counts.items()) if n > 1
    ]
    problems += [
        Problem("foreign", f"epoch {epoch}: sample {i} is none of the {num_samples} samples")
        for i in sorted(counts)
        if not 0 <= i < num_samples
    ]
    if len(ids) == num_samples:
        missing = sorted(set(range(num_samples)) - counts.keys())
        problems += [Problem("gap", f"epoch {epoch}: sample {i} was never used") for i in missing]
    return problems
