"""Bytes that the forward pass of one block keeps for the backward pass, per micro-batch and rank.

Beside the published formulas of Korthikanti et al. (arXiv:2205.05198, section 4 and table 2), for the GPT block of that
paper, stand the exact ones for the block of this package, tensor by tensor. Weights, rotary tables and masks are not
counted: blocks share them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastic_train.config.job import Job
from elastic_train.config.layout import Layout
from elastic_train.config.lora import PROJECTIONS, LoraConfig
from elastic_train.config.model import ModelConfig

Recompute = Literal["none", "selective", "full"]
Kernel = Literal["flash", "repeated", "math"]
"""Of attention: ``flash`` keeps a statistic per query and head, ``math`` float32 probabilities and copies of queries,
keys and values (repeated where heads are grouped), ``repeated`` what flash keeps, but keys and values as they are
repeated before it for a kernel that takes a mask and no grouped heads (``model.attention``)."""
FLOAT32 = 4
"""Bytes of a statistic: norms and softmax keep theirs in float32."""


def paper_block_bytes(
    *, sequence: int, batch: int, hidden: int, heads: int, tensor: int = 1, recompute: Recompute = "none"
) -> float:
    """``sbh / t * (34 + 5 a s / h)``, without the second term if attention is recomputed, ``2 sbh / t`` if all is.

    16-bit numbers, dropout, MLP of width 4h, attention that keeps its probabilities, ``tensor``-way tensor and sequence
    parallelism. (The paper's table keeps a block's input whole on every rank, ``2 sbh``; here it is cut as well.)
    """
    factor = {"none": 34 + 5 * heads * sequence / hidden, "selective": 34.0, "full": 2.0}[recompute]
    return sequence * batch * hidden / tensor * factor


def block_bytes(
    model: ModelConfig,
    layout: Layout,
    *,
    sequence: int,
    batch: int,
    number_bytes: int,
    recompute: Recompute = "none",
    context: Literal["gather", "ulysses"] = "gather",
    kernel: Kernel = "flash",
    fused_norm: bool = False,
    documents: bool = False,
    lora: LoraConfig | None = None,
) -> dict[str, int]:
    """What -> bytes, for the block of ``model.transformer``; the sum is what one block of a rank keeps.

    Inputs of frozen projections are not kept but where an adapter needs them.

    ``number_bytes``: of an activation in the precision of compute. ``fused_norm``: true on cuda; on cpu RMSNorm keeps
    its input and its quotient in float32. ``documents``: whether all attention is masked, and not only that of queries
    from the middle of a sequence. Exact for sizes that the layout divides, but for ``repeated`` with ``gather`` and
    without documents: there of the rank that keeps most.
    """
    tokens = batch * sequence // layout.cp
    held = tokens // layout.tp
    hidden = model.hidden_size * number_bytes
    if recompute == "full":
        return {"block input": held * hidden}
    norm = _norm_bytes(model, held, number_bytes, fused_norm, frozen=lora is not None)
    inner = tokens * model.intermediate_size // layout.tp * number_bytes
    attention = (
        _core_input_bytes(model, layout, tokens, number_bytes)
        if recompute == "selective"
        else _core_bytes(model, layout, sequence, batch, number_bytes, context, kernel, documents)
    )
    trained = PROJECTIONS if lora is None else lora.targets
    # The kernel keeps its output as well, which without cp is the input of o.
    output = "o_proj" in trained or (layout.cp == 1 and recompute != "selective" and kernel != "math")
    terms = {
        "attention norm": norm,
        # Kept as gathered over the tensor ranks: every one of them holds all tokens of it.
        "input of q, k and v": tokens * hidden * bool({"q_proj", "k_proj", "v_proj"} & set(trained)),
        **attention,
        "input of o": tokens * model.num_attention_heads * model.head_size // layout.tp * number_bytes * output,
        "feed-forward norm": norm,
        "input of gate and up": tokens * hidden * bool({"gate_proj", "up_proj"} & set(trained)),
        "gate, silu(gate), up and their product": (3 + ("down_proj" in trained)) * inner,
    }
    return terms if lora is None else terms | {"between A and B": tokens * lora.rank * len(trained) * number_bytes}


def _norm_bytes(model: ModelConfig, held: int, number_bytes: int, fused: bool, *, frozen: bool) -> int:
    """A weight that is not trained does not need the quotient."""
    width = model.hidden_size * number_bytes if fused else (1 if frozen else 2) * model.hidden_size * FLOAT32
    return held * (width + FLOAT32)


def outer_bytes(
    model: ModelConfig,
    layout: Layout,
    *,
    sequence: int,
    batch: int,
    number_bytes: int,
    last: bool,
    fused_norm: bool = False,
    frozen: bool = False,
) -> dict[str, int]:
    """What -> bytes that a stage keeps of one micro-batch outside its blocks, without logits.

    On the last stage for the final norm and the head, which all tensor ranks feed with all tokens; on the others the
    output, until it has come back as a gradient. ``frozen``: norm and head are not trained.
    """
    tokens = batch * sequence // layout.cp
    held, hidden = tokens // layout.tp, model.hidden_size * number_bytes
    if not last:
        return {"output of the stage": held * hidden}
    norm = _norm_bytes(model, held, number_bytes, fused_norm, frozen=frozen)
    return {"final norm": norm, "input of the head": 0 if frozen else tokens * hidden}


@dataclass(frozen=True, slots=True)
class LossBytes:
    """Of one micro-batch: logits (or their gradient) alone, ``kept`` from forward to backward, ``most`` at the loss."""

    logits: int
    kept: int
    most: int


def loss_bytes(model: ModelConfig, layout: Layout, *, sequence: int, batch: int, number_bytes: int) -> LossBytes:
    """Of a rank with the head; nothing is chunked, so all tokens of a micro-batch have their logits at once.

    Per logit: without tensor parallelism float32 log-probabilities are kept, and in the backward pass their gradient
    and that of the logits, 4 + 4 + 4. With it (``parallel.vocabulary_loss``) float32 probabilities are kept and the
    gradient is in the precision of compute. torch's pipelines keep the logits as well, as outputs of the stage.
    """
    logits = batch * sequence // layout.cp * -(-model.vocab_size // layout.tp)
    piped = number_bytes if layout.pp > 1 else 0
    work = 2 * FLOAT32 if layout.tp == 1 else number_bytes
    return LossBytes(logits * number_bytes, logits * (FLOAT32 + piped), logits * (FLOAT32 + piped + work))


def backward_bytes(model: ModelConfig, layout: Layout, *, sequence: int, batch: int, number_bytes: int) -> int:
    """Gradients of activations inside one block, at most: of the product, of silu(gate) and of up, and of the output.

    An estimate: what is kept for the backward pass goes while these come.
    """
    tokens = batch * sequence // layout.cp
    inner = model.intermediate_size // layout.tp
    return tokens * number_bytes * (3 * inner + 2 * model.hidden_size // layout.tp)


def table_bytes(model: ModelConfig, *, sequence: int) -> int:
    """Of the cosines and sines of a stage, float32."""
    return 2 * sequence * model.head_size * FLOAT32


def _core_input_bytes(model: ModelConfig, layout: Layout, tokens: int, number_bytes: int) -> dict[str, int]:
    heads = model.num_attention_heads + 2 * model.num_key_value_heads
    return {"q, k and v": tokens * heads // layout.tp * model.head_size * number_bytes}


def _core_bytes(
    model: ModelConfig,
    layout: Layout,
    sequence: int,
    batch: int,
    number_bytes: int,
    context: Literal["gather", "ulysses"],
    kernel: Kernel,
    documents: bool,
) -> dict[str, int]:
    """Between the projections of attention. ``gather`` keeps keys and values of the whole sequence."""
    gathered = layout.cp > 1 and context == "gather"
    tokens = batch * sequence // layout.cp
    queries, keys = model.num_attention_heads // layout.tp, model.num_key_value_heads // layout.tp
    # Two chunks of c queries see (r + 1) c and (2 cp - r) c keys: (2 cp + 1) c together, whatever the rank r.
    chunk = sequence // (2 * layout.cp)
    seen = (2 * layout.cp + 1) * chunk if gathered else sequence // layout.cp
    if kernel == "math":
        pairs = (2 * layout.cp + 1) * chunk**2 if gathered else sequence**2 // layout.cp
        numbers = batch * queries * model.head_size
        return {
            "q in float32": numbers * sequence // layout.cp * FLOAT32,
            "repeated k and v in float32": 2 * numbers * seen * FLOAT32,
            "probabilities": batch * queries * pairs * FLOAT32,
        }
    width = model.head_size * number_bytes
    held = keys * (batch * sequence if gathered else tokens)
    if kernel == "repeated":
        held = _repeated(queries * batch * sequence, held, layout.cp, gathered, documents)
    terms = {
        "q": tokens * queries * width,
        "k and v": 2 * width * held,
        "softmax statistics": tokens * queries * FLOAT32,
    }
    # Without cp the output as the kernel keeps it is the input of the next projection.
    return terms | ({"output of the kernel": tokens * queries * width} if layout.cp > 1 else {})


def _repeated(repeated: int, held: int, cp: int, gathered: bool, documents: bool) -> int:
    """Numbers of keys (as many of values) that a rank keeps of ``repeated`` ones of the sequence, and ``held`` others.

    With ``ulysses`` those from before lie in one buffer with the queries. With ``gather`` rank 0 needs no mask for its
    first chunk where there are no documents, and keeps those that are gathered for it.
    """
    if not gathered:
        return repeated // cp + (held if cp > 1 else 0)
    masked = repeated * (2 * cp + 1) // (2 * cp)
    return masked if documents else max(masked, repeated + held)


def kernel_of(job: Job, cp: int, context: str) -> Kernel:
    """That of attention in this engine, with ``cp`` context ranks."""
    masked = job.data.separates_documents or (cp > 1 and context == "gather")
    grouped = job.model.num_attention_heads != job.model.num_key_value_heads
    return "repeated" if masked and grouped and job.hosts.device == "cuda" else "flash"


def mask_bytes(
    layout: Layout,
    *,
    sequence: int,
    batch: int,
    number_bytes: int,
    documents: bool,
    context: Literal["gather", "ulysses"] = "gather",
) -> int:
    """Attention masks of one micro-batch, made once for all blocks; 0 where ``causal`` says it all.

    With ``gather`` the most that a rank holds: rank 0 needs none for its first chunk if there are no documents.
    """
    rows = batch if documents else 1
    if layout.cp > 1 and context == "gather":
        return rows * (2 * layout.cp + 1) * (sequence // (2 * layout.cp)) ** 2 * number_bytes
    return rows * sequence**2 * number_bytes if documents else 0
