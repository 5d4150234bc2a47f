"""Axis sizes, and what each axis does."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from elastic_train.config.section import Section

AxisSize = Annotated[int, Field(ge=1)] | Literal["auto"]


class ParallelConfig(Section):
    """Axis sizes, and what each axis does. ``auto`` lets the planner choose a size for the hosts that are there."""

    data: Literal["ddp", "zero1", "zero2", "zero3", "hsdp"] = Field(
        default="zero3", description="what data ranks share out: see docs/parallelism.md"
    )
    pp: AxisSize = Field(default=1, description="pipeline stages")
    dp_replicate: AxisSize = Field(default=1, description="replicas of the sharded model; auto for ddp and hsdp")
    dp_shard: AxisSize = Field(default="auto", description="ranks over which each replica is sharded; 1 for ddp")
    cp: AxisSize = Field(default=1, description="context parallel ranks")
    tp: AxisSize = Field(default=1, description="tensor and sequence parallel ranks")
    pipeline: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"] = Field(
        default="1f1b", description="order of the micro-batches in the pipeline"
    )
    virtual_stages: Annotated[int, Field(ge=1)] = Field(
        default=2, description="stages per rank of interleaved_1f1b and zero_bubble; 2 for zbv"
    )
    context: Literal["gather", "ulysses"] = Field(
        default="gather", description="cp gathers keys and values (Llama 3) or exchanges heads (Ulysses)"
    )
    reshard_after_forward: bool = Field(
        default=False,
        description="zero3: release gathered weights after each block's forward; less memory, more traffic",
    )
    prefetch: Annotated[int, Field(ge=0)] = Field(
        default=1, description="zero3: blocks whose weights are gathered ahead of use"
    )
    offload: bool = Field(default=False, description="zero3: weights and optimizer state live in CPU memory")

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_strategy(cls, values: Any) -> Any:
        """``ddp`` replicates and does not shard (so ``auto`` can only mean 1); ``hsdp`` does both."""
        if not isinstance(values, dict) or values.get("data") not in ("ddp", "hsdp"):
            return values
        chosen = {"dp_replicate": "auto"} | values
        return (
            chosen | {"dp_shard": 1} if values["data"] == "ddp" and chosen.get("dp_shard", "auto") == "auto" else chosen
        )

    @model_validator(mode="after")
    def _strategy(self) -> Self:
        if self.data == "ddp" and self.dp_shard != 1:
            raise ValueError(f"dp_shard={self.dp_shard} must be 1 with data=ddp, which shards nothing")
        if self.pipeline == "zbv" and self.virtual_stages != 2:
            raise ValueError(f"virtual_stages={self.virtual_stages} must be 2 with pipeline=zbv: down and up again")
        if self.pipeline == "interleaved_1f1b" and self.virtual_stages == 1:
            raise ValueError("virtual_stages=1 with pipeline=interleaved_1f1b interleaves nothing; use pipeline=1f1b")
        if self.pipeline in ("gpipe", "1f1b") and self.virtual_stages != 2:
            raise ValueError(
                f"virtual_stages={self.virtual_stages} is not used by pipeline={self.pipeline}, which has one stage a "
                "rank; use interleaved_1f1b or zero_bubble, or leave it out"
            )
        if self.data not in ("zero3", "hsdp"):
            for name in ("reshard_after_forward", "offload"):
                if getattr(self, name):
                    raise ValueError(f"{name}=true needs data=zero3 or hsdp, not {self.data}")
            if self.prefetch != 1:
                raise ValueError(f"prefetch={self.prefetch} needs data=zero3 or hsdp, not {self.data}")
        return self

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages that a rank holds when ``pp`` is larger than 1."""
        return 1 if self.pipeline in ("gpipe", "1f1b") else self.virtual_stages

    @property
    def splits_backward(self) -> bool:
        """Whether the pipeline computes gradients of activations first, and those of weights when there is time."""
        return self.pipeline in ("zero_bubble", "zbv")
