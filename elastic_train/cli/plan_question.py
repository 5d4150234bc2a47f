"""The question of ``elastic-train plan`` as a job: from a job file, or from a model, a number of GPUs, their kind."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_train.cli.guard import UserError

if TYPE_CHECKING:
    from elastic_train.config.job import Job
    from elastic_train.planner.hardware import Accelerator

DEFAULT_GPU = "h100-80gb"
DEFAULT_TOKENS_PER_STEP = 4 * 2**20
"""About what models of 8 to 70 billion parameters were trained with (Llama 3, arXiv:2407.21783, sec. 3.4.1)."""
DEFAULT_SEQUENCE = 8192
DEFAULT_STEPS = 1000


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says, as it was written; None: not given."""

    words: Sequence[str]
    model: str | None
    gpus: int | None
    gpu: str | None
    gpu_memory: str | None
    host_memory: str | None
    seq: int | None
    global_batch: int | None
    tokens: float | None


@dataclass(frozen=True, slots=True)
class Question:
    """``memory_limit`` in bytes per accelerator; ``assumed``: sentences about what was not said."""

    job: Job
    gpus: int
    accelerator: Accelerator
    memory_limit: int
    tokens: float
    assumed: list[str]
    from_file: bool

    @property
    def tokens_per_step(self) -> int:
        return self.job.training.global_batch * self.job.data.sequence_length


def question_of(asked: Asked) -> Question:
    """Raises UserError and ConfigError with what is wrong and what would do."""
    from elastic_train.config.sizes import gib
    from elastic_train.planner.hardware_table import accelerator
    from elastic_train.planner.search_fit import MOST_GPUS

    path, overrides = _split(asked)
    _check_size("--gpu-memory", asked.gpu_memory)
    _check_size("--host-memory", asked.host_memory)
    assumed: list[str] = []
    if path is None:
        job = _from_model(asked, overrides, assumed)
    else:
        job = _from_file(path, asked, overrides)
    gpus = job.hosts.max if asked.gpus is None else asked.gpus
    if gpus > MOST_GPUS:
        where = "hosts.max=" if asked.gpus is None else "--gpus "
        raise UserError(f"{where}{gpus}: no layout is looked for on more than {MOST_GPUS:,} accelerators")
    kind = asked.gpu
    if kind is None:
        kind = "cpu" if path is not None and job.hosts.device == "cpu" else DEFAULT_GPU
        assumed.append(f"--gpu {kind}" + (" (hosts.device=cpu)" if kind == "cpu" else ""))
    chosen = _with_host_memory(accelerator(kind), asked.host_memory)
    if job.parallel.offload and (chosen.sources or {}).get("host_memory_bytes", "").startswith("assumed"):
        assumed.append(f"--host-memory {gib(chosen.host_memory_bytes)} of CPU memory on a node of {chosen.name}")
    steps = DEFAULT_STEPS if path is None and asked.tokens is None else job.training.steps
    tokens, limit = asked.tokens, job.hosts.memory_bytes
    if tokens is None:
        tokens = float(steps * job.training.global_batch * job.data.sequence_length)
        if path is None:
            assumed.append(f"--tokens {tokens:.4g} ({steps:,} steps)")
    return Question(
        job,
        gpus,
        chosen,
        chosen.memory_for(max(1, gpus)) if limit is None else limit,
        tokens,
        assumed,
        path is not None,
    )


def _split(asked: Asked) -> tuple[str | None, list[str]]:
    """(job file, overrides)."""
    words = list(asked.words)
    path = words.pop(0) if words and "=" not in words[0] else None
    stray = [word for word in words if "=" not in word]
    if stray:
        raise UserError(f"{stray[0]!r} is not an override; write section.key=value, e.g. parallel.tp=8")
    if path is not None and asked.model is not None:
        raise UserError(f"--model {asked.model} and the job file {path}: give one of them")
    if path is None and asked.model is None:
        raise UserError(
            "nothing to plan: give a job file, --model with --gpus, or --params with --ranks; "
            "e.g. elastic-train plan --model llama3-70b --gpus 64"
        )
    for option, value in (("--seq", asked.seq), ("--global-batch", asked.global_batch)):
        if value is not None and value < 1:
            raise UserError(f"{option} {value}: must be at least 1")
    if asked.gpus is not None and asked.gpus < 1:
        raise UserError(f"--gpus {asked.gpus}: must be at least 1{_least(asked, path, words)}")
    return path, words


