"""Cluster files for ``ray up``: what is wrong with one before a machine is paid for, and what its workers hold."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import ray.autoscaler
from ray.autoscaler._private.util import prepare_config, validate_config

from elastic_train.config.errors import ConfigError
from elastic_train.config.yaml_text import YamlError, parse_yaml

Config = dict[str, Any]

_SCHEMA = Path(ray.autoscaler.__file__).with_name("ray-schema.json")
_ON_PREMISES = "local"
"""Ray's provider of machines that are there already."""


@dataclass(frozen=True, slots=True)
class Group:
    """One kind of worker machines."""

    name: str
    most: int
    """machines"""
    resources: dict[str, float]
    """of each; empty: as Ray finds them there"""


def read_cluster(path: Path) -> Config:
    """The file at ``path``.

    Raises:
        ConfigError: it cannot be read, or is no cluster file; one sentence per mistake.
    """
    try:
        config = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read ({error}); give the path of a cluster file (YAML)"]) from None
    except YamlError as error:
        raise ConfigError([str(error)]) from None
    if not isinstance(config, dict):
        raise ConfigError([f"{path}: holds no mapping; a cluster file has at least cluster_name and provider"])
    if problems := [f"{path}: {problem}" for problem in _problems(config, path.parent)]:
        raise ConfigError(problems)
    return config


def worker_groups(config: Config) -> list[Group]:
    """The kinds of workers of a file that was read; the machines of all of them are ``max_workers`` at most."""
    most: int = config["max_workers"]
    if config["provider"]["type"] == _ON_PREMISES:
        return [Group("worker_ips", min(most, len(config["provider"].get("worker_ips", []))), {})]
    kinds = {name: kind for name, kind in config["available_node_types"].items() if name != config["head_node_type"]}
    return [Group(name, min(most, kind["max_workers"]), kind["resources"]) for name, kind in kinds.items()]


def most_seats(config: Config, seat: dict[str, float]) -> int | None:
    """How many hosts that need ``seat`` the workers have room for at most; None: the file does not say.

    The head has none: it holds the coordinator, and no host is placed there.
    """
    left: int = config["max_workers"]
    groups = worker_groups(config)
    if not all(group.resources for group in groups):
        return None
    rooms = [(int(min(group.resources.get(name, 0) // need for name, need in seat.items())), group) for group in groups]
    seats = 0
    for room, group in sorted(rooms, key=lambda pair: -pair[0]):
        machines = min(left, group.most)
        seats, left = seats + room * machines, left - machines
    return seats


def _problems(config: Config, folder: Path) -> list[str]:
    """Of the first of these checks that finds some: what the later ones would say follows from them."""
    if broken := [_sentence(error) for error in _validator().iter_errors(config)]:
        return broken
    if "max_workers" not in config:
        return ["max_workers is missing; give the most machines beside the head that may run, e.g. max_workers: 4"]
    return [*_machine_problems(config), *_mount_problems(config, folder)] or list(_ray_problems(config))


def _validator() -> Any:
    return jsonschema.Draft7Validator(json.loads(_SCHEMA.read_text()))


def _sentence(error: Any) -> str:
    where = ".".join(str(part) for part in error.absolute_path)
    return f"{where}: {error.message}" if where else str(error.message)


def _machine_problems(config: Config) -> Iterator[str]:
    if config["provider"]["type"] == _ON_PREMISES:
        if "--num-cpus=0" not in " ".join(config.get("head_start_ray_commands", [])):
            yield "head_start_ray_commands: the head is started without --num-cpus=0, so hosts would be placed on it"
        return
    kinds = config.get("available_node_types", {})
    head = config.get("head_node_type")
    if head not in kinds:
        yield f"head_node_type={head!r} is none of available_node_types: {', '.join(kinds) or 'there are none'}"
        return
    if kinds[head]["resources"].get("CPU") != 0 or kinds[head]["resources"].get("GPU"):
        yield f"available_node_types.{head}.resources: the head has the coordinator; give it CPU: 0 and no GPU"
    for name, kind in kinds.items():
        least, most = kind.get("min_workers", 0), kind.get("max_workers")
        if most is None:
            yield f"available_node_types.{name}.max_workers is missing; give the most machines of this kind"
        elif not 0 <= least <= most:
            yield f"available_node_types.{name}.min_workers={least} is not between 0 and its max_workers={most}"
    least = sum(kind.get("min_workers", 0) for kind in kinds.values())
    if least > config["max_workers"]:
        yield (
            f"max_workers={config['max_workers']} is less than the min_workers of all kinds together, {least}: "
            "Ray would start and stop machines for ever; raise it or lower them"
        )


def _mount_problems(config: Config, folder: Path) -> Iterator[str]:
    """Paths are relative to the cluster file's folder's parent, from where ``ray up cluster/FILE`` is called."""
    for there, here in config.get("file_mounts", {}).items():
        if not str(here).startswith("~") and not (folder.parent / here).exists():
            yield f"file_mounts[{there!r}]={here!r} is not there; call `ray up` in the folder it is relative to"


def _ray_problems(config: Config) -> Iterator[str]:
    """What Ray's own checks find beyond the schema."""
    remarks = logging.getLogger("ray.autoscaler")  # about fields that Ray itself has put there
    level = remarks.level
    remarks.setLevel(logging.ERROR)
    try:
        validate_config(prepare_config(copy.deepcopy(config)))
    except Exception as error:  # Ray has no common type for it
        yield f"Ray refuses it: {' '.join(str(error).split())}"
    finally:
        remarks.setLevel(level)
