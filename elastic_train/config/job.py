"""The job file: one pydantic model per component, each checked where it is defined.

Sizes are in sequences (``global_batch``, ``micro_batch``), tokens (``sequence_length``) or optimizer steps
(everything named ``*steps``); times are in seconds. Steps are counted from 1: step ``t`` is the ``t``-th update.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

TRACKING_SCHEMES = ("http://", "https://", "sqlite:///", "postgresql", "mysql", "mssql", "databricks")
"""What MLflow takes; it refuses plain folders."""
AxisSize = Annotated[int, Field(ge=1)] | Literal["auto"]


class Problems(ValueError):
    """Several things wrong at once, each a sentence that names its field."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def _neighbours(value: int, step: int) -> str:
    """The multiples of ``step`` around ``value``, e.g. ``16, 32``."""
    below = value // step * step
    return ", ".join(str(multiple) for multiple in (below, below + step) if multiple)


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are never changed after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RopeScaling(Section):
    """Llama 3.1 rotary scaling, fields as in the HF ``config.json``."""

    rope_type: Literal["llama3"] = Field(default="llama3", description="kind of scaling")
    factor: Annotated[float, Field(gt=0)] = Field(default=8.0, description="stretch of the low frequencies")
    low_freq_factor: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="wavelengths above original length / this are stretched fully"
    )
    high_freq_factor: Annotated[float, Field(gt=0)] = Field(
        default=4.0, description="wavelengths below original length / this are left alone"
    )
    original_max_position_embeddings: Annotated[int, Field(ge=1)] = Field(
        default=8192, description="length the frequencies were made for"
    )


class ModelConfig(Section):
    """Shape of the decoder-only transformer. Field names follow the HF Llama ``config.json``."""

    hidden_size: Annotated[int, Field(ge=1)] = Field(description="width of the residual stream")
    num_hidden_layers: Annotated[int, Field(ge=1)] = Field(description="transformer blocks")
    num_attention_heads: Annotated[int, Field(ge=1)] = Field(description="query heads")
    num_key_value_heads: Annotated[int, Field(ge=1)] = Field(
        description="key and value heads; query head i uses head i // (query heads / kv heads)"
    )
    intermediate_size: Annotated[int, Field(ge=1)] = Field(description="width of the MLP")
    vocab_size: Annotated[int, Field(ge=2)] = Field(description="rows of the embedding; at least the tokenizer's")
    head_dim: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="default: hidden_size / num_attention_heads"
    )
    max_position_embeddings: Annotated[int, Field(ge=1)] = Field(
        default=8192, description="longest sequence the model is meant for"
    )
    rms_norm_eps: Annotated[float, Field(gt=0)] = Field(default=1e-5, description="epsilon of the norms")
    rope_theta: Annotated[float, Field(gt=0)] = Field(default=500_000.0, description="base of the rotary frequencies")
    rope_scaling: RopeScaling | None = Field(default=None, description="Llama 3.1 scaling; null: none")
    tie_word_embeddings: bool = Field(default=False, description="the output layer is the embedding")
    qkv_bias: bool = Field(default=False, description="q, k and v projections add a bias (Qwen2)")
    initializer_range: Annotated[float, Field(gt=0)] = Field(
        default=0.02, description="standard deviation of the initial matrices"
    )

    @model_validator(mode="after")
    def _heads(self) -> Self:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}; "
                "change one of them or give head_dim"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_size % 2:
            raise ValueError(f"head_dim={self.head_size} is odd; rotary embedding needs an even head_dim")
        return self

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def num_parameters(self) -> int:
        """Number of unique parameters (a tied embedding counts once)."""
        d, kv = self.hidden_size, self.num_key_value_heads * self.head_size
        q = self.num_attention_heads * self.head_size
        layer = d * q + 2 * d * kv + q * d + 3 * d * self.intermediate_size + 2 * d
        layer += (q + 2 * kv) if self.qkv_bias else 0
        embeddings = self.vocab_size * d * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * layer + d


class DataConfig(Section):
    """Prepared token shards (``elastic-train data prepare``)."""

    uri: str = Field(description="folder that holds manifest.json")
    sequence_length: Annotated[int, Field(ge=1)] = Field(description="tokens per sample")
    document_mask: bool = Field(
        default=False, description="attention stays inside a document, and positions start anew with each"
    )


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


