from __future__ import annotations

import math

import pytest

from elastic_train.training.step_judge import History, StepJudge

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("loss", "norm", "bad"),
    [
        (1.0, 1.0, None),
        (NAN, 1.0, "loss is nan"),
        (1.0, INF, "grad_norm is inf"),
        (INF, NAN, "loss is inf, grad_norm is nan"),
        (1e30, 1e30, None),  # no factor: no spikes
    ],
)
def test_what_is_not_finite_is_bad(loss: float, norm: float, bad: str | None) -> None:
    assert StepJudge(4, None, None, History([1.0] * 4, [1.0] * 4)).judge(loss, norm) == bad


def test_a_spike_is_above_so_many_medians_of_the_last_good_steps() -> None:
    judge = StepJudge(3, 2.0, 4.0)
    assert [judge.judge(loss, 1.0) for loss in (9.0, 90.0, 5.0)] == [None] * 3  # too few to compare with
    assert judge.judge(18.0, 4.0) is None  # exactly 2 medians of 9, 90, 5, and 4 of 1
    assert judge.judge(36.1, 1.0) == "loss 36.1 is above 2 x 18, the median of 3"  # of 90, 5, 18
    assert judge.judge(36.0, 1.0) is None  # the bad one does not count
    assert judge.judge(1.0, 4.1) == "grad_norm 4.1 is above 4 x 1, the median of 3"


def test_whoever_gets_the_history_judges_as_whoever_made_it() -> None:
    values = [(2.0 + math.sin(7 * step), 1.0 + step % 5) for step in range(60)]
    whole = StepJudge(5, 1.2, 1.5)
    verdicts = [whole.judge(*value) for value in values]
    assert 5 < sum(verdict is not None for verdict in verdicts) < 55
    good = [value for value, verdict in zip(values[:30], verdicts[:30], strict=True) if verdict is None][-5:]
    later = StepJudge(5, 1.2, 1.5, History([loss for loss, _ in good], [norm for _, norm in good]))
    assert [later.judge(*value) for value in values[30:]] == verdicts[30:]
