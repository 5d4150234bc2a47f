"""Which parameters a pipeline stage holds, how tensor parallelism and sharding cut them, and how many that makes.

Exact: names, shapes and cuts are those of ``model.transformer`` and ``parallel.tensor``, which the tests compare. Cuts
are those of ``torch.chunk``: ``ceil(size / parts)`` in dim 0 of what tensor parallelism leaves, so the first rank of
each axis holds most. That rank is meant wherever none is named.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from elastic_train.config.layout import Layout
from elastic_train.config.lora import LoraConfig
from elastic_train.config.model import ModelConfig
from elastic_train.config.parallel import ParallelConfig
from elastic_train.planner.stage_split import layer_costs, split_layers, stages_of_rank

Kind = Literal["embedding", "attention", "feed-forward", "norms", "head", "adapters"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor of a block (``self_attn.q_proj.weight``) or one outside the blocks (``lm_head.weight``), whole.

    ``tensor_dim``: the dim that tensor parallelism cuts, None if every tensor rank holds all of it.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    tensor_dim: int | None
    trained: bool = True

    def cut(self, tp: int, index: int = 0) -> tuple[int, ...]:
        """The shape that tensor rank ``index`` of ``tp`` holds."""
        return tuple(_chunk(size, tp, index) if dim == self.tensor_dim else size for dim, size in enumerate(self.shape))


def _chunk(size: int, parts: int, index: int) -> int:
    step = -(-size // parts)
    return min((index + 1) * step, size) - min(index * step, size)


def block_parameters(model: ModelConfig, lora: LoraConfig | None = None) -> Iterator[Parameter]:
    """Those of one block, the adapters of ``lora`` behind the others, which are frozen with it."""
    if lora is None:
        yield from _block(model)
        return
    for parameter in _block(model):
        yield replace(parameter, trained=False)
    for parameter in _block(model):
        module = parameter.name.removesuffix(".weight")
        if module.rpartition(".")[2] in lora.targets:
            outputs, inputs = parameter.shape
            by_rows = parameter.tensor_dim == 0
            yield Parameter(f"{module}.lora_A.weight", "adapters", (lora.rank, inputs), None if by_rows else 1)
            yield Parameter(f"{module}.lora_B.weight", "adapters", (outputs, lora.rank), 0 if by_rows else None)


def _block(model: ModelConfig) -> Iterator[Parameter]:
    """In the order in which the module has them."""
    hidden, inner = model.hidden_size, model.intermediate_size
    queries, keys = model.num_attention_heads * model.head_size, model.num_key_value_heads * model.head_size
    yield Parameter("input_layernorm.weight", "norms", (hidden,), None)
    for name, width in (("q", queries), ("k", keys), ("v", keys)):
        yield Parameter(f"self_attn.{name}_proj.weight", "attention", (width, hidden), 0)
        if model.qkv_bias:
            yield Parameter(f"self_attn.{name}_proj.bias", "attention", (width,), 0)
    yield Parameter("self_attn.o_proj.weight", "attention", (hidden, queries), 1)
    yield Parameter("post_attention_layernorm.weight", "norms", (hidden,), None)
    for name in ("gate", "up"):
        yield Parameter(f"mlp.{name}_proj.weight", "feed-forward", (inner, hidden), 0)
    yield Parameter("mlp.down_proj.weight", "feed-forward", (hidden, inner), 1)


def block_size(model: ModelConfig) -> int:
    """Elements of one block."""
    return sum(math.prod(parameter.shape) for parameter in block_parameters(model))


def adapter_elements(model: ModelConfig, lora: LoraConfig | None) -> int:
    """Numbers in the adapters of the whole model."""
    block = sum(math.prod(each.shape) for each in block_parameters(model, lora) if each.kind == "adapters")
    return model.num_hidden_layers * block


def outer_parameters(
    model: ModelConfig, *, first: bool, last: bool, lora: LoraConfig | None = None
) -> Iterator[Parameter]:
    """Those of a stage that are outside its blocks. A head tied to an embedding of the same stage is not another one.

    A tied head on a stage of its own is a copy, under its own name here. With ``lora`` all of them are frozen.
    """
    table = (model.vocab_size, model.hidden_size)
    trained = lora is None
    if first:
        yield Parameter("model.embed_tokens.weight", "embedding", table, 0, trained)
    if last:
        yield Parameter("model.norm.weight", "norms", (model.hidden_size,), None, trained)
    if last and not (first and model.tie_word_embeddings):
        yield Parameter("lm_head.weight", "head", table, 0, trained)


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that are gathered and reduced together: those of a block, or those of a stage outside its blocks.

    All in elements of one tensor rank. ``padded``: what a gathering of equal parts moves and takes.
    """

    whole: int
    part: int
    """of the first of the ranks that shard"""
    padded: int
    largest: int
    """of the largest tensor"""
    matrices: int
    """of those with two dims"""
    matrices_part: int
    """of the first of the ranks that shard"""
    pinned: int
    """bytes of ``part`` in float32 in pinned memory, where every tensor takes a power of two"""
    gradients: Unit | None = None
    """of the tensors that are trained; None: all are"""

    @property
    def trained(self) -> Unit:
        """Of the tensors that get gradients."""
        return self if self.gradients is None else self.gradients


def _unit(parameters: Iterator[Parameter], tp: int, shards: int) -> Unit:
    every = list(parameters)
    trained = [parameter for parameter in every if parameter.trained]
    unit = _sizes(every, tp, shards)
    return unit if len(trained) == len(every) else replace(unit, gradients=_sizes(trained, tp, shards))


