"""Commands, files and fields that the pages for operators name are there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from elastic_train.cli.main import app
from elastic_train.cluster.cluster_file import read_cluster

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("operations.md", "infra.md", "kuberay.md", "submitting.md", "clusters.md")
COMMAND = typer.main.get_command(app)


def text(page: str) -> str:
    return (ROOT / "docs" / page).read_text()


def commands(text: str) -> list[list[str]]:
    """The words after ``elastic-train`` in each code span and block."""
    return [line.split() for line in re.findall(r"elastic-train ([a-z][^`\n\")]*)", re.sub(r"``+\n", "", text))]


def mistakes(words: list[str]) -> str | None:
    """Which command or option of a line is not there."""
    command: Any = COMMAND
    rest = list(words)
    while hasattr(command, "commands"):
        name = rest.pop(0) if rest else "nothing"
        if name not in command.commands:
            return f"{name} in elastic-train {' '.join(words)}"
        command = command.commands[name]
    known = {"--help"} | {option for parameter in command.params for option in parameter.opts}
    unknown = {word.split("=")[0] for word in rest if word.startswith("--")} - known
    return f"{unknown} in elastic-train {' '.join(words)}" if unknown else None


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_their_options_are_there(page: str) -> None:
    found = commands(text(page))
    assert found
    assert [mistake for words in found if (mistake := mistakes(words))] == []


@pytest.mark.parametrize("page", [path.name for path in sorted((ROOT / "docs").glob("*.md"))])
def test_data_are_prepared_on_a_cluster_with_both_options(page: str) -> None:
    """`--address` alone is refused."""
    assert [words for words in commands(text(page)) if words[:2] == ["data", "prepare"] and "--address" in words
            and "--ray" not in words] == []  # fmt: skip


@pytest.mark.parametrize("line", ["checkpoint repair NAME", "services restart", "stop NAME --graceful 3", "fix"])
def test_one_that_is_not_there_is_noticed(line: str) -> None:
    assert mistakes(commands(f"say `elastic-train {line}`")[0])


@pytest.mark.parametrize("page", PAGES)
def test_files_links_and_sections_are_there(page: str) -> None:
    for path in re.findall(r"`((?:tests|infra|cluster|docs|elastic_train)/[\w./-]+)`", text(page)):
        assert (ROOT / path).exists(), path
    for target, section in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", text(page)):
        headings = re.findall(r"^#+ (.*)$", text(target or page), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert not section or section in anchors, f"{target}#{section}"


def test_fields_and_events_are_there() -> None:
    runbook, fields = text("operations.md"), text("jobs.md")
    named = re.findall(r"`((?:hosts|checkpoint|failure|training|data|snapshot|storage|tracking)\.[a-z_]+)`", runbook)
    assert len(named) > 5
    assert [field for field in named if f"`{field}`" not in fields] == []
    source = "".join(file.read_text() for file in (ROOT / "elastic_train" / "controller").glob("*.py"))
    events = [
        event for listed in re.findall(r"\[(`[a-z_`, ]+`)\]", runbook) for event in re.findall(r"[a-z_]+", listed)
    ]
    assert len(events) > 5
    assert [event for event in events if f'"{event}"' not in source] == []


def test_parameters_of_the_templates_are_there() -> None:
    template = (ROOT / "infra" / "cluster.yaml").read_text()
    rows = re.findall(r"^\| ((?:`[A-Z]\w+`(?:, )?)+) \|", text("infra.md"), re.MULTILINE)
    parameters = [name for row in rows for name in re.findall(r"\w+", row)]
    assert len(parameters) > 5
    assert [name for name in parameters if f"\n  {name}:\n" not in template] == []


def test_quotas_are_those_of_the_cluster_file() -> None:
    config = read_cluster(ROOT / "cluster" / "aws.yaml")
    kinds = config["available_node_types"]
    for kind in ("gpu", "gpu-spot"):
        machines, cpus = kinds[kind]["max_workers"], kinds[kind]["resources"]["CPU"]
        assert f"| {machines} x {cpus} = {machines * cpus} vCPUs |" in text("operations.md")
    disk = kinds["gpu"]["node_config"]["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"]
    machines = config["max_workers"] + 1
    assert f"| {machines} x {disk} GB = {machines * disk / 1000} TB |" in text("operations.md")


def test_a_rayjob_is_reached_as_the_page_says() -> None:
    """A command that goes to a cluster from outside says where; a RayJob's service has no name that is known before."""
    page = text("kuberay.md")
    reached = [words for words in commands(page) if words[0] in ("stop", "status") and len(words) > 1]
    assert reached and all("--address" in words for words in reached)
    assert "elastic-train-head-svc" not in page
