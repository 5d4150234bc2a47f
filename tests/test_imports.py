"""What importing must not load: command line and coordinator start fast, the engine needs neither Ray nor MLflow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGINE = [
    f"elastic_train.{path.relative_to(ROOT / 'elastic_train').with_suffix('').as_posix().replace('/', '.')}"
    for layer in ("config", "storage", "planner", "data", "model", "parallel", "training")
    for path in sorted((ROOT / "elastic_train" / layer).rglob("*.py"))
    if path.name not in ("__init__.py", "__main__.py")
]


def loaded(modules: list[str], watched: set[str], hidden: set[str] = frozenset()) -> set[str]:
    """Which of ``watched`` a fresh interpreter has loaded after importing ``modules``, ``hidden`` ones being absent."""
    code = f"""
import importlib, sys
for name in {sorted(hidden)!r}:
    sys.modules[name] = None
for name in {modules!r}:
    importlib.import_module(name)
print(*(name for name in {sorted(watched)!r} if sys.modules.get(name) is not None))
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_the_command_line_loads_nothing_heavy() -> None:
    heavy = {"torch", "ray", "mlflow", "pyarrow", "numpy", "pydantic", "boto3", "yaml", "tokenizers"}
    assert loaded(["elastic_train.cli.main"], heavy) == set()


def test_the_planner_and_the_job_file_need_no_torch() -> None:
    modules = [name for name in ENGINE if name.split(".")[1] in ("config", "storage", "planner", "data")]
    assert loaded(modules, {"torch", "ray", "mlflow"}) == set()


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--params", "70e9", "--ranks", "64", "--strategy", "zero3", "--json"],
        ["simulate", "--nodes", "4", "--runs", "1"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_a_question_is_answered_without_torch_ray_and_mlflow(command: list[str]) -> None:
    """The whole command, to its end: what is loaded late counts, too."""
    code = f"""
import sys
from elastic_train.cli.main import app
try:
    app({command!r})
except SystemExit as end:
    assert not end.code
print("loaded:", *(name for name in ("torch", "ray", "mlflow", "matplotlib") if name in sys.modules))
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "loaded:"


def test_the_driver_needs_no_gpu() -> None:
    """RY-08: it runs on the head, which has none; what it never imports touches no driver of NVIDIA."""
    assert loaded(["elastic_train.controller.run", "elastic_train.controller.ray_actors"], {"torch"}) == set()


def test_the_coordinators_actor_needs_neither_ray_train_nor_torch() -> None:
    assert loaded(["elastic_train.controller.ray_actors"], {"ray.train", "pandas", "torch"}) == set()


@pytest.mark.slow
def test_the_engine_imports_where_ray_and_mlflow_are_not_installed() -> None:
    assert loaded(ENGINE, {"ray", "mlflow"}, hidden={"ray", "mlflow"}) == set()
