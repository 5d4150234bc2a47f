"""Task files: what a verb of the command line shall do, as YAML, so that it can be sent to a cluster like a job.

    name: prepare-stdlib
    prepare_data: {inputs: [python-stdlib], output: runs/data/python-stdlib}
    needs: {cpus: 2}

The section is named after the verb and has its options, as in its --help, with underscores.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from elastic_train.config.errors import ConfigError
from elastic_train.config.load import apply_override
from elastic_train.config.yaml_text import YamlError, parse_yaml

VERBS = {"prepare_data": ("data", "prepare"), "evaluate": ("evaluate",), "export_hf": ("export-hf",)}
"""Section of a task file -> the verb."""
NEEDS = ("cpus", "gpus")
"""What the machine must have free for the task, if it runs on a cluster."""


@dataclass(frozen=True, slots=True)
class Task:
    """A verb with its options. ``needs`` are CPUs and GPUs; ``source`` is the file, for messages."""

    name: str
    section: str
    options: dict[str, Any]
    needs: dict[str, float]
    source: str


def read_task(path: str, overrides: Sequence[str]) -> Task | None:
    """The task that a file describes; None when it is no task file: then it is a job file, or its reader says more.

    Raises ConfigError with every problem that can be told without the verb.
    """
    data = _content(path)
    sections = [section for section in VERBS if section in data]
    if not sections:
        return None
    problems = [problem for override in overrides for problem in apply_override(data, override)]
    problems += _problems(data, sections)
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return Task(data["name"], sections[0], data[sections[0]] or {}, data.get("needs") or {}, path)


def _content(path: str) -> dict[Any, Any]:
    try:
        data = parse_yaml(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError, YamlError):
        return {}
    return data if isinstance(data, dict) else {}


def _problems(data: dict[str, Any], sections: list[str]) -> Iterator[str]:
    if len(sections) > 1:
        yield f"has the sections {' and '.join(sections)}; a task is one of them"
    name = data.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name):
        yield f"name={name!r}: use 1 to 63 letters, digits, '.', '_' or '-', starting with a letter or digit"
    for key in data.keys() - {"name", "needs", *VERBS}:
        yield f"{key}: is no field of a task file; it has name, needs and {sections[0]}"
    if not isinstance(data[sections[0]], dict | None):
        yield f"{sections[0]}={data[sections[0]]!r}: must be a mapping of the verb's options"
    needs = data.get("needs") or {}
    if not isinstance(needs, dict) or needs.keys() - set(NEEDS):
        yield f"needs={needs!r}: must be a mapping with the keys {', '.join(NEEDS)}"
        return
    for key, value in needs.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            yield f"needs.{key}={value!r}: must be a number of at least 0"


def prepared(task: Task, context: typer.Context) -> Any:
    """The verb's context with its checked options. ``context``: of any verb of the same command line.

    Raises ConfigError for an option that there is not, or a value that it does not take.
    """
    root: Any = context.find_root()
    command = root.command
    for word in VERBS[task.section]:
        command = command.get_command(root, word)
    words = _words(task, command)
    try:
        return command.make_context(" ".join(VERBS[task.section]), words, parent=root)
    except typer.BadParameter as error:
        raise ConfigError([f"{task.source}: {task.section}: {error.format_message()}"]) from None


def _words(task: Task, command: Any) -> list[str]:
    """The options as words of a command line."""
    by_key = {key: parameter for parameter in command.params for key in _keys(parameter)}
    unknown = [key for key in task.options if key not in by_key]
    if unknown:
        accepted = ", ".join(parameter.name or "" for parameter in command.params if parameter.name != "help")
        raise ConfigError([f"{task.source}: {task.section}.{key}: must be one of {accepted}" for key in unknown])
    options: list[str] = []
    arguments: list[str] = []
    for key, value in task.options.items():
        parameter = by_key[key]
        if value is None or value is False:
            continue
        if parameter.param_type_name == "argument":
            arguments.append(str(value))
        elif value is True:
            options.append(parameter.opts[0])
        else:
            options += [word for one in _listed(value) for word in (parameter.opts[0], str(one))]
    return [*options, "--", *arguments]


def _keys(parameter: Any) -> set[str]:
    """What an option may be called in a task file: ``inputs`` and ``input`` for ``--input``."""
    return {parameter.name or "", *(option.lstrip("-").replace("-", "_") for option in parameter.opts)} - {"help"}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
