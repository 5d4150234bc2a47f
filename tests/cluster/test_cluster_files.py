"""The cluster files in ``cluster/``: Ray takes them, what they name is there, and versions are those of the tests."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import botocore.session
import botocore.validate
import click
import pytest
import ray.autoscaler
import typer
from ray.autoscaler._private.aws.config import _configure_from_network_interfaces
from ray.scripts.scripts import start

from elastic_train.cli.main import app
from elastic_train.cluster.cluster_file import most_seats, read_cluster
from elastic_train.config.errors import ConfigError
from elastic_train.controller.local_node import HEALTH_CHECKS
from elastic_train.controller.ray_versions import TESTED_RAY_VERSIONS
from tests.cli.command import ROOT, elastic_train

FOLDER = ROOT / "cluster"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))
TEXTS = [path for path in sorted(FOLDER.iterdir()) if path.is_file()]
FOR_RAY_UP = ["aws.yaml", "gcp.yaml", "on-premises.yaml"]
COMMANDS = ("setup_commands", "head_setup_commands", "worker_setup_commands")
START_COMMANDS = ("head_start_ray_commands", "worker_start_ray_commands")
VERSIONS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if "==" in line and not line.startswith("#")
)


def commands(config: dict[str, Any], *keys: str) -> list[str]:
    return [command for key in keys for command in config.get(key, [])]


def starts(config: dict[str, Any], key: str) -> list[str]:
    """Words after ``ray start`` in the command of that key."""
    (command,) = [command for command in config[key] if "ray start" in command]
    return shlex.split(command.partition("ray start")[2])


@pytest.mark.parametrize("name", FILES)
def test_ray_takes_the_file(name: str) -> None:
    config = read_cluster(FOLDER / name)
    assert config["max_workers"] > 0
    assert config["idle_timeout_minutes"] > 0


@pytest.mark.parametrize("name", FOR_RAY_UP)
def test_commands_are_of_this_shell_and_of_this_ray(name: str) -> None:
    config = read_cluster(FOLDER / name)
    for command in commands(config, *COMMANDS, *START_COMMANDS):
        subprocess.run(["bash", "-n", "-c", command], check=True, timeout=10)
    for key in START_COMMANDS:
        start.make_parser(click.Context(start)).parse_args(starts(config, key))  # unknown options are an error
    head, worker = (starts(config, key) for key in START_COMMANDS)
    assert {"--head", "--num-cpus=0", "--num-gpus=0", "--dashboard-host=127.0.0.1"} <= set(head)
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in head
    assert "--address=$RAY_HEAD_IP:6379" in worker
    for command in commands(config, *START_COMMANDS):
        assert "ray start" not in command or "export RAY_AUTH_MODE=token" in command


@pytest.mark.parametrize("name", FOR_RAY_UP)
def test_a_machine_that_is_gone_is_noticed_as_in_the_tests(name: str) -> None:
    (command,) = [each for each in read_cluster(FOLDER / name)["head_start_ray_commands"] if "ray start" in each]
    before, _, _ = command.partition("ray start")
    exported = dict(word.split("=") for word in shlex.split(before) if "=" in word)
    assert exported.items() >= HEALTH_CHECKS.items()


@pytest.mark.parametrize("name", FOR_RAY_UP)
def test_machines_get_the_token_and_all_that_an_installation_needs(name: str) -> None:
    mounts = read_cluster(FOLDER / name)["file_mounts"]
    assert mounts["~/.ray/auth_token"] == "~/.ray/auth_token"
    for needed in ("elastic_train", "pyproject.toml", "constraints.txt", "README.md", "LICENSE", "cluster"):
        assert mounts[f"~/elastic-train/{needed}"] == needed
    assert set(re.findall(r"~/elastic-train/(cluster/[\w@.-]+)", str(commands(read_cluster(FOLDER / name), *COMMANDS))))


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_files_and_versions_that_are_named_exist(path: Path) -> None:
    text = path.read_text()
    for named in re.findall(r"~/elastic-train/((?:cluster|constraints)[\w@./-]+)", text):
        assert (ROOT / named).exists(), named
    for package, version in re.findall(r"([\w-]+)(?:\[[^\]]*\])?==([\w.]+)", text):
        assert VERSIONS.get(package, version) == version, package
    for line in text.splitlines():
        if "pip install" in line:
            assert "--constraint" in line or re.search(r"==[\d.]+$", line), f"{line} pins nothing"
    assert not re.search(r"AKIA|PRIVATE KEY|password|secret", text, re.IGNORECASE)


def test_the_extra_gcp_has_what_ray_imports_for_google_cloud() -> None:
    """Ray's provider needs packages that neither Ray nor this package asks for otherwise, here and on the head."""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gcp"]
    asked = {re.split(r"[<>=]", each)[0] for each in extra}
    asked |= {"google-auth", "httplib2"}  # of google-api-python-client
    assert asked <= VERSIONS.keys()
    provider = Path(ray.autoscaler.__file__).parent / "_private" / "gcp"
    source = "\n".join(path.read_text() for path in provider.glob("*.py"))
    imported = set(re.findall(r"^(?:import|from) (google\w*|httplib2)", source, re.MULTILINE))
    packages = {
        "google": "google-auth",
        "google_auth_httplib2": "google-auth-httplib2",
        "googleapiclient": "google-api-python-client",
        "httplib2": "httplib2",
    }
    assert {packages[name] for name in imported} == asked
    (command,) = read_cluster(FOLDER / "gcp.yaml")["head_setup_commands"]
    assert shlex.split(command)[-2:] == ["--editable", "~/elastic-train[gcp]"]
    for text in ("cluster/gcp.yaml", "docs/clusters.md"):
        assert "'.[gcp]'" in (ROOT / text).read_text()


