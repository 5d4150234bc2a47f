"""Published arithmetic of model state."""

from __future__ import annotations

import pytest

from elastic_train.planner.textbook import matrix_bytes, textbook_formula, textbook_state

GIB = 2**30


def total(parameters: float, strategy: str, ranks: int) -> float:
    return sum(textbook_state(parameters, strategy, ranks).values())  # type: ignore[arg-type]


def test_one_gpu_is_not_enough() -> None:
    assert total(70e9, "ddp", 1) == 1.12e12
    assert total(7e9, "ddp", 8) == 112e9


def test_zero_3_on_64_and_128_ranks() -> None:
    terms = textbook_state(70e9, "zero3", 64)
    in_gb = {term: size / 1e9 for term, size in terms.items()}
    assert in_gb == pytest.approx({"weights": 2.19, "gradients": 2.19, "optimizer": 13.13}, abs=0.0051)
    assert sum(terms.values()) == 17.5e9
    assert terms == textbook_state(70e9, "hsdp", 64)
    assert round(total(405e9, "zero3", 128) / 1e9, 1) == 50.6


def test_zero_1_and_2_on_four_ranks() -> None:
    assert total(1e9, "zero1", 4) == 7e9
    assert total(1e9, "zero2", 4) == 5.5e9


def test_a_large_matrix() -> None:
    assert round(matrix_bytes(16_384, 65_536) / 1e9, 2) == 2.15


FORMULAS = {
    "ddp": ("16P", 16, 0),
    "zero1": ("4P + 12P/N", 4, 12),
    "zero2": ("2P + 14P/N", 2, 14),
    "zero3": ("16P/N", 0, 16),
    "hsdp": ("16P/N", 0, 16),
}


@pytest.mark.parametrize("strategy", FORMULAS)
def test_formulas_name_their_bytes_per_parameter(strategy: str) -> None:
    formula, whole, shared = FORMULAS[strategy]
    assert textbook_formula(strategy) == formula  # type: ignore[arg-type]
    assert total(3e9, strategy, 6) == pytest.approx(3e9 * (whole + shared / 6))


def test_mem_01_state_of_a_7b_model_on_eight_gpus() -> None:
    per_gpu = {strategy: total(6_738_415_616, strategy, 8) / GIB for strategy in ("ddp", "zero2", "zero3")}
    assert {strategy: round(size, 2) for strategy, size in per_gpu.items()} == {
        "ddp": 100.41,
        "zero2": 23.53,
        "zero3": 12.55,
    }


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ((0, "zero3", 8), r"parameters=0 must be more than 0"),
        ((7e9, "zero3", 0), r"ranks=0 must be at least 1"),
        ((7e9, "zero4", 8), r"strategy=zero4 must be one of ddp, zero1, zero2, zero3, hsdp"),
    ],
)
def test_questions_without_an_answer(question: tuple[float, str, int], answer: str) -> None:
    with pytest.raises(ValueError, match=answer):
        total(*question)
