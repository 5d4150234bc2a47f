"""Floating point operations of training, a multiplication and an addition being two: by rule of thumb, and exactly.

``model`` operations are what the mathematics needs, each once; ``hardware`` operations are what is computed, with what
recomputation, the attention kernel's backward pass and padding add. MFU is made of the former, HFU of the latter
(arXiv:2204.02311, appendix B; arXiv:2205.05198, section 6.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.lora import LoraConfig
from elastic_train.config.model import ModelConfig
from elastic_train.planner.constraints import micro_batches_per_rank
from elastic_train.planner.parameters import adapter_elements

Attention = Literal["full", "causal"]
"""Whether a query is counted with all keys, as published MFUs do, or only with those that it sees."""
DAY = 86_400.0
"""seconds"""


def seen_keys(sequence_length: int, attention: Attention) -> float:
    """Keys that a query is counted with, on average over a sequence."""
    return float(sequence_length) if attention == "full" else (sequence_length + 1) / 2


def computed_keys(job: Job, layout: Layout) -> float:
    """Keys whose scores kernels compute for a query, on average: torch skips the others only with ``is_causal``.

    Under the mask of ``context=gather`` those after a chunk's last query: on every rank r two chunks of c queries see
    (r + 1) c and (2 cp - r) c keys. Under a mask of documents none.
    """
    length = job.data.sequence_length
    if layout.cp > 1 and job.parallel.context == "gather":
        return (2 * layout.cp + 1) * length / (4 * layout.cp)
    return seen_keys(length, "full" if job.data.separates_documents else "causal")


def six_pd(parameters: float, tokens: float) -> float:
    """``C = 6 P D`` operations (arXiv:2001.08361, section 2.1): two forward and four backward per weight and token.

    Left out: attention between tokens. Counted too much: the embedding, in which a token only looks up a row.
    """
    return 6.0 * parameters * tokens


def seconds_for(flops: float, flops_per_second: float) -> float:
    """How long ``flops`` take at a *sustained* rate of the whole cluster. Raises ValueError for a rate of 0."""
    if flops_per_second <= 0:
        raise ValueError(f"flops_per_second={flops_per_second} must be more than 0")
    return flops / flops_per_second


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    """Of the forward pass, per token."""

    projections: int
    """q, k, v and o of all blocks"""
    attention: float
    """products of queries with keys and of probabilities with values, of all blocks"""
    feed_forward: int
    head: int
    adapters: int = 0
    """of all blocks"""

    @property
    def total(self) -> float:
        return self.projections + self.attention + self.feed_forward + self.head + self.adapters

    @property
    def with_weights(self) -> float:
        """Of the products with matrices of the model."""
        return self.projections + self.feed_forward + self.head


@lru_cache(maxsize=1024)
def forward_flops(model: ModelConfig, keys: float, lora: LoraConfig | None = None) -> ForwardFlops:
    """Exact for matrix products (a test counts them with torch's ``FlopCounterMode``); the others are not counted.

    ``keys``: those that a query sees, on average over the tokens.
    """
    layers, hidden = model.num_hidden_layers, model.hidden_size
    queries, values = model.num_attention_heads * model.head_size, model.num_key_value_heads * model.head_size
    return ForwardFlops(
        projections=layers * 2 * hidden * (2 * queries + 2 * values),
        attention=layers * 4 * queries * keys,
        feed_forward=layers * 6 * hidden * model.intermediate_size,
        head=2 * hidden * model.vocab_size,
        adapters=2 * adapter_elements(model, lora),
    )


def model_flops_per_token(job: Job, attention: Attention) -> float:
    """Forward and backward of what the mathematics needs.

    With ``lora`` the first block needs no gradient of its input; what that saves is not taken off.
    """
    return _with_backward(job, seen_keys(job.data.sequence_length, attention))


def _with_backward(job: Job, keys: float) -> float:
    """Every product of the forward pass has two in the backward pass, of a frozen matrix one."""
    forward = forward_flops(job.model, keys, job.lora)
    return 3 * forward.total - (forward.with_weights if job.lora else 0)


def backward_extra(job: Job, keys: float) -> float:
    """What the backward pass of all blocks computes anew, per token.

    The flash kernel makes the scores again: one product, where the forward pass has two. ``selective`` runs the
    attention core again, ``full`` the block up to the input of its last product, where torch stops: nothing needs more.
    """
    model, lora = job.model, job.lora
    forward = forward_flops(model, keys, lora)
    last = forward.feed_forward / 3
    if lora is not None and "down_proj" in lora.targets:
        last = model.num_hidden_layers * 2 * lora.rank * model.hidden_size
    again = {
        "none": 0.0,
        "selective": forward.attention,
        "full": forward.projections + forward.attention + forward.feed_forward + forward.adapters - last,
    }
    return forward.attention / 2 + again[job.training.recompute]


def hardware_flops_per_token(job: Job, keys: float) -> float:
    """Per token that is computed, padding or not, with ``keys`` for each query."""
    return _with_backward(job, keys) + backward_extra(job, keys)


def tokens_per_step(job: Job) -> int:
    """Of the global batch."""
    return job.training.global_batch * job.data.sequence_length


def computed_tokens(job: Job, layout: Layout) -> int:
    """Of a step, with the padding that makes all data ranks run equally many micro-batches."""
    count = micro_batches_per_rank(job, layout) * layout.data_ranks
    return count * job.training.micro_batch * job.data.sequence_length


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Shares of the peak of all accelerators: ``mfu`` of model operations, ``hfu`` of all that are computed."""

    mfu: float
    mfu_causal: float
    hfu: float


def utilisation(job: Job, layout: Layout, *, seconds: float, peak: float) -> Utilisation:
    """Of a step that takes ``seconds``. ``peak``: FLOP/s of one accelerator.

    ``mfu`` counts attention in full, as published figures do (arXiv:2204.02311); ``mfu_causal`` what is
    needed, ``hfu`` what kernels compute.
    """
    most = seconds * peak * layout.world_size
    useful, computed = tokens_per_step(job), computed_tokens(job, layout)
    return Utilisation(
        model_flops_per_token(job, "full") * useful / most,
        model_flops_per_token(job, "causal") * useful / most,
        hardware_flops_per_token(job, computed_keys(job, layout)) * computed / most,
    )
