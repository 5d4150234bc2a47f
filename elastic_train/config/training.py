"""How much is trained, and in which numbers."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from elastic_train.config.section import Section


class TrainingConfig(Section):
    """How much is trained, and in which numbers. Gradient accumulation follows from the batch and the layout."""

    steps: Annotated[int, Field(ge=1)] = Field(description="optimizer updates of the whole job")
    global_batch: Annotated[int, Field(ge=1)] = Field(
        description="sequences per optimizer step, whatever the number of machines; or give global_tokens"
    )
    global_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="tokens per optimizer step, instead of global_batch"
    )
    micro_batch: Annotated[int, Field(ge=1)] = Field(default=1, description="sequences per slot")
    precision: Literal["fp32", "bf16", "fp8"] = Field(
        default="fp32", description="of compute; master weights and moments are always fp32"
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="in which gradients are accumulated and reduced; bf16 only with precision bf16"
    )
    recompute: Literal["none", "selective", "full"] = Field(
        default="none", description="what the backward pass computes anew: nothing, attention cores, or whole blocks"
    )
    compile: bool = Field(default=False, description="torch.compile every block")
    determinism: Literal["default", "exact"] = Field(
        default="default", description="exact: bitwise the same on any number of data ranks and stages; slower"
    )
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="keep an exponential moving average of the weights with this decay; null: none"
    )

    @model_validator(mode="after")
    def _reduction(self) -> Self:
        if self.precision == "fp32" and self.reduce_dtype == "bf16":
            raise ValueError("reduce_dtype=bf16 needs precision=bf16 or fp8; with precision=fp32 it must be fp32")
        return self

    @model_validator(mode="after")
    def _exact(self) -> Self:
        if self.determinism == "default":
            return self
        refused = {
            "precision=fp8": (self.precision == "fp8", "fp32 or bf16"),
            "reduce_dtype=bf16": (self.reduce_dtype == "bf16", "fp32, as gradients are reduced in 64-bit integers"),
            "compile=true": (self.compile, "false"),
        }
        problems = [
            f"{field} is not available with determinism=exact; use {use}"
            for field, (set_, use) in refused.items()
            if set_
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def slots(self) -> int:
        """Number of micro-batch positions of the global batch. A ``Job`` guarantees that it divides."""
        count, rest = divmod(self.global_batch, self.micro_batch)
        if rest:
            raise ValueError(f"global_batch={self.global_batch} is not a multiple of micro_batch={self.micro_batch}")
        return count
