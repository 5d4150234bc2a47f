"""The Dockerfiles: linted, in step with what the tests ran with, and without root. No image is built here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "infra").glob("Dockerfile*"))
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)


def stages(file: Path) -> dict[str, list[str]]:
    """Lines of each stage, its FROM first; a stage without a name is called "last"."""
    found: dict[str, list[str]] = {}
    for line in re.sub(r"\\\n", " ", file.read_text()).splitlines():
        if line.startswith("FROM "):
            found[line.split(" AS ")[1] if " AS " in line else "last"] = current = [line]
        elif found and line and not line.startswith("#"):
            current.append(line)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_hadolint_has_nothing_to_say(file: Path) -> None:
    command = [Path(sys.executable).with_name("hadolint"), "--failure-threshold", "style", str(file)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (said.returncode, said.stdout) == (0, "")
    assert "hadolint ignore" not in file.read_text()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_runs_is_not_root_and_was_built_elsewhere(file: Path) -> None:
    made = stages(file)
    bases = {line.split()[1] for lines in made.values() for line in lines[:1]} - made.keys()
    assert bases == {"python:3.11.13-slim-bookworm"}  # one base: the virtual environment fits where it is copied to
    for name in {"cpu", "cuda", "last"} & made.keys():
        commands = [line for line in made[name] if line.startswith(("USER", "COPY", "RUN"))]
        assert any(re.match(r"COPY --from=build\S* /opt/venv /opt/venv", line) for line in commands), name
        assert [line for line in commands if line.startswith("USER")] == ["USER 1000:1000"], name
        assert not any("pip" in line for line in commands), name


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_versions_are_those_of_the_tests(file: Path) -> None:
    named = re.findall(r'"([a-z0-9-]+)==([0-9.]+)"', file.read_text())
    assert named
    assert {name: version for name, version in named if name in PINS} == {
        name: PINS[name] for name, _ in named if name in PINS
    }


def test_the_context_has_what_is_copied() -> None:
    """.dockerignore leaves everything out but what is named in it."""
    taken = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for file in FILES:
        for line in file.read_text().splitlines():
            match = re.match(r"COPY (?:--chown=\S+ )?(?!--from)(.+) \S+$", line)
            for source in match[1].split() if match else ():
                assert source in taken and (ROOT / source).exists(), f"{file.name}: {source}"


def test_the_mlflow_server_is_started_with_its_database(tmp_path: Path) -> None:
    """The container's script, with a program in MLflow's place that says how it was called."""
    (tmp_path / "mlflow").write_text('#!/bin/sh\necho "$@"\nenv\n')
    (tmp_path / "mlflow").chmod(0o755)
    script = ROOT / "infra" / "mlflow-server.sh"
    given = {"DATABASE_HOST": "db", "DATABASE_PASSWORD": "Zu9vQ", "MLFLOW_ARTIFACTS_DESTINATION": "s3://b/mlflow"}
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **given}
    said = subprocess.run(["sh", script], env=environment, capture_output=True, text=True, check=True).stdout
    arguments, *variables = said.splitlines()
    assert "--artifacts-destination s3://b/mlflow" in arguments and "--port 5000" in arguments
    assert "Zu9vQ" not in arguments
    assert "MLFLOW_BACKEND_STORE_URI=postgresql://mlflow:Zu9vQ@db:5432/mlflow?sslmode=require" in variables
    assert not any(line.startswith("DATABASE_PASSWORD") for line in variables)
    for name in given:  # and the task gives it what it needs
        assert f"- Name: {name}\n" in (ROOT / "infra" / "mlflow.yaml").read_text()
        without = {key: value for key, value in environment.items() if key != name}
        assert subprocess.run(["sh", script], env=without, capture_output=True, check=False).returncode != 0