class EvaluationConfig(Section):
    """Loss on samples that are not trained on: the same for every layout."""

    uri: str | None = Field(default=None, description="folder of prepared shards; null: no evaluation")
    every_steps: Annotated[int, Field(ge=1)] = Field(default=100, description="steps between two evaluations")
    samples: Annotated[int, Field(ge=1)] = Field(default=64, description="the first so many samples are evaluated")


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
        """``ddp`` replicates and does not shard; ``hsdp`` does both."""
        if not isinstance(values, dict) or values.get("data") not in ("ddp", "hsdp"):
            return values
        defaults = {"dp_replicate": "auto"} | ({"dp_shard": 1} if values["data"] == "ddp" else {})
        return defaults | values

    @model_validator(mode="after")
    def _strategy(self) -> Self:
        if self.data == "ddp" and self.dp_shard != 1:
            raise ValueError(f"dp_shard={self.dp_shard} must be 1 with data=ddp, which shards nothing")
        if self.pipeline == "zbv" and self.virtual_stages != 2:
            raise ValueError(f"virtual_stages={self.virtual_stages} must be 2 with pipeline=zbv: down and up again")
        if self.data not in ("zero3", "hsdp"):
            for name in ("reshard_after_forward", "offload"):
                if getattr(self, name):
                    raise ValueError(f"{name}=true needs data=zero3 or hsdp, not {self.data}")
            if self.prefetch > 1:
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
    keep_last: Annotated[int, Field(ge=1)] = Field(default=3, description="checkpoints that are whole and stay")


class FailureConfig(Section):
    """When something counts as failed."""

    hang_seconds: Annotated[float, Field(gt=0)] = Field(
        default=60.0, description="a generation without progress for this long is formed anew"
    )
    heartbeat_seconds: Annotated[float, Field(gt=0)] = Field(default=0.5, description="between two heartbeats")
    lease_seconds: Annotated[float, Field(gt=0)] = Field(
        default=10.0, description="a host not heard of for this long is lost"
    )
    max_errors: Annotated[int, Field(ge=1)] = Field(
        default=3, description="exceptions of the trainer in a row without a finished step before the job fails"
    )


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


class Job(Section):
    """A whole job file."""

    name: str = Field(description="resubmitting the name resumes the job")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(default=1, description="of initial weights and sample order")
    init_from: str | None = Field(
        default=None, description="folder of an HF checkpoint whose weights the job starts from; null: random weights"
    )
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    parallel: ParallelConfig = ParallelConfig()
    hosts: HostsConfig = HostsConfig()
    storage: StorageConfig = StorageConfig()
    snapshot: SnapshotConfig = SnapshotConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    failure: FailureConfig = FailureConfig()
    tracking: TrackingConfig = TrackingConfig()
    log: LogConfig = LogConfig()

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name):
            raise ValueError("use 1 to 63 letters, digits, '.', '_' or '-', starting with a letter or digit")
        return name

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        problems = [*self._batch_problems(), *self._schedule_problems(), *self._device_problems()]
        if problems:
            raise Problems(problems)
        return self

    def _batch_problems(self) -> list[str]:
        total, micro = self.training.global_batch, self.training.micro_batch
        tokens, length = self.training.global_tokens, self.data.sequence_length
        if tokens is not None and tokens != total * length:
            return [
                f"training.global_tokens={tokens}: must be training.global_batch x data.sequence_length = "
                f"{total} x {length}; nearest: {_neighbours(tokens, length * micro)}"
            ]
        if total % micro == 0:
            return []
        text = (
            f"training.global_batch={total}: must be a multiple of training.micro_batch={micro}; "
            f"nearest: {_neighbours(total, micro)}"
        )
        data_ranks = [size for size in (self.parallel.dp_replicate, self.parallel.dp_shard) if isinstance(size, int)]
        ranks = math.prod(data_ranks)
        if ranks > 1:
            text += (
                f"; for equal work on {ranks} data ranks a multiple of micro_batch x data ranks = {micro * ranks}: "
                f"{_neighbours(total, micro * ranks)}"
            )
        return [text]

    def _schedule_problems(self) -> list[str]:
        problems = []
        if self.schedule.warmup_steps > self.training.steps:
            problems.append(
                f"schedule.warmup_steps={self.schedule.warmup_steps}: must be at most "
                f"training.steps={self.training.steps}"
            )
        warmup, decay = self.schedule.warmup_steps, self.schedule.decay_steps or 0
        if warmup <= self.training.steps < warmup + decay:
            problems.append(
                f"schedule.decay_steps={decay}: must be at most training.steps - schedule.warmup_steps = "
                f"{self.training.steps} - {warmup} = {self.training.steps - warmup}"
            )
        if self.schedule.min_lr > self.optimizer.learning_rate:
            problems.append(
                f"schedule.min_lr={self.schedule.min_lr}: must be at most "
                f"optimizer.learning_rate={self.optimizer.learning_rate}"
            )
        if self.data.sequence_length > self.model.max_position_embeddings:
            problems.append(
                f"data.sequence_length={self.data.sequence_length}: must be at most "
                f"model.max_position_embeddings={self.model.max_position_embeddings}"
            )
        return problems

    def _device_problems(self) -> list[str]:
        if self.hosts.device == "cuda":
            return []
        problems = []
        if self.training.precision == "fp8":
            problems.append("training.precision=fp8: needs hosts.device=cuda with fp8 units; use bf16 or fp32 on cpu")
        if self.parallel.offload:
            problems.append("parallel.offload=true: needs hosts.device=cuda; on cpu the state is in CPU memory already")
        return problems

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready values; ``Job.model_validate(job.as_dict(), strict=False)`` gives the job back."""
        return self.model_dump(mode="json")
