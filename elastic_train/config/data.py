"""What is trained on, and what is evaluated on."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from elastic_train.config.section import Section
from elastic_train.config.sizes import parse_size

SMALLEST_CACHE = 64 * 2**20
"""Bytes: some batches for each of the folders that share the cache's room."""
Exhausted = Literal["repeat", "stop"]


class SourceConfig(Section):
    """One data set of a mixture."""

    name: Annotated[str, Field(min_length=1)] = Field(description="what phases and messages call it")
    uri: str = Field(description="folder that holds its manifest.json")
    weight: Annotated[float, Field(ge=0)] = Field(description="its share of the samples, relative to the others'")
    exhausted: Exhausted = Field(
        default="repeat", description="after its last sample: begin another epoch, or be an error before the job starts"
    )


class PhaseConfig(Section):
    """Other weights from a step on."""

    from_step: Annotated[int, Field(ge=2)] = Field(description="first step with these weights")
    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(description="of every source, by name")


class DataConfig(Section):
    """Prepared token shards (``elastic-train data prepare``): one data set, or a mixture of several."""

    uri: str | None = Field(default=None, description="folder that holds manifest.json; null: `sources` are given")
    exhausted: Exhausted = Field(
        default="repeat", description="as of a source, for the data set of `uri`: `stop` accepts at most one epoch"
    )
    sources: tuple[SourceConfig, ...] = Field(
        default=(), description="data sets that are mixed by weight, each {name, uri, weight, exhausted}"
    )
    phases: tuple[PhaseConfig, ...] = Field(
        default=(), description="changes of the weights, each {from_step, weights: {name: weight}}"
    )
    sequence_length: Annotated[int, Field(ge=1)] = Field(description="tokens per sample")
    packing: Literal["stream", "documents", "none"] = Field(
        default="stream",
        description="a sample is cut from the stream of tokens, or holds whole documents, or one document",
    )
    tails: Literal["keep", "drop"] | None = Field(
        default=None,
        description="what is left shorter than a sample, of the stream or of a document that was cut: pad it or leave "
        "it out; null: drop that of a stream, keep those of documents",
    )
    document_mask: bool = Field(
        default=False,
        description="attention stays inside a document, and positions start anew with each; always so with packing "
        "of documents",
    )
    prefetch_steps: Annotated[int, Field(ge=0)] = Field(
        default=2, description="steps whose samples are read ahead in the background"
    )
    cache_size: str = Field(
        default="16GiB",
        description="of the cache of remote shards on a node's disk, at least 64MiB; the least recently used part goes",
    )

    @field_validator("cache_size")
    @classmethod
    def _cache_size(cls, cache_size: str) -> str:
        if parse_size(cache_size) < SMALLEST_CACHE:
            raise ValueError("must be at least 64MiB: less does not hold the batches of a few samples")
        return cache_size

    @model_validator(mode="after")
    def _one_or_several(self) -> Self:
        if (self.uri is None) == (not self.sources):
            raise ValueError("give uri for one data set, or sources for a mixture of several")
        if self.sources and self.exhausted == "stop":
            raise ValueError("exhausted=stop belongs to the sources here, each of which has its own")
        if self.phases and not self.sources:
            raise ValueError("phases change the weights of sources, and there are none")
        return self

    @model_validator(mode="after")
    def _names(self) -> Self:
        names = [source.name for source in self.sources]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"sources have the name {repeated[0]!r} twice")
        if self.sources and not any(source.weight for source in self.sources):
            raise ValueError("the weights of the sources are all 0")
        steps = [phase.from_step for phase in self.phases]
        if steps != sorted(set(steps)):
            raise ValueError(f"phases begin at steps {steps}, which must rise")
        for phase in self.phases:
            where = f"the phase from step {phase.from_step}"
            if set(phase.weights) != set(names):
                raise ValueError(f"{where} gives weights to {sorted(phase.weights)}; the sources are {sorted(names)}")
            if not any(phase.weights.values()):
                raise ValueError(f"{where} has no weight above 0")
        return self

    @property
    def all_sources(self) -> tuple[SourceConfig, ...]:
        """The sources; the data set of ``uri`` alone is one, called ``data``."""
        if self.uri is None:
            return self.sources
        return (SourceConfig(name="data", uri=self.uri, weight=1.0, exhausted=self.exhausted),)

    @property
    def first_uri(self) -> str:
        """Folder of a data set that has the tokenizer of all."""
        return self.all_sources[0].uri

    @property
    def tail_policy(self) -> Literal["keep", "drop"]:
        """``tails``, or its default: the rest of a stream is nothing, the rest of a document has its end in it."""
        return self.tails or ("drop" if self.packing == "stream" else "keep")

    @property
    def separates_documents(self) -> bool:
        """Whether attention stays inside a document, and positions start anew with each."""
        return self.document_mask or self.packing == "documents"

    @property
    def cache_bytes(self) -> int:
        """``cache_size`` in bytes."""
        return parse_size(self.cache_size)


class EvaluationConfig(Section):
    """Loss on samples that are not trained on: the same for every layout."""

    uri: str | None = Field(default=None, description="folder of prepared shards; null: no evaluation")
    every_steps: Annotated[int, Field(ge=1)] = Field(default=100, description="steps between two evaluations")
    samples: Annotated[int, Field(ge=1)] = Field(default=64, description="the first so many samples are evaluated")
