"""What is trained on, and what is evaluated on."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from elastic_train.config.section import Section


class DataConfig(Section):
    """Prepared token shards (``elastic-train data prepare``)."""

    uri: str = Field(description="folder that holds manifest.json")
    sequence_length: Annotated[int, Field(ge=1)] = Field(description="tokens per sample")
    document_mask: bool = Field(
        default=False, description="attention stays inside a document, and positions start anew with each"
    )


class EvaluationConfig(Section):
    """Loss on samples that are not trained on: the same for every layout."""

    uri: str | None = Field(default=None, description="folder of prepared shards; null: no evaluation")
    every_steps: Annotated[int, Field(ge=1)] = Field(default=100, description="steps between two evaluations")
    samples: Annotated[int, Field(ge=1)] = Field(default=64, description="the first so many samples are evaluated")
