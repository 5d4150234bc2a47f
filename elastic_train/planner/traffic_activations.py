"""Exchanges of activations and their gradients: along tp, cp and pp, in every micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.planner.exchange import Collective, Exchange, Overlap, exchange
from elastic_train.planner.parameters import StageParameters
from elastic_train.planner.stage_split import stages_of_rank, total_stages

QKV = ("q_proj", "k_proj", "v_proj")


def activation_exchanges(
    job: Job, layout: Layout, number: int, stages: list[StageParameters], count: int
) -> list[Exchange]:
    """Of pipeline rank ``number`` with ``stages``, for ``count`` micro-batches."""
    blocks = sum(stage.blocks for stage in stages)
    found: list[Exchange] = []
    if layout.tp > 1:
        ends = any(stage.first for stage in stages), any(stage.last for stage in stages)
        found += _tensor(job, layout, blocks * count, count, *ends)
    if layout.cp > 1:
        first = any(stage.first for stage in stages)
        found += _context(job, layout, blocks * count, count if first and _stops_at(job, QKV) else 0)
    if layout.pp > 1:
        found += _pipeline(job, layout, number, count)
    return found


def compute_bytes(job: Job) -> int:
    """Of a number in the precision of compute; fp8 is a matter of single products inside bf16."""
    return 4 if job.training.precision == "fp32" else 2


def compute_dtype(job: Job) -> str:
    return "float32" if job.training.precision == "fp32" else "bfloat16"


def _tensor(job: Job, layout: Layout, passes: int, count: int, first: bool, last: bool) -> list[Exchange]:
    """Sequence parallelism (arXiv:2205.05198, section 4.2.2): two all-gathers and two reduce-scatters per block and
    direction. ``full`` recomputation repeats the forward ones but the last, after which nothing is needed any more.
    With a frozen embedding gradients end in the first block that is.
    """
    dtype, tokens = compute_dtype(job), job.training.micro_batch * job.data.sequence_length // layout.cp
    payload = tokens * job.model.hidden_size * compute_bytes(job)
    again = job.training.recompute == "full"

    def tokens_of(what: str, collective: Collective, times: int) -> Exchange:
        return exchange(layout, "tp", what, collective, times, payload, dtype)

    gathers, sums = passes * (4 + 2 * again), passes * (4 + again)
    if first and job.lora is not None:
        whole = _stops_at(job, (*QKV, "o_proj"))
        gathers, sums = gathers - count * whole, sums - count * (1 + whole)
    found = [
        tokens_of("tokens gathered for attention and feed-forward", "all_gather", gathers),
        tokens_of("sums of attention and feed-forward", "reduce_scatter", sums),
    ]
    if first:
        found.append(tokens_of("embedding", "reduce_scatter", count))
        found.append(tokens_of("embedding's gradient", "all_gather", count if job.lora is None else 0))
    if last:
        found += [tokens_of("tokens gathered for the head", "all_gather", count)]
        found += [tokens_of("gradient of the head's input", "reduce_scatter", count)]
        # Largest logit of each token; then the sums of exponentials and the target's logit together.
        for what, each in (("largest logits", 1), ("sums of exponentials and target logits", 2)):
            found.append(exchange(layout, "tp", what, "all_reduce", count, each * tokens * 4, "float32"))
    return found


def _stops_at(job: Job, projections: Sequence[str]) -> bool:
    """Whether the first block has no gradients in front of its parts after ``projections``: all that is is frozen."""
    return job.lora is not None and not set(projections) & set(job.lora.targets)


def _context(job: Job, layout: Layout, passes: int, forwards: int) -> list[Exchange]:
    """``gather``: keys and values of the whole sequence, their gradients back (arXiv:2407.21783, section 3.3.2).
    ``ulysses``: heads for tokens before attention, and back after it (arXiv:2309.14509). ``forwards``: so many of the
    ``passes`` have no backward pass.
    """
    model, dtype = job.model, compute_dtype(job)
    width = job.training.micro_batch * job.data.sequence_length * model.head_size * compute_bytes(job) // layout.tp
    keys, queries = 2 * model.num_key_value_heads * width, model.num_attention_heads * width
    again = job.training.recompute
    if job.parallel.context == "gather":
        gathered = passes + (passes - forwards) * (again != "none")
        return [
            exchange(layout, "cp", "keys and values", "all_gather", gathered, keys, dtype),
            exchange(layout, "cp", "gradients of keys and values", "reduce_scatter", passes - forwards, keys, dtype),
        ]
    # Recomputing the core alone needs no output: torch stops before the second exchange.
    backwards = passes - forwards
    to_heads, to_tokens = passes + backwards * (1 + (again != "none")), passes + backwards * (1 + (again == "full"))
    held = layout.cp
    return [
        exchange(
            layout, "cp", "heads of q, k and v for tokens", "all_to_all", to_heads, (queries + keys) // held, dtype
        ),
        exchange(layout, "cp", "tokens of the output for heads", "all_to_all", to_tokens, queries // held, dtype),
    ]


def _pipeline(job: Job, layout: Layout, number: int, count: int) -> list[Exchange]:
    """Activations to the next stage, gradients to the one before, unless that is on the same rank (zbv's turn)."""
    parallel, last = job.parallel, total_stages(job.parallel, layout.pp) - 1
    own = set(stages_of_rank(parallel, layout.pp, number))
    tokens = job.training.micro_batch * job.data.sequence_length // (layout.cp * layout.tp)
    payload, dtype = tokens * job.model.hidden_size * compute_bytes(job), compute_dtype(job)
    forward = sum(stage < last and stage + 1 not in own for stage in own)
    backward = sum(stage > 0 and stage - 1 not in own for stage in own)
    # gpipe and 1f1b wait for each send and receive in turn; the others post them ahead.
    overlaps: Overlap = "nothing" if parallel.stages_per_rank == 1 and not parallel.splits_backward else "other passes"
    return [
        exchange(layout, "pp", "activations to the next stage", "send", count * forward, payload, dtype, overlaps),
        exchange(layout, "pp", "gradients to the stage before", "send", count * backward, payload, dtype, overlaps),
    ]