def _with_host_memory(chosen: Accelerator, text: str | None) -> Accelerator:
    """``text``: of a node, in place of what is known."""
    from dataclasses import replace

    from elastic_train.config.sizes import parse_size

    if text is None:
        return chosen
    sources = (chosen.sources or {}) | {"host_memory_bytes": "--host-memory"}
    return replace(chosen, host_memory_bytes=parse_size(text), sources=sources)


def _check_size(option: str, text: str | None) -> None:
    from elastic_train.config.sizes import parse_size

    try:
        if text is not None and parse_size(text) == 0:
            raise ValueError("must be more than 0")
    except ValueError as error:
        raise UserError(f"{option} {text}: {error}") from None


def _least(asked: Asked, path: str | None, overrides: list[str]) -> str:
    """What the smallest number would be."""
    from dataclasses import replace

    from elastic_train.planner.impossible import smallest_that_fits
    from elastic_train.planner.search_space import space_of

    question = question_of(replace(asked, gpus=1))
    space = space_of(question.job, question.accelerator.per_node)
    return f"; {smallest_that_fits(space, question.accelerator, question.memory_limit)}"


def _from_file(path: str, asked: Asked, overrides: list[str]) -> Job:
    from elastic_train.config.load import load_job

    given = {
        "data.sequence_length": asked.seq,
        "training.global_batch": asked.global_batch,
        "hosts.memory": asked.gpu_memory,
        "hosts.device": None if asked.gpu is None else _device(asked.gpu),
    }
    return load_job(path, [*overrides, *(f"{key}={value}" for key, value in given.items() if value is not None)])


def _from_model(asked: Asked, overrides: list[str], assumed: list[str]) -> Job:
    import yaml

    from elastic_train.config.load import parse_job

    if asked.gpus is None:
        raise UserError("--gpus: how many accelerators there are must be given, e.g. --gpus 64")
    name, model, longest, window = _model(str(asked.model))
    sequence = min(DEFAULT_SEQUENCE, longest) if asked.seq is None else asked.seq
    batch = max(1, DEFAULT_TOKENS_PER_STEP // sequence) if asked.global_batch is None else asked.global_batch
    if asked.seq is None:
        assumed.append(f"--seq {sequence}")
    if asked.global_batch is None:
        assumed.append(f"--global-batch {batch} (about 4 million tokens a step)")
    if window is not None and window < sequence:
        assumed.append(f"attention without the sliding_window={window:,} of {asked.model}: here it has none")
    steps = DEFAULT_STEPS if asked.tokens is None else max(1, round(asked.tokens / (batch * sequence)))
    device = _device(DEFAULT_GPU if asked.gpu is None else asked.gpu)
    hosts: dict[str, Any] = {"min": asked.gpus, "max": asked.gpus, "device": device}
    if asked.gpu_memory is not None:
        hosts["memory"] = asked.gpu_memory
    values = {
        "name": name,
        "model": model,
        "data": {"uri": "data", "sequence_length": sequence},
        "training": {
            "steps": steps,
            "global_batch": batch,
            "precision": "fp32" if device == "cpu" else "bf16",
        },
        "hosts": hosts,
    }
    return parse_job(yaml.safe_dump(values), overrides, source="the question")


def _device(gpu: str) -> str:
    return "cpu" if gpu.lower() == "cpu" else "cuda"


def _model(name: str) -> tuple[str, dict[str, Any], int, int | None]:
    """(name of the job, its model section, longest sequence, sliding window) of a preset or a ``config.json``."""
    from elastic_train.config.presets import PRESETS

    if name in PRESETS:
        return name, {"preset": name}, int(PRESETS[name].get("max_position_embeddings", 8192)), None
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(
            f"--model {name}: must be one of {', '.join(PRESETS)}, or the path of a Hugging Face config.json{hint}"
        )
    model, window = _read_hf(path)
    called = path.parent.name if path.name == "config.json" else path.stem
    called = re.sub(r"[^A-Za-z0-9._-]+", "-", called).strip("-._") or "model"
    return called, model, model["max_position_embeddings"], window


def _read_hf(path: Path) -> tuple[dict[str, Any], int | None]:
    """The model section and its sliding window."""
    from elastic_train.config.errors import ConfigError
    from elastic_train.config.hf import model_from_hf, sliding_window

    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--model {path}: cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"--model {path}: must hold a JSON object, the config.json of a Hugging Face model")
    try:
        return model_from_hf(config).model_dump(mode="json", exclude_none=True), sliding_window(config)
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in error.problems]) from None
