"""Model state of mixed-precision Adam as textbooks count it, for a plain number of parameters.

``2P`` weights and ``2P`` gradients in 16 bits, ``12P`` of the optimizer: float32 master weights and two moments, 4 each
(ZeRO, arXiv:1910.02054, section 3.1). N ranks divide what their strategy divides (section 5): the optimizer (ZeRO-1),
gradients too (ZeRO-2), weights too (ZeRO-3). Activations, gathered weights and buffers are not in it. What this engine
holds, which keeps float32 masters in its shards and may reduce in float32, is ``planner.model_state``.
"""

from __future__ import annotations

from typing import Literal

Strategy = Literal["ddp", "zero1", "zero2", "zero3", "hsdp"]
STRATEGIES: tuple[Strategy, ...] = ("ddp", "zero1", "zero2", "zero3", "hsdp")

BYTES = {"weights": 2, "gradients": 2, "optimizer": 12}
"""Per parameter: 16 in all."""
_DIVIDED: dict[str, frozenset[str]] = {
    "ddp": frozenset(),
    "zero1": frozenset({"optimizer"}),
    "zero2": frozenset({"gradients", "optimizer"}),
    "zero3": frozenset(BYTES),
    "hsdp": frozenset(BYTES),
}


def textbook_state(parameters: float, strategy: Strategy, ranks: int) -> dict[str, float]:
    """Bytes per rank by term. ``ranks``: among which state is divided; with ``hsdp`` those of one replica.

    Raises ValueError for no parameters, no ranks, or a strategy of another name.
    """
    if parameters <= 0:
        raise ValueError(f"parameters={parameters:g} must be more than 0, such as 70e9")
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    if strategy not in _DIVIDED:
        raise ValueError(f"strategy={strategy} must be one of {', '.join(STRATEGIES)}")
    divided = _DIVIDED[strategy]
    return {term: size * parameters / (ranks if term in divided else 1) for term, size in BYTES.items()}


def textbook_formula(strategy: Strategy) -> str:
    """The sum of ``textbook_state`` as people write it: ``4P + 12P/N``."""
    if strategy not in _DIVIDED:
        raise ValueError(f"strategy={strategy} must be one of {', '.join(STRATEGIES)}")
    shared = sum(size for term, size in BYTES.items() if term in _DIVIDED[strategy])
    whole = sum(BYTES.values()) - shared
    return " + ".join([f"{whole}P"] * bool(whole) + [f"{shared}P/N"] * bool(shared))


def matrix_bytes(rows: int, columns: int, number_bytes: int = 2) -> int:
    """Of a whole matrix, such as one that is gathered for computation."""
    return rows * columns * number_bytes
