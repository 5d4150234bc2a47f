"""Job files: YAML text + ``section.key=value`` overrides -> a checked ``Job``, or every problem at once."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from elastic_train.config.errors import ConfigError
from elastic_train.config.job import Job
from elastic_train.config.presets import PRESETS
from elastic_train.config.schema import accepted, section_of, unknown_keys
from elastic_train.config.section import Problems, Section
from elastic_train.config.yaml_text import YamlError, parse_yaml


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """Read the job file at ``path`` and apply ``overrides`` in order. Raises ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file; give the path of a job file (YAML)"]) from None
    except IsADirectoryError:
        raise ConfigError([f"{path}: is a folder; give the path of a job file (YAML)"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: byte {error.start} is not UTF-8; a job file is YAML text"]) from None
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    return parse_job(text, overrides, source=str(path))


def parse_job(text: str, overrides: Sequence[str] = (), *, source: str = "job file") -> Job:
    """The job that YAML ``text`` describes; ``source`` names it in messages. Raises ConfigError."""
    try:
        data = parse_yaml(text, source)
    except YamlError as error:
        raise ConfigError([str(error)]) from None
    if data is None:
        raise ConfigError([f"{source}: is empty; a job file needs at least name, model, data and training"])
    if not isinstance(data, dict):
        raise ConfigError([f"{source}: holds {_kind(data)}; a job file is a mapping with the keys {_top_level()}"])
    problems: list[str] = []
    _expand_auto(data)
    for override in overrides:
        problems += apply_override(data, override)
        _expand_auto(data)
    problems += _expand_preset(data)
    _expand_token_budget(data)
    job = _validate(data, problems)
    if job is None:
        raise ConfigError(problems)
    return job


def _top_level() -> str:
    return ", ".join(Job.model_fields)


def _kind(value: Any) -> str:
    names = {list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


def apply_override(data: dict[str, Any], override: str) -> list[str]:
    """Set one ``a.b=value`` in ``data``; returns the problems."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        return [f"override {override!r}: write section.key=value, e.g. training.steps=200"]
    try:
        value = parse_yaml(text, f"override {override!r}")
    except YamlError as error:
        return [str(error)]
    place = data
    for depth, key in enumerate(keys[:-1]):
        inner = place.setdefault(key, {})
        if inner is None:
            inner = place[key] = {}
        if not isinstance(inner, dict):
            return [f"override {override!r}: {'.'.join(keys[: depth + 1])} is {inner!r}, a value and not a section"]
        place = inner
    place[keys[-1]] = value
    return []


def _expand_auto(data: dict[str, Any]) -> None:
    """``parallel: auto`` leaves every axis to the planner that the data strategy does not fix."""
    if data.get("parallel") == "auto":
        data["parallel"] = dict.fromkeys(("pp", "dp_shard", "cp", "tp"), "auto")


def _expand_preset(data: dict[str, Any]) -> list[str]:
    """Replace ``model.preset`` by its keys, over which the user's own keys win."""
    model = data.get("model")
    if isinstance(model, str) and model in PRESETS:
        return [f"model={model}: write model: {{preset: {model}}}"]
    if not isinstance(model, dict) or "preset" not in model:
        return []
    name = model.pop("preset")
    if not isinstance(name, str) or name not in PRESETS:
        close = difflib.get_close_matches(str(name), PRESETS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return [f"model.preset={_show(name)}: must be one of {', '.join(PRESETS)}{hint}"]
    data["model"] = _merge(copy.deepcopy(PRESETS[name]), model)
    return []


def _expand_token_budget(data: dict[str, Any]) -> None:
    """``training.global_tokens`` is another way to write ``training.global_batch``; ``Job`` checks that it divides."""
    training, shape = data.get("training"), data.get("data")
    if not isinstance(training, dict) or not isinstance(shape, dict) or "global_batch" in training:
        return
    tokens, length = training.get("global_tokens"), shape.get("sequence_length")
    if isinstance(tokens, int) and isinstance(length, int) and length > 0:
        training["global_batch"] = max(1, tokens // length)


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value
    return base


def _validate(data: dict[str, Any], problems: list[str]) -> Job | None:
    """The job, or None with all sentences added to ``problems``."""
    unknown = dict(unknown_keys(data))
    problems += unknown.values()
    job = None
    try:
        # The JSON mode of pydantic is strict about types and yet takes a list for a tuple.
        job = Job.model_validate_json(json.dumps(data))
    except ValidationError as error:
        preset_failed = any(problem.startswith(("model=", "model.preset=")) for problem in problems)
        for details in error.errors(include_url=False):
            if not (preset_failed and details["loc"][:1] == ("model",)):
                problems += [text for text in _sentences(details, data) if text not in problems]
    except (TypeError, ValueError) as error:
        problems.append(f"job file: holds a value that is not text, a number, a list or a mapping: {error}")
    return None if problems else job


def _sentences(details: ErrorDetails, data: dict[str, Any]) -> list[str]:
    """What a pydantic error means to the user; empty where ``unknown_keys`` has said it."""
    if details["type"] == "extra_forbidden":
        return []
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, Problems):
        return cause.problems
    path, annotation, metadata, description = _locate(details["loc"])
    value = _value_at(data, path)
    if isinstance(cause, ValueError):
        named = path and not isinstance(value, dict)
        return [f"{path}={_show(value)}: {cause}" if named else f"{path}: {cause}" if path else str(cause)]
    if details["type"] == "missing" and value is None:
        return [f"{path}: is required: {accepted(annotation, metadata)}{f' ({description})' if description else ''}"]
    return [f"{path}={_show(value)}: must be {accepted(annotation, metadata)}"]


def _locate(location: tuple[int | str, ...]) -> tuple[str, Any, list[Any], str | None]:
    """Dotted path, annotation, bounds and description of the field at (or around) a pydantic location."""
    section: type[Section] | None = Job
    path: list[str] = []
    annotation: Any = Job
    metadata: list[Any] = []
    description = None
    for key in location:
        if isinstance(key, int) and section is not None:  # of a list of sections
            path.append(str(key))
            annotation, metadata, description = section, [], None
            continue
        field = section.model_fields.get(str(key)) if section else None
        if field is None:  # a member of a union, or of a list of values: the whole field is named
            break
        path.append(str(key))
        annotation, metadata, description = field.annotation, field.metadata, field.description
        section = section_of(field)
    return ".".join(path), annotation, metadata, description


def _value_at(data: Any, path: str) -> Any:
    for key in filter(None, path.split(".")):
        if isinstance(data, list):
            data = data[int(key)]
        else:
            data = data.get(key) if isinstance(data, dict) else None
    return data


def _show(value: Any) -> str:
    """A value as it would be written in YAML, cut to a line."""
    text = value if isinstance(value, str) and value else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
