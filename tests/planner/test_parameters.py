"""Counts of parameters against the real modules."""

from __future__ import annotations

import math

import pytest

from elastic_train.config.layout import Layout
from elastic_train.config.lora import LoraConfig
from elastic_train.config.model import ModelConfig
from elastic_train.config.parallel import ParallelConfig
from elastic_train.config.presets import PRESETS
from elastic_train.model.lora import apply_lora
from elastic_train.model.transformer import Transformer
from elastic_train.parallel.shard import Cut, local_box
from elastic_train.parallel.tensor import tensor_dim
from elastic_train.planner.parameters import block_parameters, outer_parameters, parameters_by_kind, stages_of_ranks

SHAPES = {
    **PRESETS,
    "biased": PRESETS["tiny"] | {"qkv_bias": True, "head_dim": 10, "vocab_size": 255},
    "tied": PRESETS["tiny"] | {"tie_word_embeddings": True},
}


LORA = {"none": None, "two": LoraConfig(rank=3), "all": LoraConfig(target_modules="all-linear")}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("ends", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("lora", LORA)
def test_names_shapes_and_cuts_are_those_of_the_model(name: str, ends: tuple[bool, bool], lora: str) -> None:
    model = ModelConfig(**SHAPES[name])
    first, last = ends
    stage = Transformer(model, layers=range(3, 4), first=first, last=last)
    apply_lora(stage, LORA[lora])
    real = {name: (tuple(parameter.shape), parameter.requires_grad) for name, parameter in stage.named_parameters()}
    computed = {f"model.layers.3.{p.name}": p for p in block_parameters(model, LORA[lora])}
    computed |= {p.name: p for p in outer_parameters(model, first=first, last=last, lora=LORA[lora])}
    assert {name: (parameter.shape, parameter.trained) for name, parameter in computed.items()} == real
    assert all(parameter.tensor_dim == tensor_dim(name) for name, parameter in computed.items())
    for tp in (2, 3, 8):
        for index in range(tp):
            for parameter in computed.values():
                cuts = [] if parameter.tensor_dim is None else [Cut(parameter.tensor_dim, tp, index)]
                assert parameter.cut(tp, index) == local_box(parameter.shape, cuts).sizes


@pytest.mark.parametrize("name", SHAPES)
def test_pipeline_and_tensor_ranks_hold_the_whole_model(name: str) -> None:
    """Each parameter once; norms on every tensor rank, and a tied embedding on the first and the last stage."""
    model, parallel = ModelConfig(**SHAPES[name]), ParallelConfig()
    for layout in (Layout(), Layout(pp=2), Layout(tp=2), Layout(pp=4, tp=2)):
        held = [
            parameters_by_kind(model, parallel, layout, 32, pipeline_rank=rank, tensor_rank=index)
            for rank in range(layout.pp)
            for index in range(layout.tp)
        ]
        norms = sum(kinds.get("norms", 0) for kinds in held)
        others = sum(sum(kinds.values()) for kinds in held) - norms
        copy = model.vocab_size * model.hidden_size if model.tie_word_embeddings and layout.pp > 1 else 0
        assert others - copy + norms // layout.tp == model.num_parameters


def test_parts_of_units_are_those_of_the_first_shard() -> None:
    model = ModelConfig(**SHAPES["biased"])
    layout = Layout(dp_shard=7, tp=2)
    ((stage,),) = stages_of_ranks(model, ParallelConfig(), layout, 32)
    for unit, parameters in (
        (stage.block, block_parameters(model)),
        (stage.outer, outer_parameters(model, first=True, last=True)),
    ):
        boxes = []
        for parameter in parameters:
            cuts = [] if parameter.tensor_dim is None else [Cut(parameter.tensor_dim, 2, 0)]
            boxes.append(local_box(parameter.shape, [*cuts, Cut(0, 7, 0)]).sizes)
        assert unit.part == sum(math.prod(sizes) for sizes in boxes)
        assert unit.padded == 7 * unit.part > unit.whole


def test_mem_08_a_tied_embedding_counts_once_and_is_held_by_both_ends() -> None:
    model = ModelConfig(
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        vocab_size=128256,
        tie_word_embeddings=True,
    )
    assert model.num_parameters == 1_235_814_400
    assert sum(parameters_by_kind(model, ParallelConfig(), Layout(), 4096).values()) == 1_235_814_400
    first, last = (
        parameters_by_kind(model, ParallelConfig(), Layout(pp=2), 4096, pipeline_rank=rank) for rank in (0, 1)
    )
    assert first["embedding"] == last["head"] == 262_668_288
    assert "head" not in first and "embedding" not in last
    assert sum(first.values()) + sum(last.values()) == 1_235_814_400 + 262_668_288
