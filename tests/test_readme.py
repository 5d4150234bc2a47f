"""What the README tells a reader to write or type must work."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from elastic_train.config.load import parse_job

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_job_file_is_accepted() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    job = parse_job(block)
    assert job.model.num_parameters == 8_030_261_248
    assert job.hosts.max == 64


def test_commands_exist() -> None:
    verbs = set(re.findall(r"elastic-train ([a-z][a-z-]*)", README))
    assert {"data", "validate", "train", "submit", "status"} <= verbs
    for verb in sorted(verbs):
        shown = subprocess.run(
            [sys.executable, "-m", "elastic_train.cli.main", verb, "--help"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert shown.returncode == 0, f"elastic-train {verb}: {shown.stderr}"


def test_files_and_targets_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
