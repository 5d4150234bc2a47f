"""What a layout must satisfy for a model and a batch. Plain Python; every violation is listed, not only the first."""

from __future__ import annotations

import math

from elastic_train.config.data import DataConfig
from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.model import ModelConfig
from elastic_train.config.training import TrainingConfig
from elastic_train.planner.stage_split import total_stages


def check_layout(job: Job, layout: Layout) -> list[str]:
    """One sentence per violated constraint, each with both numbers; empty when the layout can run.

    ``tp`` need not divide ``vocab_size``: embedding and head are then cut unevenly, with some tokens for each rank.
    """
    problems = _tensor_problems(job.model, job.data, layout) + _batch_problems(job.training, layout)
    problems += _data_problems(job, layout) + _float8_problems(job, layout) + _context_problems(job, layout)
    problems += _exact_problems(job, layout)
    if layout.pp > 1:
        problems += _schedule_problems(job, layout) + _stage_problems(job, layout)
    return problems


def violated(job: Job, layout: Layout) -> tuple[str, str] | None:
    """(what limits, sentence) of the first constraint that is violated; None if there is none."""
    problems = check_layout(job, layout)
    if not problems:
        return None
    name, equals, _ = problems[0].partition("=")
    return (name if equals and name.isidentifier() else "global_batch"), problems[0]