@pytest.mark.parametrize("name", FOR_RAY_UP)
def test_head_and_workers_have_one_ray_and_one_python(name: str) -> None:
    """RY-09: Ray refuses a process whose Python differs by a patch version."""
    config = read_cluster(FOLDER / name)
    assert config["setup_commands"] == ["bash ~/elastic-train/cluster/setup_node.sh"]
    for kind in config.get("available_node_types", {}).values():
        assert not {"initialization_commands", "worker_setup_commands", "docker"} & set(kind)
    assert VERSIONS["ray"] in TESTED_RAY_VERSIONS
    script = (FOLDER / "setup_node.sh").read_text()
    assert "--managed-python --python 3.11 " in script  # the patch version follows from that of uv, which is pinned
    assert re.search(r"uv==[\d.]+\n", script)


def test_setup_script_and_unit_are_well_formed() -> None:
    subprocess.run(["bash", "-n", str(FOLDER / "setup_node.sh")], check=True, timeout=10)
    (line,) = re.findall(r"^ExecStart=(.*)$", (FOLDER / "elastic-train-spot-watch@.service").read_text(), re.MULTILINE)
    program, *words = shlex.split(line)
    assert program.endswith("/.venv/bin/elastic-train")
    command = typer.main.get_command(app)
    for cloud in ("aws", "gcp"):
        with command.make_context("elastic-train", [word.replace("%i", cloud) for word in words]) as context:
            group = command.get_command(context, "cluster")  # type: ignore[attr-defined]
            watch = group.get_command(context, words[1])
            watch.make_context("watch-spot", ["--cloud", cloud])


def test_aws_takes_the_machines() -> None:
    """Against the shapes of AWS's own API; nothing is sent."""
    config = read_cluster(FOLDER / "aws.yaml")
    kinds = _configure_from_network_interfaces(config)["available_node_types"]
    shape = botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape
    for name, kind in config["available_node_types"].items():
        request = {**kind["node_config"], "MinCount": 1, "MaxCount": 1}
        if "SubnetIds" in request:  # Ray's own field, of which it takes one; a SubnetId beside it is overwritten
            (request["SubnetId"],) = request.pop("SubnetIds")
        report = botocore.validate.ParamValidator().validate(request, shape)
        assert not report.has_errors(), f"{name}: {report.generate_report()}"
        assert kinds[name]["node_config"].get("SecurityGroupIds"), name
        assert set(kinds[name]["node_config"]["SubnetIds"]) == {"subnet-REPLACE-ME"}, name
    assert "InstanceMarketOptions" not in config["available_node_types"]["head"]["node_config"]
    assert config["available_node_types"]["gpu-spot"]["node_config"]["InstanceMarketOptions"]["MarketType"] == "spot"
    cards = [card["NetworkCardIndex"] for card in kinds["gpu"]["node_config"]["NetworkInterfaces"]]
    assert cards == [0, 1, 2, 3]


