"""``determinism: exact`` with every strategy, kind of model, optimizer and precision: the bits of the fewest ranks.

Every run also averages its weights and evaluates after its second and third step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from tests.ranks import run_ranks
from tests.training.exact_bits import Bits, bits
from tests.training.optimizer_runs import job_with_optimizer, train_and_evaluate
from tests.training.runs import assemble

STEPS = 3
Sections = dict[str, dict[str, Any]]


def job(changes: Sections) -> Job:
    """8 slots of 16 tokens: three data ranks have 3, 3 and 2 of them. Few sizes divide by 2 or by 3.

    The gradient is clipped in some of the steps, and there is no warm-up: weights change from the first step on.
    """
    values: Sections = {
        "model": {
            "num_hidden_layers": 2,
            "hidden_size": 28,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 50,
            "vocab_size": 71,
        },
        "data": {"sequence_length": 16},
        "training": {"steps": STEPS, "determinism": "exact", "ema_decay": 0.9},
        "evaluation": {"uri": "memory", "every_steps": 2, "samples": 7},
        "schedule": {"warmup_steps": 0},
    }
    for section, fields in changes.items():
        if section != "optimizer":
            values[section] = {**values.get(section, {}), **fields}
    optimizer = {"name": "adamw", "learning_rate": 1e-2, "clip_norm": 1.0} | changes.get("optimizer", {})
    return job_with_optimizer(optimizer.pop("name"), optimizer, **values)


@dataclass(frozen=True)
class Row:
    """``other`` must compute the bits of ``one``, which has all of ``parallel`` but ``context`` at its defaults."""

    name: str
    other: Layout
    one: Layout
    sections: Sections

    def __str__(self) -> str:
        return f"{self.name}, {self.other}"

    @property
    def truth(self) -> tuple[Job, Layout]:
        context = self.sections.get("parallel", {}).get("context", "gather")
        return job(self.sections | {"parallel": {"context": context}}), self.one

    @property
    def run(self) -> tuple[Job, Layout]:
        return job(self.sections), self.other


def row(name: str, other: Layout, *, one: Layout | None = None, **sections: dict[str, Any]) -> Row:
    return Row(name, other, one or Layout(), sections)


TIED = {"tie_word_embeddings": True}
DEEP = {"num_hidden_layers": 4}
TABLE = [
    row("ddp", Layout(dp_replicate=3), parallel={"data": "ddp"}),
    row("zero1", Layout(dp_shard=3), parallel={"data": "zero1"}),
    row("zero2", Layout(dp_replicate=2, dp_shard=2), parallel={"data": "zero2"}),
    row("zero3", Layout(dp_shard=3)),
    row("zero3, weights released", Layout(dp_shard=2, pp=2), parallel={"reshard_after_forward": True}),
    row("hsdp", Layout(dp_replicate=2, dp_shard=2), parallel={"data": "hsdp"}),
    row("gpipe", Layout(pp=2, dp_shard=2), parallel={"pipeline": "gpipe"}),
    row("interleaved", Layout(pp=2, dp_shard=2), model=DEEP, parallel={"pipeline": "interleaved_1f1b"}),
    row("tied", Layout(pp=2), model=TIED),
    row("tied", Layout(pp=2, dp_replicate=2), model=TIED),
    row("biases", Layout(pp=2, dp_shard=2), model={"qkv_bias": True}),
    row("documents", Layout(dp_shard=3), data={"document_mask": True}),
    row("recompute full", Layout(pp=2, dp_shard=2), training={"recompute": "full"}),
    row("cp gather", Layout(cp=2, dp_shard=2), one=Layout(cp=2)),
    row("cp ulysses", Layout(cp=2, dp_replicate=2), one=Layout(cp=2), parallel={"context": "ulysses"}),
    row("tp", Layout(tp=2, dp_shard=2), one=Layout(tp=2)),
    row("bf16, zero1", Layout(dp_shard=3), training={"precision": "bf16"}, parallel={"data": "zero1"}),
    row("bf16, zero3", Layout(dp_shard=3), training={"precision": "bf16"}),
    row("adam", Layout(dp_shard=3), optimizer={"name": "adam", "weight_decay": 0.1}),
    row("sgd", Layout(dp_shard=3), optimizer={"name": "sgd", "momentum": 0.9, "weight_decay": 0.1}),
    row("lion", Layout(dp_shard=3), optimizer={"name": "lion", "weight_decay": 0.1}),
    row("muon", Layout(dp_shard=3), optimizer={"name": "muon", "momentum": 0.9, "weight_decay": 0.1}),
]
MORE = [
    row("zero1", Layout(dp_replicate=2, dp_shard=2), parallel={"data": "zero1"}),
    row("1f1b", Layout(pp=2, dp_replicate=3)),
    row("tied", Layout(dp_shard=3), model=TIED),
    row("tied, interleaved", Layout(pp=2, dp_shard=2), model=TIED | DEEP, parallel={"pipeline": "interleaved_1f1b"}),
    row("documents", Layout(pp=2), data={"document_mask": True}),
    row("recompute selective", Layout(dp_shard=3), training={"recompute": "selective"}),
    row("micro-batches of two", Layout(dp_shard=3), training={"micro_batch": 2}),
    row("cp gather", Layout(cp=2, dp_shard=2, pp=2), one=Layout(cp=2)),
    row("tp, tied", Layout(tp=2, dp_shard=2, pp=2), one=Layout(tp=2), model=TIED),
    row("bf16, zero3", Layout(pp=2, dp_shard=2), training={"precision": "bf16"}),
    row("muon", Layout(pp=2, dp_replicate=2), optimizer={"name": "muon", "momentum": 0.9, "weight_decay": 0.1}),
    row("muon, bf16", Layout(dp_shard=3), optimizer={"name": "muon"}, training={"precision": "bf16"}),
]
EVALUATED = [
    (job(sections), layout)
    for layout in (Layout(), Layout(pp=2, dp_shard=2))
    for sections in ({}, {"evaluation": {"uri": None}})
]


def train_in_turn(rank: int, runs: list[tuple[Job, Layout]]) -> list[Any]:
    return [train_and_evaluate(rank, made, layout, STEPS, None) for made, layout in runs]


@lru_cache
def trained_by(ranks: int, more: bool) -> dict[tuple[str, Layout], Bits]:
    """All runs of a table on so many ranks, in the same processes, as starting them takes longer than the steps."""
    runs = [run for row in (MORE if more else TABLE) for run in (row.truth, row.run)]
    runs += [] if more else EVALUATED
    wanted = {(repr(made), layout): (made, layout) for made, layout in runs if layout.world_size == ranks}
    by_rank = run_ranks(train_in_turn, ranks, list(wanted.values()))
    found = {}
    for key, *results in zip(wanted, *by_rank, strict=True):
        metrics = results[0][0]
        assert all(repr(others) == repr(metrics) for others, _ in results), "ranks report different metrics"
        found[key] = bits(metrics, assemble([pieces for _, pieces in results]))
    return found


def trained(run: tuple[Job, Layout], *, more: bool = False) -> Bits:
    made, layout = run
    return trained_by(layout.world_size, more)[repr(made), layout]


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=str)
def test_three_steps_and_two_evaluations_have_the_same_bits(row: Row) -> None:
    """Losses, norms, evaluations, and the SHA-256 of every weight, moment and average."""
    assert trained(row.run) == trained(row.truth)


@pytest.mark.slow
@pytest.mark.parametrize("row", MORE, ids=str)
def test_more_rows_have_the_same_bits(row: Row) -> None:
    assert trained(row.run, more=True) == trained(row.truth, more=True)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(0, len(EVALUATED), 2))
def test_an_evaluation_changes_no_bit(index: int) -> None:
    """Nor does it go unnoticed: its losses are among the bits."""
    with_, without = (trained(run) for run in EVALUATED[index : index + 2])
    assert (without.losses, without.norms, without.state) == (with_.losses, with_.norms, with_.state)
    assert without.evaluations != with_.evaluations
