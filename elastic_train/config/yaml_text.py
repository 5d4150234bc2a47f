"""YAML as people mean it: the scalars of YAML 1.2 (``1e-4`` is a number, ``no`` is text), no duplicate keys."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml


class YamlError(Exception):
    """The text is not YAML; the message says where."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with the YAML 1.2 core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - drops the 1.1 rules

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is not text; write it in quotes", key_node.start_mark
                )
            if key in seen and key != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} appears twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_DIGITS = "0123456789"
_RULES = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+", "-+" + _DIGITS),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*)?\.?[0-9]+(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*\.|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+." + _DIGITS,
    ),
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("merge", r"<<", "<"),
)
for _tag, _pattern, _first in _RULES:
    _letters = [*_first, ""] if _tag == "null" else list(_first)
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _letters)


def _construct_merge(loader: _Loader, node: yaml.ScalarNode) -> str:
    """``<<``, as a key like others, before it is replaced by what it stands for."""
    return str(loader.construct_scalar(node))


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    return int(text, 16) if text.lower().startswith("0x") else int(text)


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(
        str(loader.construct_scalar(node)).replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan")
    )


_Loader.add_constructor("tag:yaml.org,2002:merge", _construct_merge)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def parse_yaml(text: str, source: str) -> Any:
    """Value of one YAML document; raises YamlError naming ``source``, line and column."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise YamlError(f"{source}: {place}{_explain(error)}") from None
    except yaml.YAMLError as error:
        raise YamlError(f"{source}: {' '.join(str(error).split())}") from None


def _explain(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "not YAML"
    if "\\t" in problem:
        return "a tab is used for indentation; YAML takes spaces only"
    return f"{error.context}, {problem}" if error.context else problem