def _sizes(parameters: list[Parameter], tp: int, shards: int) -> Unit:
    sizes: list[tuple[int, int, bool]] = []
    for parameter in parameters:
        rows, *rest = parameter.cut(tp)
        row = math.prod(rest)
        sizes.append((rows * row, -(-rows // shards) * row, bool(rest)))
    part = sum(own for _, own, _ in sizes)
    return Unit(
        whole=sum(size for size, _, _ in sizes),
        part=part,
        padded=part * shards,
        largest=max((size for size, _, _ in sizes), default=0),
        matrices=sum(size for size, _, matrix in sizes if matrix),
        matrices_part=sum(own for _, own, matrix in sizes if matrix),
        pinned=sum(1 << (4 * own - 1).bit_length() for _, own, _ in sizes),
    )


@dataclass(frozen=True, slots=True)
class StageParameters:
    """One pipeline stage of one rank: ``blocks`` times ``block``, and ``outer``."""

    stage: int
    blocks: int
    block: Unit
    outer: Unit
    first: bool
    last: bool

    @property
    def trained(self) -> StageParameters:
        """Without what is frozen."""
        if self.block.gradients is None and self.outer.gradients is None:
            return self
        return replace(self, block=self.block.trained, outer=self.outer.trained)

    @property
    def whole(self) -> int:
        return self.blocks * self.block.whole + self.outer.whole

    @property
    def part(self) -> int:
        return self.blocks * self.block.part + self.outer.part

    @property
    def padded(self) -> int:
        return self.blocks * self.block.padded + self.outer.padded


@lru_cache(maxsize=4096)
def _layers(model: ModelConfig, sequence: int, stages: int) -> tuple[int, ...]:
    """Blocks of every stage."""
    return tuple(len(part) for part in split_layers(model.num_hidden_layers, stages, layer_costs(model, sequence)))


class RankBlocks(NamedTuple):
    """What a pipeline rank holds, whatever its size."""

    blocks: int
    stages: int
    first: bool
    last: bool


@lru_cache(maxsize=4096)
def blocks_of_ranks(
    model: ModelConfig, sequence: int, pipeline: str, virtual_stages: int, pp: int
) -> tuple[RankBlocks, ...]:
    """Of every pipeline rank; none if there is no block for every stage."""
    dealt = _dealt(pipeline, virtual_stages, pp)
    stages = sum(map(len, dealt))
    if stages > model.num_hidden_layers:
        return ()
    counts = _layers(model, sequence, stages)
    return tuple(
        RankBlocks(sum(counts[stage] for stage in held), len(held), held[0] == 0, held[-1] == stages - 1)
        for held in dealt
    )


@lru_cache(maxsize=4096)
def units_of(
    model: ModelConfig, tp: int, shards: int, lora: LoraConfig | None = None
) -> tuple[Unit, dict[tuple[bool, bool], Unit]]:
    """Of a block, and outside the blocks by whether a stage is the first, and the last one."""
    outer = {
        (first, last): _unit(outer_parameters(model, first=first, last=last, lora=lora), tp, shards)
        for first in (False, True)
        for last in (False, True)
    }
    return _unit(block_parameters(model, lora), tp, shards), outer


def stages_of_ranks(
    model: ModelConfig, parallel: ParallelConfig, layout: Layout, sequence: int, lora: LoraConfig | None = None
) -> list[list[StageParameters]]:
    """For every pipeline rank the stages that it holds. ``sequence``: tokens, which decide how layers are split."""
    return _stages_of_ranks(
        model, lora, sequence, parallel.pipeline, parallel.virtual_stages, layout.pp, layout.tp, layout.shards
    )


@lru_cache(maxsize=4096)
def _stages_of_ranks(
    model: ModelConfig,
    lora: LoraConfig | None,
    sequence: int,
    pipeline: str,
    virtual_stages: int,
    pp: int,
    tp: int,
    shards: int,
) -> list[list[StageParameters]]:
    """Remembered for searches, which ask for the same ones with many options."""
    dealt = _dealt(pipeline, virtual_stages, pp)
    stages = sum(map(len, dealt))
    block, outer = units_of(model, tp, shards, lora)
    every = [
        StageParameters(stage, count, block, outer[stage == 0, stage == stages - 1], stage == 0, stage == stages - 1)
        for stage, count in enumerate(_layers(model, sequence, stages))
    ]
    return [[every[stage] for stage in held] for held in dealt]


@lru_cache(maxsize=1024)
def _dealt(pipeline: str, virtual_stages: int, pp: int) -> list[list[int]]:
    """The stages of every pipeline rank."""
    parallel = ParallelConfig.model_construct(pipeline=pipeline, virtual_stages=virtual_stages)  # type: ignore[arg-type]
    return [stages_of_rank(parallel, pp, rank) for rank in range(pp)]


def parameters_by_kind(
    model: ModelConfig,
    parallel: ParallelConfig,
    layout: Layout,
    sequence: int,
    *,
    pipeline_rank: int = 0,
    tensor_rank: int = 0,
) -> dict[Kind, int]:
    """Elements that a rank computes with, before sharding; kinds that it has none of are left out."""
    found: Counter[Kind] = Counter()
    for held in stages_of_ranks(model, parallel, layout, sequence)[pipeline_rank]:
        for parameter in block_parameters(model):
            found[parameter.kind] += held.blocks * math.prod(parameter.cut(layout.tp, tensor_rank))
        for parameter in outer_parameters(model, first=held.first, last=held.last):
            found[parameter.kind] += math.prod(parameter.cut(layout.tp, tensor_rank))
    return dict(found)
