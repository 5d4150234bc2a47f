"""The reference of the job file, made from the models: ``python -m elastic_train.config.reference > docs/jobs.md``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from inspect import cleandoc

from pydantic.fields import FieldInfo

from elastic_train.config.job import Job
from elastic_train.config.presets import PRESETS
from elastic_train.config.schema import accepted, section_of
from elastic_train.config.section import Section

_HEAD = """# The job file

One YAML file. Unknown keys, wrong types and impossible combinations are reported together, each in one sentence, before
anything is launched (exit code 2). On the command line `section.key=value` overrides a field. Sizes are in sequences
(batches), tokens (`sequence_length`) or optimizer steps (`*steps`), times in seconds.

`model` takes `preset:` ({presets}) and any of its fields beside it. `parallel: auto` is short for
`parallel: {{pp: auto, dp_shard: auto, cp: auto, tp: auto}}`.
"""


def reference() -> str:
    """The whole page, Markdown."""
    parts = [_HEAD.format(presets=", ".join(f"`{name}`" for name in PRESETS))]
    parts += ["## Top level", "", *_table(Job, "")]
    for name, field in Job.model_fields.items():
        if (section := section_of(field)) is not None:
            parts += ["", f"## {name}", "", cleandoc(section.__doc__ or ""), "", *_table(section, f"{name}.")]
    return "\n".join(parts) + "\n"


def _table(section: type[Section], prefix: str) -> Iterator[str]:
    yield "| field | accepted | default | |"
    yield "|---|---|---|---|"
    yield from _rows(section, prefix)


def _rows(section: type[Section], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = section_of(field)
        if inner is not None and section is Job:
            continue
        values = accepted(field.annotation, field.metadata)
        yield f"| `{prefix}{name}` | {values} | {_default(field)} | {field.description or ''} |"
        if inner is not None:
            yield from _rows(inner, f"{prefix}{name}.")


def _default(field: FieldInfo) -> str:
    return "required" if field.is_required() else f"`{json.dumps(field.default)}`"


if __name__ == "__main__":
    print(reference(), end="")
