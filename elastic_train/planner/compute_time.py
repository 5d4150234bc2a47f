"""How long a micro-batch computes on one rank: a roofline, kernel by kernel.

A kernel takes as long as its operations at the speed of its units, or as its bytes at the speed of memory, whichever is
more (Williams et al., 2009, "Roofline: an insightful visual performance model"). So products of few tokens wait for
their weights; what is no product waits for memory anyway (arXiv:2007.00072, section 4, counts it for transformers).
And a block takes no less than the processor takes to launch its kernels.

Attention is causal in torch's flash kernel. A mask rules that kernel out: with ``context=gather``, whose ranks have
queries from the middle of the sequence, and where documents are separated. Then another one computes at
``masked_attention`` of the efficiency, and skips nothing that the mask hides but keys after the last query.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.lora import LoraConfig, Projection
from elastic_train.config.model import ModelConfig
from elastic_train.planner.flops import computed_keys
from elastic_train.planner.hardware import Accelerator

FLOAT32 = 4
"""Bytes of a number of the loss."""
_NORMS_AND_SUMS = 10
"""Numbers of the hidden size moved in a block: two norms read and write, two sums read two and write one."""
_GATE = {True: 3, False: 5}
"""Numbers of the inner size moved by ``silu(gate) * up``, if compiled and if not (``silu`` and the product)."""
_ROTATION = {(True, 2): 4, (True, 4): 8, (False, 2): 36, (False, 4): 40}
"""Bytes moved for each number of q and k, by whether it is compiled, and the bytes of a number: compiled they are read
and written. Else (``model.rotary``) two products, 6 each in bf16, negation of a half, 2, two halves put together, 4, a
sum in float32, 12, and rounding, 6; in float32 8 each, 4, 8, 12 and none."""


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds of one micro-batch on one rank: of one block, and of the head with the loss.

    ``again``: what recomputation adds to a block's backward pass.
    """

    forward: float
    backward: float
    again: float
    head_forward: float
    head_backward: float


def pass_times(job: Job, layout: Layout, accelerator: Accelerator, efficiency: float) -> PassTimes:
    """Of ``job`` in ``layout``; of equal questions but for other axes and options the answer is remembered.

    Raises ValueError for a precision that the accelerator does not compute in.
    """
    data, training = job.data, job.training
    cut = _Cut(
        data.sequence_length,
        training.micro_batch,
        layout.tp,
        layout.cp,
        computed_keys(job, layout),
        job.parallel.context == "gather" and layout.cp > 1,
        data.separates_documents,
        training.compile,
    )
    return _pass_times(job.model, job.lora, cut, training.precision, training.recompute, accelerator, efficiency)


@dataclass(frozen=True, slots=True)
class _Cut:
    """What a rank has of a micro-batch, and how."""

    sequence: int
    batch: int
    tp: int
    cp: int
    keys: float
    """whose scores are computed for a query, on average"""
    gathers: bool
    documents: bool
    compiled: bool

    @property
    def tokens(self) -> float:
        """Of the group of tensor ranks, each of which multiplies all of them."""
        return self.batch * self.sequence / self.cp


@lru_cache(maxsize=1 << 14)
def _pass_times(
    model: ModelConfig,
    lora: LoraConfig | None,
    cut: _Cut,
    precision: str,
    recompute: str,
    accelerator: Accelerator,
    efficiency: float,
) -> PassTimes:
    number = 4 if precision == "fp32" else 2
    plain = accelerator.peak("bf16" if precision == "fp8" else precision) * efficiency
    fast = accelerator.peak(precision) * efficiency * (accelerator.fp8_share if precision == "fp8" else 1.0)
    bandwidth = accelerator.memory_bytes_per_second * accelerator.transfer_efficiency

    def product(inputs: float, outputs: float, speed: float) -> float:
        moved = number * (cut.tokens * (inputs + outputs) + inputs * outputs)
        return max(2 * cut.tokens * inputs * outputs / speed, moved / bandwidth)

    products = [product(*sizes, fast) for sizes in _products(model, cut.tp).values()]
    narrow, added = _adapters(model, lora, cut)
    adapters = sum(product(*sizes, fast) for sizes in narrow)
    attention, scores = _attention(model, cut, number, plain, bandwidth, accelerator.masked_attention)
    rest = (_moved(model, cut, number) + number * added) / bandwidth
    forward = sum(products) + adapters + attention + rest
    # A frozen matrix has one product in the backward pass.
    backward = 2 * forward - (sum(products) if lora else 0.0)
    again = {
        "none": 0.0,
        "selective": attention,
        "full": forward - products[-1],  # torch stops before the last product: nothing needs what it makes
    }[recompute]
    vocabulary = model.vocab_size / cut.tp
    head_product = product(model.hidden_size, vocabulary, plain)
    head = head_product + cut.tokens * vocabulary * (number + 2 * FLOAT32) / bandwidth
    least = accelerator.launch_seconds
    return PassTimes(
        max(forward, least),
        max(backward + scores, least),
        max(again, least) if again else 0.0,
        head,
        2 * head - (head_product if lora else 0.0),
    )


def _products(model: ModelConfig, tp: int) -> dict[Projection, tuple[float, float]]:
    """Inputs and outputs of the projections of a block on a tensor rank; the last one is the block's last product."""
    hidden, inner = model.hidden_size, model.intermediate_size / tp
    queries = model.num_attention_heads * model.head_size / tp
    keys = model.num_key_value_heads * model.head_size / tp
    return {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }


def _adapters(model: ModelConfig, lora: LoraConfig | None, cut: _Cut) -> tuple[list[tuple[float, float]], float]:
    """Inputs and outputs of the products of a block's adapters, and numbers moved to add theirs to the projections'."""
    if lora is None:
        return [], 0.0
    targets = [sizes for name, sizes in _products(model, cut.tp).items() if name in lora.targets]
    rank = float(lora.rank)
    narrow = [pair for inputs, outputs in targets for pair in ((inputs, rank), (rank, outputs))]
    return narrow, cut.tokens * sum(3 * outputs for _, outputs in targets)


def _attention(
    model: ModelConfig, cut: _Cut, number: int, speed: float, bandwidth: float, masked: float
) -> tuple[float, float]:
    """Seconds forwards, and of the scores that the kernel's backward pass makes anew (one product of two)."""
    queries = model.num_attention_heads * model.head_size / cut.tp
    keys = model.num_key_value_heads * model.head_size / cut.tp
    speed *= masked if cut.gathers or cut.documents else 1.0
    computed = 4 * queries * cut.tokens * cut.keys / speed
    seen = cut.batch * cut.sequence if cut.gathers else cut.tokens
    moved = number * 2 * (cut.tokens * queries + seen * keys)
    return max(computed, moved / bandwidth), computed / 2


def _moved(model: ModelConfig, cut: _Cut, number: int) -> float:
    """Bytes that a block reads and writes outside its products, forwards; norms and sums have the tokens cut."""
    queries = (model.num_attention_heads + model.num_key_value_heads) * model.head_size / cut.tp
    each = _NORMS_AND_SUMS * model.hidden_size / cut.tp
    each += _GATE[cut.compiled] * model.intermediate_size / cut.tp
    return cut.tokens * (number * each + _ROTATION[cut.compiled, number] * queries)
