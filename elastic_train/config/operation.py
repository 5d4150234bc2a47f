"""Hosts, tiers of state, failures, tracking and storage: everything that does not change what is computed."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from elastic_train.config.section import Section
from elastic_train.config.sizes import parse_size

TRACKING_SCHEMES = ("http://", "https://", "sqlite:///", "postgresql", "mysql", "mssql", "databricks")
"""What MLflow takes; it refuses plain folders."""


class HostsConfig(Section):
    """How many hosts (Ray Train workers, one accelerator or CPU seat each) the job may use."""

    min: Annotated[int, Field(ge=1)] = Field(default=1, description="with fewer the job waits for machines")
    max: Annotated[int, Field(ge=1)] = Field(default=1, description="never more, also when there are machines")
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="what a host computes on")
    cpus: Annotated[float, Field(gt=0)] = Field(default=1.0, description="CPUs that Ray reserves per host")
    threads: Annotated[int, Field(ge=1)] = Field(default=1, description="compute threads of a trainer on CPU")
    start_wait_seconds: Annotated[float, Field(ge=0)] = Field(
        default=20.0, description="wait this long for `max` hosts before starting with fewer"
    )
    settle_seconds: Annotated[float, Field(ge=0)] = Field(
        default=2.0, description="a newcomer must have been there this long before it is taken in"
    )
    growth_horizon_seconds: Annotated[float, Field(gt=0)] = Field(
        default=300.0, description="what newcomers gain is summed over this long, or to the job's end if that is nearer"
    )
    growth_margin: Annotated[float, Field(ge=0)] = Field(
        default=1.0,
        description="newcomers are taken in when that gain is more than so many pauses; 0: whenever steps get faster",
    )
    memory: str | None = Field(
        default=None,
        description="of a host's device, e.g. 80GiB: no layout that is estimated to need more is taken; null: what the "
        "hosts say they have",
    )

    spot_notice: str = Field(
        default="off",
        description="each host asks its machine's metadata service whether the machine will be taken away: `aws`, or "
        "the http:// address of one that answers as that of AWS does (IMDSv2); `off`: not asked",
    )

    @field_validator("spot_notice")
    @classmethod
    def _spot_notice(cls, spot_notice: str) -> str:
        if spot_notice not in ("off", "aws") and not spot_notice.startswith("http://"):
            raise ValueError("must be off, aws or the http:// address of a metadata service")
        return spot_notice

    @field_validator("memory")
    @classmethod
    def _memory(cls, memory: str | None) -> str | None:
        if memory is not None:
            parse_size(memory)
        return memory

    @property
    def seat(self) -> dict[str, float]:
        """What Ray reserves for a host, by the names of its resources."""
        return {"CPU": self.cpus} | ({"GPU": 1.0} if self.device == "cuda" else {})

    @property
    def memory_bytes(self) -> int | None:
        """``memory`` in bytes; None: no limit."""
        return None if self.memory is None else parse_size(self.memory)

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max={self.max} is smaller than min={self.min}")
        return self


class SnapshotConfig(Section):
    """Tier 0 (shared memory of the node) and tier 1 (copies on other nodes)."""

    partners: Annotated[int, Field(ge=0)] = Field(default=1, description="copies of each snapshot on other nodes")
    directory: str = Field(default="/dev/shm", description="memory file system of the nodes")


class CheckpointConfig(Section):
    """Tier 2: committed checkpoints in the job folder."""

    every_steps: Annotated[int, Field(ge=1)] = Field(default=100, description="steps between two checkpoints")
    interval: Literal["fixed", "tuned"] = Field(
        default="fixed",
        description="`tuned` begins with `every_steps` and adapts it to what a save costs and how often hosts fail",
    )
    min_steps: Annotated[int, Field(ge=1)] = Field(default=10, description="a tuned interval is never shorter")
    max_steps: Annotated[int, Field(ge=1)] = Field(default=10_000, description="a tuned interval is never longer")
    keep_last: Annotated[int, Field(ge=1)] = Field(default=3, description="newest checkpoints that are whole and stay")
    keep_every: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="checkpoints of steps that are multiples of this stay, too"
    )
    keep_best: Annotated[int, Field(ge=0)] = Field(
        default=0, description="this many checkpoints with the lowest `metric` stay, too"
    )
    metric: Literal["eval_loss", "loss"] = Field(default="eval_loss", description="what `keep_best` goes by")
    grace_seconds: Annotated[float, Field(ge=0)] = Field(
        default=3600.0, description="remains of saves that were never committed are removed when they are older"
    )

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.max_steps < self.min_steps:
            raise ValueError(f"max_steps={self.max_steps} is smaller than min_steps={self.min_steps}")
        return self


class FailureConfig(Section):
    """When something counts as failed."""

    hang_seconds: Annotated[float, Field(gt=0)] = Field(
        default=60.0, description="a generation without progress for this long is formed anew"
    )
    heartbeat_seconds: Annotated[float, Field(gt=0)] = Field(
        default=0.5,
        description="between two heartbeats of a host; longer with more than 4000 of them a second in all",
    )
    lease_seconds: Annotated[float, Field(gt=0)] = Field(
        default=10.0,
        description="a host not heard of for this long is lost; its trainer is killed shortly before",
    )
    coordinator_seconds: Annotated[float, Field(ge=0)] = Field(
        default=60.0, description="so long the trainers go on without a coordinator that has died; 0: they end with it"
    )
    max_errors: Annotated[int, Field(ge=1)] = Field(
        default=3,
        description="exceptions, crashes and out-of-memory kills of trainers in a row without a finished step before "
        "the job fails",
    )
    max_barren_generations: Annotated[int, Field(ge=1)] = Field(
        default=12,
        description="generations in a row that hang, lose a peer or a copy, or whose trainers just exit, without a "
        "finished step before the job fails; all but the first are followed by a pause: 1, 2, 4, up to 60 s",
    )
    bad_step: Literal["roll_back", "skip", "end"] = Field(
        default="roll_back",
        description="when loss or gradient norm is not finite or a spike: `roll_back` tries the step once more and "
        "leaves it out if it is bad again, `skip` leaves it out at once, `end` ends the job",
    )
    max_bad_steps: Annotated[int, Field(ge=0)] = Field(
        default=3, description="more left out among the last `bad_step_window` steps end the job"
    )
    bad_step_window: Annotated[int, Field(ge=1)] = Field(
        default=64, description="steps among which bad ones are counted, and whose medians tell a spike"
    )
    loss_spike_factor: Annotated[float, Field(gt=1)] | None = Field(
        default=None, description="a loss above so many medians is a bad step; null: only one that is not finite"
    )
    norm_spike_factor: Annotated[float, Field(gt=1)] | None = Field(
        default=None, description="a gradient norm above so many medians is a bad step; null: only if not finite"
    )
    straggler: Literal["replace", "name", "off"] = Field(
        default="replace",
        description="a host that stays slower than its peers is named in the ledger; `replace`: and a spare takes over",
    )
    straggler_factor: Annotated[float, Field(gt=1)] = Field(
        default=2.0, description="slower: its trainer needs more than so many times the median of its peers"
    )
    straggler_steps: Annotated[int, Field(ge=1)] = Field(default=20, description="for so many steps in a row")


class TrackingConfig(Section):
    """MLflow. A server that is away never stops or slows a step."""

    enabled: bool = Field(default=True, description="log to MLflow")
    uri: str | None = Field(
        default=None, description="MLflow tracking URI; default: sqlite file beside the job folders"
    )
    experiment: str = Field(default="elastic_train", description="MLflow experiment")

    @field_validator("uri")
    @classmethod
    def _uri(cls, uri: str | None) -> str | None:
        if uri is not None and not uri.startswith(TRACKING_SCHEMES):
            raise ValueError(f"must start with one of {', '.join(TRACKING_SCHEMES)}")
        return uri


class LogConfig(Section):
    """What goes into the job folder beyond the standard."""

    samples: bool = Field(default=False, description="write the sample ids of every step to steps.jsonl")


class StorageConfig(Section):
    """Where job folders live: a local path, file:// or s3:// URI. Credentials come from the environment only."""

    uri: str = Field(default="runs", description="folder of the job folders")
    endpoint_url: str | None = Field(
        default=None, description="S3 endpoint of another provider, e.g. http://127.0.0.1:8333"
    )
    region: str = Field(default="us-east-1", description="S3 region")
    connect_timeout_seconds: Annotated[float, Field(gt=0)] = Field(
        default=5.0, description="for a connection to be made"
    )
    retry_seconds: Annotated[float, Field(ge=0)] = Field(default=30.0, description="budget of retries per request")
