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
    if layout.cp > 1:
        problems.append(f"cp={layout.cp} is not available; use cp=1")
    return problems + _exact_problems(job, layout)


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


def _exact_problems(job: Job, layout: Layout) -> list[str]:
    name = job.parallel.pipeline
    if job.training.determinism == "default" or layout.pp == 1 or name != "zero_bubble":
        return []
    return [
        f"pipeline={name} with pp={layout.pp} is not available with determinism=exact, which needs every backward "
        "pass in one piece; use gpipe, 1f1b or interleaved_1f1b"
    ]


def micro_batches_per_rank(slots: int, data_ranks: int) -> int:
    """Micro-batches that every data rank runs (the last ones may be padding): ``ceil(slots / data_ranks)``."""
    return -(-slots // data_ranks)
