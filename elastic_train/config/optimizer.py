"""The optimizer and the schedule of its rate."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from elastic_train.config.section import Section

_OPTIMIZER_SETTINGS = {
    "adamw": ("betas", "eps", "weight_decay"),
    "adam": ("betas", "eps", "weight_decay"),
    "sgd": ("momentum", "weight_decay"),
    "lion": ("betas", "weight_decay"),
    "muon": ("momentum", "betas", "eps", "weight_decay"),
}
"""What each optimizer takes beside the learning rate and the clipping."""


class OptimizerConfig(Section):
    """Weight decay applies to matrices, not to norms, biases and embeddings.

    A setting that the optimizer does not use is refused when it is given, and left out when the job is written.
    """

    name: Literal["adamw", "adam", "sgd", "lion", "muon"] = Field(default="adamw", description="optimizer")
    learning_rate: Annotated[float, Field(gt=0)] = Field(default=3e-4, description="peak of the schedule")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), description="decay of the first and second moment"
    )
    eps: Annotated[float, Field(gt=0)] = Field(default=1e-8, description="added to the root of the second moment")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.1, description="per step, times the rate; adam and sgd add it, times the weight, to the gradient"
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.9, description="of sgd, and of muon's matrices")
    clip_norm: Annotated[float, Field(gt=0)] | None = Field(
        default=1.0, description="L2 limit of the global gradient; null: no clipping"
    )

    @property
    def unused(self) -> set[str]:
        """Names of the fields that this optimizer does not look at."""
        every = {name for names in _OPTIMIZER_SETTINGS.values() for name in names}
        return every - set(_OPTIMIZER_SETTINGS[self.name])

    @model_validator(mode="after")
    def _settings(self) -> Self:
        given = sorted(self.unused & self.model_fields_set)
        if given:
            raise ValueError(
                f"{', '.join(given)} is not used by name={self.name}, which takes "
                f"{', '.join(_OPTIMIZER_SETTINGS[self.name])}"
            )
        return self

    @model_serializer(mode="wrap")
    def _used(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = serialize(self)
        return {name: value for name, value in values.items() if name not in self.unused}


class ScheduleConfig(Section):
    """lr(t) = peak * t / warmup_steps during the warm-up, then from the peak to min_lr at ``training.steps``.

    ``cosine`` and ``linear`` fall from the end of the warm-up on; ``wsd`` (warm-up, stable, decay) stays at the peak
    and falls linearly in the last decay_steps; ``constant`` stays.
    """

    name: Literal["constant", "cosine", "linear", "wsd"] = Field(
        default="cosine", description="shape after the warm-up"
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(default=0, description="steps of linear warm-up")
    min_lr: Annotated[float, Field(ge=0)] = Field(default=0.0, description="rate of the last step")
    decay_steps: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="wsd: length of the linear decay at the end; null: a tenth of training.steps"
    )

    @model_validator(mode="after")
    def _settings(self) -> Self:
        if self.decay_steps is not None and self.name != "wsd":
            raise ValueError(f"decay_steps={self.decay_steps} is for name=wsd; with name={self.name} leave it out")
        if self.name == "constant" and self.min_lr:
            raise ValueError(f"min_lr={self.min_lr} is not reached with name=constant; leave it out")
        return self
