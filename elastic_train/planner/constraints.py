"""What a layout must satisfy for a model and a batch. Plain Python; every violation is listed, not only the first."""

from __future__ import annotations

from elastic_train.config.job import DataConfig, Job, ModelConfig, TrainingConfig
from elastic_train.config.layout import Layout


def check_layout(job: Job, layout: Layout) -> list[str]:
    """One sentence per violated constraint, each with both numbers; empty when the layout can run.

    ``vocab_size`` is free: embedding and head are cut unevenly when ``tp`` does not divide it.
    """
    model = job.model
    problems = _tensor_problems(model, job.data, layout) + _batch_problems(job.training, layout)
    if layout.pp > model.num_hidden_layers:
        problems.append(f"num_hidden_layers={model.num_hidden_layers} is smaller than pp={layout.pp}")
    if layout.pp > 1 and model.tie_word_embeddings:
        problems.append(f"tie_word_embeddings=true is not available with pp={layout.pp}; use pp=1")
    return problems + _context_problems(job, layout)


def _tensor_problems(model: ModelConfig, data: DataConfig, layout: Layout) -> list[str]:
    divided = {
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "intermediate_size": model.intermediate_size,
        "sequence_length": data.sequence_length,
    }
    return [
        f"{name}={value} is not divisible by tp={layout.tp}" for name, value in divided.items() if value % layout.tp
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
    if ranks > slots:
        return [
            f"{ranks} data ranks (dp_replicate={layout.dp_replicate} x dp_shard={layout.dp_shard}) exceed the "
            f"{slots} slots of global_batch={training.global_batch} / micro_batch={training.micro_batch}"
        ]
    micro_batches = micro_batches_per_rank(slots, ranks)
    if micro_batches < layout.pp:
        return [
            f"{micro_batches} micro-batches per data rank ({slots} slots over {ranks}) are fewer than pp={layout.pp}; "
            "the 1F1B schedule needs at least one per stage"
        ]
    return []


def micro_batches_per_rank(slots: int, data_ranks: int) -> int:
    """Micro-batches that every data rank runs (the last ones may be padding): ``ceil(slots / data_ranks)``."""
    return -(-slots // data_ranks)
