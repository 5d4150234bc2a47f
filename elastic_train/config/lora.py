"""Low-rank adapters: which projections get them, and how large they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator

from elastic_train.config.section import Section

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROJECTIONS: tuple[Projection, ...] = get_args(Projection)
"""The matrices of a block, in the order in which they compute."""


class LoraConfig(Section):
    """Low-rank adapters (arXiv:2106.09685) beside projections of the model of `init_from`; left out: all weights train.

    A target computes `W x + alpha / rank * B A x`. A and B are trained, and nothing else: A begins with random numbers,
    B with zeros. All other weights stay as they are, in the precision of compute.
    """

    rank: Annotated[int, Field(ge=1)] = Field(default=8, description="rows of A and columns of B (r in PEFT)")
    alpha: Annotated[float, Field(gt=0)] = Field(
        default=16.0, description="what B A x is multiplied with is alpha / rank (lora_alpha in PEFT)"
    )
    target_modules: tuple[Projection, ...] | Literal["all-linear"] = Field(
        default=("q_proj", "v_proj"), description="projections that get adapters; all-linear: all of every block"
    )

    @field_validator("target_modules")
    @classmethod
    def _some_once(cls, targets: tuple[Projection, ...] | str) -> tuple[Projection, ...] | str:
        if targets == "all-linear":
            return targets
        if not targets:
            raise ValueError(f"is empty; give some of {', '.join(PROJECTIONS)}, or all-linear")
        repeated = [name for name in PROJECTIONS if list(targets).count(name) > 1]
        if repeated:
            raise ValueError(f"has {repeated[0]} twice")
        return targets

    @property
    def targets(self) -> tuple[Projection, ...]:
        """``target_modules`` one by one, in the order of ``PROJECTIONS``."""
        return tuple(name for name in PROJECTIONS if self.target_modules == "all-linear" or name in self.target_modules)

    @property
    def scale(self) -> float:
        """What B A x is multiplied with."""
        return self.alpha / self.rank


def adapter_shapes(shapes: Mapping[str, tuple[int, ...]], lora: LoraConfig) -> dict[str, tuple[int, int]]:
    """Name -> shape of every A and B beside the weights of a model, given by ``shapes``; A before its B."""
    found: dict[str, tuple[int, int]] = {}
    for name, shape in shapes.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module.rpartition(".")[2] in lora.targets:
            found[f"{module}.lora_A.weight"] = (lora.rank, shape[1])
            found[f"{module}.lora_B.weight"] = (shape[0], lora.rank)
    return found
