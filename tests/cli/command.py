"""Runs the real command in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def elastic_train(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """``elastic-train ARGUMENTS`` in the folder ``cwd``."""
    return subprocess.run(
        [sys.executable, "-m", "elastic_train.cli.main", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
    )