def _tensor_problems(model: ModelConfig, data: DataConfig, layout: Layout) -> list[str]:
    divided = {
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "intermediate_size": model.intermediate_size,
        "sequence_length": data.sequence_length,
    }
    largest = math.gcd(*divided.values())
    problems = [
        f"{name}={value} is not divisible by tp={layout.tp} (largest tp of this model: {largest})"
        for name, value in divided.items()
        if value % layout.tp
    ]
    each = -(-model.vocab_size // layout.tp)
    if each * (layout.tp - 1) >= model.vocab_size:
        problems.append(
            f"vocab_size={model.vocab_size} over tp={layout.tp} is {each} tokens a rank, and none for the last one"
        )
    return problems


def _data_problems(job: Job, layout: Layout) -> list[str]:
    if job.parallel.data == "ddp" and layout.dp_shard > 1:
        return [f"dp_shard={layout.dp_shard} must be 1 with data=ddp, which shards nothing; use dp_replicate"]
    return []


def _float8_problems(job: Job, layout: Layout) -> list[str]:
    """Every dim of a product in fp8 is a multiple of 16: inputs, outputs, and tokens (in the weight's gradient)."""
    if job.training.precision != "fp8":
        return []
    model, tp = job.model, layout.tp
    sizes = {
        "hidden_size": (model.hidden_size, 1),
        "num_attention_heads x head_dim": (model.num_attention_heads * model.head_size, tp),
        "num_key_value_heads x head_dim": (model.num_key_value_heads * model.head_size, tp),
        "intermediate_size": (model.intermediate_size, tp),
        "micro_batch x sequence_length": (job.training.micro_batch * job.data.sequence_length, layout.cp),
    }
    return [
        f"{name}={size}{f' over {parts} ranks' if parts > 1 else ''} is not a multiple of 16, as precision=fp8 needs"
        for name, (size, parts) in sizes.items()
        if size % (16 * parts)
    ]


def _context_problems(job: Job, layout: Layout) -> list[str]:
    """``gather`` cuts a sequence into 2 x cp chunks; ``ulysses`` gives every rank some heads of each kind."""
    length, tp, cp = job.data.sequence_length, layout.tp, layout.cp
    if cp == 1:
        return []
    problems = []
    kind = job.parallel.context
    factor, chunks = ("2 x cp", 2 * cp) if kind == "gather" else ("cp", cp)
    if length % chunks:
        problems.append(f"sequence_length={length} is not divisible by {factor}={chunks}, the chunks of context={kind}")
    if tp > 1 and length % (cp * tp):
        problems.append(f"sequence_length={length} is not divisible by cp x tp={cp * tp}")
    if kind == "ulysses":
        problems += _head_problems(job.model, layout)
    return problems


def _head_problems(model: ModelConfig, layout: Layout) -> list[str]:
    ranks = layout.tp * layout.cp
    most = model.num_key_value_heads // layout.tp
    heads = {"num_attention_heads": model.num_attention_heads, "num_key_value_heads": model.num_key_value_heads}
    return [
        f"{name}={count} is not divisible by tp x cp={ranks}, as context=ulysses needs; "
        f"the largest cp that would do is {most}, and context=gather takes any"
        for name, count in heads.items()
        if count % ranks and model.num_key_value_heads % layout.tp == 0
    ]


def _batch_problems(training: TrainingConfig, layout: Layout) -> list[str]:
    slots, ranks = training.slots, layout.data_ranks
    if ranks <= slots:
        return []
    return [
        f"{ranks} data ranks (dp_replicate={layout.dp_replicate} x dp_shard={layout.dp_shard}) exceed the "
        f"{slots} slots of global_batch={training.global_batch} / micro_batch={training.micro_batch}"
    ]


def _schedule_problems(job: Job, layout: Layout) -> list[str]:
    """Too few micro-batches for the schedule."""
    slots, ranks, name = job.training.slots, layout.data_ranks, job.parallel.pipeline
    count = -(-slots // ranks)
    if name == "gpipe" or ranks > slots or count >= layout.pp:
        return []
    return [
        f"{count} micro-batches per data rank ({slots} slots over {ranks}) are fewer than pp={layout.pp}; "
        f"pipeline={name} needs at least one per rank, gpipe does not"
    ]


def _stage_problems(job: Job, layout: Layout) -> list[str]:
    """What a pipeline's stages cannot be made of."""
    model, parallel = job.model, job.parallel
    stages, name = total_stages(parallel, layout.pp), parallel.pipeline
    problems = []
    if stages > model.num_hidden_layers:
        each = f" x {parallel.stages_per_rank} stages per rank of {name} = {stages}" if stages > layout.pp else ""
        problems.append(f"num_hidden_layers={model.num_hidden_layers} is smaller than pp={layout.pp}{each}")
    if model.tie_word_embeddings and name == "zbv":
        problems.append(
            f"tie_word_embeddings=true is not available with pipeline=zbv and pp={layout.pp}: the first and the last "
            "stage share a rank, as two modules that cannot share a weight; use zero_bubble"
        )
    if parallel.splits_backward and parallel.reshard_after_forward:
        problems.append(
            f"reshard_after_forward=true is not available with pipeline={name} and pp={layout.pp}: torch finds the "
            "weights of a stage for the second half of its backward pass only while they are gathered"
        )
    if parallel.splits_backward and job.lora is not None:
        problems.append(
            f"pipeline={name} with pp={layout.pp} is not available with lora: there are hardly any gradients of "
            "weights to be put off; use gpipe, 1f1b or interleaved_1f1b"
        )
    if parallel.splits_backward and job.training.compile:
        problems.append(
            f"compile=true is not available with pipeline={name} and pp={layout.pp}: torch does not split the backward "
            "pass of compiled blocks"
        )
    if parallel.splits_backward and job.training.precision != "fp32" and job.training.reduce_dtype == "fp32":
        problems.append(
            f"reduce_dtype=fp32 is not available with pipeline={name}, pp={layout.pp} and precision="
            f"{job.training.precision}: torch adds the gradients of the micro-batches in bf16; use reduce_dtype=bf16"
        )
    if parallel.splits_backward and job.training.recompute == "full":
        problems.append(
            f"recompute=full is not available with pipeline={name} and pp={layout.pp}: a block would be computed anew "
            "for each of its weights; use selective"
        )
    return problems


def _exact_problems(job: Job, layout: Layout) -> list[str]:
    name = job.parallel.pipeline
    if job.training.determinism == "default" or layout.pp == 1 or not job.parallel.splits_backward:
        return []
    return [
        f"pipeline={name} with pp={layout.pp} is not available with determinism=exact, which needs every backward "
        "pass in one piece; use gpipe, 1f1b or interleaved_1f1b"
    ]


def micro_batches_per_rank(job: Job, layout: Layout) -> int:
    """Micro-batches that every data rank runs in a step; those beyond its slots are padding.

    ``ceil(slots / data ranks)``; torch's interleaved schedules run ``max(1, m // pp)`` rounds of equally many, so with
    them the next number that makes equal rounds: 11 on pp=4 become 12.
    """
    return equal_rounds(-(-job.training.slots // layout.data_ranks), layout.pp, job.parallel.pipeline)


def equal_rounds(count: int, pp: int, pipeline: str) -> int:
    """``count`` micro-batches with those that fill up the last round of an interleaved schedule."""
    if pp > 1 and pipeline in ("interleaved_1f1b", "zero_bubble"):
        while count % max(1, count // pp):
            count += 1
    return count
