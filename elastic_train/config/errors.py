"""What is wrong with a job file. Imports nothing: the command line needs it before anything else."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(Exception):
    """The user's job file or overrides are wrong; ``problems`` holds one sentence per mistake."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)
