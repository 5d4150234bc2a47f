"""A user's own accelerator, described in a YAML file."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from elastic_train.config.errors import ConfigError
from elastic_train.config.yaml_text import YamlError, parse_yaml
from elastic_train.planner.exchange import Collective
from elastic_train.planner.hardware import Accelerator

HOST_MEMORY = "assumed: 1 TiB a node"
Precision = Literal["fp32", "bf16", "fp8"]


class _File(BaseModel):
    """The YAML file of a user's own accelerator; units are in the names."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str
    memory_bytes: Annotated[int, Field(gt=0)]
    peak_flops: dict[Precision, Annotated[float, Field(gt=0)]] = Field(min_length=1)
    memory_bytes_per_second: Annotated[float, Field(gt=0)]
    link_bytes_per_second: Annotated[float, Field(gt=0)]
    network_bytes_per_second: Annotated[float, Field(gt=0)]
    host_link_bytes_per_second: Annotated[float, Field(gt=0)] = 32e9
    host_memory_bytes_per_second: Annotated[float, Field(gt=0)] = 50e9
    host_memory_bytes: Annotated[int, Field(gt=0)] = 2**40
    link_latency_seconds: Annotated[float, Field(ge=0)] = 2e-6
    network_latency_seconds: Annotated[float, Field(ge=0)] = 5e-6
    per_node: Annotated[int, Field(ge=1)]
    efficiency: Annotated[float, Field(gt=0, le=1)] = 0.5
    fp8_share: Annotated[float, Field(gt=0, le=1)] = 0.7
    transfer_efficiency: Annotated[float, Field(gt=0, le=1)] = 0.8
    masked_attention: Annotated[float, Field(gt=0, le=1)] = 0.5
    launch_seconds: Annotated[float, Field(ge=0)] = 0.0
    collective_shares: dict[Collective, Annotated[float, Field(gt=0, le=1)]] = {}
    exchange_seconds: Annotated[float, Field(ge=0)] = 0.0
    block_seconds: Annotated[float, Field(ge=0)] = 0.0
    computing_at_once: Annotated[int, Field(ge=1)] | None = None
    mesh: bool = False
    overlaps: bool = True
    sources: dict[str, str] | None = None


def load_accelerator(path: str | Path) -> Accelerator:
    """An accelerator from a YAML file with the fields of ``Accelerator``. Raises ConfigError with every problem."""
    try:
        values = parse_yaml(Path(path).read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror or error}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            [f"{path}: byte {error.start} is not UTF-8; a description of an accelerator is YAML"]
        ) from None
    except YamlError as error:
        raise ConfigError([str(error)]) from None
    if not isinstance(values, dict):
        raise ConfigError(
            [f"{path}: must be a mapping of the fields {', '.join(each.name for each in fields(Accelerator))}"]
        )
    try:
        loaded = _File.model_validate(values)
    except ValidationError as error:
        problems = [
            f"{path}: {'.'.join(map(str, each['loc']))}={each['input']!r}: {each['msg']}"
            if each["type"] != "missing"
            else f"{path}: {'.'.join(map(str, each['loc']))} is missing"
            for each in error.errors()
        ]
        raise ConfigError(problems) from error
    assumed = {} if "host_memory_bytes" in loaded.model_fields_set else {"host_memory_bytes": HOST_MEMORY}
    return Accelerator(**{**dict(loaded), "sources": (loaded.sources or {}) | assumed})
