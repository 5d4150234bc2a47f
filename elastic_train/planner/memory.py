"""An estimate of the bytes that the fullest rank of a layout holds on its device, to be held against ``hosts.memory``.

State is the table of docs/parallelism.md: 16 bytes per parameter (18 with bf16 compute and fp32 reduction), divided as
the data strategy divides it, plus what ``zero3`` gathers during a step. Activations are ``planner.activations`` for
the micro-batches that are in flight, plus the logits of one. Snapshot images, buffers of collectives and what the
allocator wastes are not counted.
"""

from __future__ import annotations

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.planner.activations import FLOAT32, block_bytes
from elastic_train.planner.constraints import micro_batches_per_rank
from elastic_train.planner.stage_split import layer_costs, split_layers, stages_of_rank, total_stages


def memory_bytes(job: Job, layout: Layout) -> int:
    """Bytes of the pipeline rank that needs most."""
    parallel, model = job.parallel, job.model
    stages = total_stages(parallel, layout.pp)
    costs = layer_costs(model, job.data.sequence_length)
    layers = [len(part) for part in split_layers(model.num_hidden_layers, stages, costs)]
    embedding = model.vocab_size * model.hidden_size
    block = (model.num_parameters - embedding * (1 if model.tie_word_embeddings else 2)) // model.num_hidden_layers
    most = 0
    for rank in range(layout.pp):
        own = stages_of_rank(parallel, layout.pp, rank)
        count = sum(layers[stage] for stage in own)
        ends = {0, stages - 1} & set(own)
        tables = 1 if model.tie_word_embeddings and len(ends) == 2 else len(ends) if stages > 1 else 2
        parameters = (count * block + tables * embedding) // layout.tp
        needed = _state_bytes(job, layout, parameters, block // layout.tp) + count * _activation_bytes(job, layout)
        if stages - 1 in own:
            tokens = job.training.micro_batch * job.data.sequence_length // layout.cp
            needed += 2 * tokens * model.vocab_size // layout.tp * FLOAT32  # logits and their gradient
        most = max(most, needed)
    return most


def _state_bytes(job: Job, layout: Layout, parameters: int, block: int) -> int:
    training, parallel = job.training, job.parallel
    whole = 4 if training.precision == "fp32" else 2
    gradient = 4 if training.reduce_dtype == "fp32" else 2
    ranks = layout.shards
    master = 8 if whole == 4 else 12
    """float32 moments, and with another precision of compute the master weights"""
    if parallel.data == "ddp" or (ranks == 1 and parallel.data in ("zero3", "hsdp")):
        per_parameter = whole + gradient + float(master)
    elif parallel.data == "zero1":
        per_parameter = whole + gradient + master / ranks
    elif parallel.data == "zero2":
        per_parameter = whole + (gradient + master) / ranks
    else:
        per_parameter = 16 / ranks + (0 if parallel.reshard_after_forward else whole + gradient)
    if training.ema_decay is not None:
        per_parameter += 4 / (1 if parallel.data == "ddp" else ranks)
    if training.determinism == "exact":
        per_parameter += 8
    gathered = (2 + parallel.prefetch) * block * whole if parallel.reshard_after_forward and ranks > 1 else 0
    return int(parameters * per_parameter) + gathered


def _activation_bytes(job: Job, layout: Layout) -> int:
    """Of one block, for the micro-batches that a rank has in flight: all of them with gpipe, else about one a stage."""
    training = job.training
    count = micro_batches_per_rank(job, layout)
    flying = 1 if layout.pp == 1 else count if job.parallel.pipeline == "gpipe" else min(count, layout.pp)
    terms = block_bytes(
        job.model,
        layout,
        sequence=job.data.sequence_length,
        batch=training.micro_batch,
        number_bytes=4 if training.precision == "fp32" else 2,
        recompute=training.recompute,
        context=job.parallel.context,
        fused_norm=job.hosts.device == "cuda",
    )
    return flying * sum(terms.values())