WRONG = [
    ("max_workers: 4", "", "max_workers is missing; give the most machines beside the head"),
    ("max_workers: 4\nup", "max_workers: 2\nup", None),
    ("min_workers: 0", "min_workers: 5", "machine.min_workers=5 is not between 0 and its max_workers=4"),
    (
        "max_workers: 4\nupscaling_speed: 10",
        "max_workers: 2\nupscaling_speed: 10\nmin_workers: 4",
        "Additional properties are not allowed ('min_workers' was unexpected)",
    ),
    ("{CPU: 0}", "{CPU: 2}", "available_node_types.head.resources: the head has the coordinator; give it CPU: 0"),
    ("{CPU: 0}", "{CPU: 0, GPU: 1}", "available_node_types.head.resources: the head has the coordinator; give it"),
    ("head_node_type: head", "head_node_type: top", "head_node_type='top' is none of available_node_types: head, mach"),
    ("CPU: 1,", "CPU: one,", "available_node_types.machine.resources.CPU: 'one' is not of type 'integer'"),
    ("idle_timeout_minutes: 1", "idle_timeout_minute: 1", "('idle_timeout_minute' was unexpected)"),
    ("file_mounts: {}", "file_mounts: {~/a: nowhere/b}", "file_mounts['~/a']='nowhere/b' is not there"),
    ("auth: {}\n", "auth: {}\nauth: {}\n", "the key 'auth' appears twice"),
]


@pytest.mark.parametrize(("old", "new", "sentence"), WRONG)
def test_mistakes_get_a_sentence(tmp_path: Path, old: str, new: str, sentence: str | None) -> None:
    text = (FOLDER / "local.yaml").read_text()
    path = tmp_path / "cluster" / "local.yaml"
    path.parent.mkdir()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    if sentence is None:
        read_cluster(path)
        return
    with pytest.raises(ConfigError) as refused:
        read_cluster(path)
    assert sentence in str(refused.value)
    assert str(refused.value).startswith(f"{path}: ")


def test_more_least_workers_than_may_run_are_refused_before_ray_up(tmp_path: Path) -> None:
    """RY-05."""
    text = (FOLDER / "local.yaml").read_text()
    (tmp_path / "c.yaml").write_text(
        text.replace("max_workers: 4\nup", "max_workers: 2\nup").replace("min_workers: 0", "min_workers: 4")
    )
    done = elastic_train("cluster", "validate", "c.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "error: c.yaml: max_workers=2 is less than the min_workers of all kinds together, 4: Ray would start and stop "
        "machines for ever; raise it or lower them\n"
    )
    for wrong in ("nowhere.yaml", "."):
        assert elastic_train("cluster", "validate", wrong, cwd=tmp_path).returncode == 2


@pytest.mark.parametrize(
    ("hosts", "code", "said"),
    [
        ("hosts: {min: 65, max: 65, device: cuda}", 2, "room for 64 hosts, and the head for none; hosts.min=65 would"),
        ("hosts: {min: 8, max: 65, device: cuda}", 0, "room for 64 hosts, and the head for none; hosts.max=65 will"),
        ("hosts: {max: 64, device: cuda}", 0, "WorkerProfileArn-REPLACE-ME, ami-REPLACE-ME, subnet-REPLACE-ME\n"),
        ("hosts: {min: 64, max: 64, device: cuda}", 0, "at most 8 workers (4 gpu with 96 CPU, 8 GPU each; 8 gpu-spot"),
    ],
)
def test_hosts_that_there_is_no_room_for(tmp_path: Path, hosts: str, code: int, said: str) -> None:
    """RY-11: the head's machine counts for nothing."""
    data = "{uri: data, sequence_length: 32}"
    job = f"name: a\nmodel: {{preset: tiny}}\ndata: {data}\ntraining: {{steps: 1, global_batch: 64}}\n{hosts}\n"
    (tmp_path / "job.yaml").write_text(job)
    file = str(FOLDER / "aws.yaml")
    done = elastic_train("cluster", "validate", file, "--config", str(tmp_path / "job.yaml"), cwd=ROOT)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr


def test_seats_of_different_machines_are_counted_from_the_largest() -> None:
    kinds = {
        "head": {"resources": {"CPU": 0}},
        "large": {"resources": {"CPU": 8, "GPU": 4}, "max_workers": 2},
        "small": {"resources": {"CPU": 8, "GPU": 1}, "max_workers": 9},
        "none": {"resources": {"CPU": 8}, "max_workers": 9},
    }
    config = {"max_workers": 4, "head_node_type": "head", "provider": {"type": "aws"}, "available_node_types": kinds}
    assert most_seats(config, {"CPU": 1.0, "GPU": 1.0}) == 2 * 4 + 2 * 1
    assert most_seats(config, {"CPU": 4.0, "GPU": 1.0}) == 2 * 2 + 2 * 1
    assert most_seats(config, {"CPU": 16.0}) == 0
    assert most_seats(read_cluster(FOLDER / "on-premises.yaml"), {"CPU": 1.0}) is None
