"""The local services: real servers, started and ended by the real command."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner, Result

from elastic_train.cli.main import app
from elastic_train.cli.services.ports import PortPicker
from elastic_train.cli.services.process import ProcessId, start_detached, wait_until_ready
from elastic_train.cli.services.record import Record, Service
from elastic_train.cli.services.secrets_file import read_or_make
from elastic_train.cli.services.verbs import _environment
from elastic_train.storage.errors import StorageError
from elastic_train.storage.store import Store
from tests.cli.command import elastic_train
from tests.ray_job import until
from tests.s3_server import free_ports


def run(verb: str, folder: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["services", verb, "--folder", str(folder), *options])


def shown(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["service"]: row for row in json.loads(run("status", folder, "--json").stdout)["services"]}


def exported(lines: str) -> dict[str, str]:
    """What a shell has in its environment after these lines."""
    printed = subprocess.run(["sh", "-c", f"{lines}\nenv -0"], capture_output=True, text=True, check=True).stdout
    return dict(line.split("=", 1) for line in printed.split("\0") if "=" in line)


# -- with servers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The folder of running services, and what ``up`` has printed."""
    folder = tmp_path_factory.mktemp("services") / "here"
    started = elastic_train("services", "up", "--folder", str(folder), cwd=folder.parent)
    try:
        assert started.returncode == 0, started.stderr
        yield folder, started.stdout
    finally:
        processes = [psutil.Process(row["pid"]) for row in shown(folder).values() if row["pid"]]
        processes += [child for process in processes for child in process.children(recursive=True)]
        assert run("down", folder).exit_code == 0
        assert not [process for process in processes if process.is_running()]


@pytest.fixture
def environment(services: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What ``up`` has printed, in the environment of this process."""
    found = exported(services[1])
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, found[name])
    return found


@pytest.mark.slow
def test_storage_works_with_the_printed_environment(
    services: tuple[Path, str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, printed = services
    store = Store.open("s3://elastic-train/jobs")
    store.create("a/job.json", b"{}")
    assert store.read("a/job.json") == b"{}"
    assert stat.S_IMODE((folder / "credentials").stat().st_mode) == 0o600
    assert stat.S_IMODE((folder / "s3" / "s3.json").stat().st_mode) == 0o600
    assert environment["AWS_SECRET_ACCESS_KEY"] not in printed
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "guessed")
    with pytest.raises(StorageError):
        Store.open("s3://elastic-train/jobs").read("a/job.json")


@pytest.mark.slow
def test_mlflow_takes_an_experiment(environment: dict[str, str]) -> None:
    url = f"{environment['MLFLOW_TRACKING_URI']}/api/2.0/mlflow/experiments"
    body = json.dumps({"name": "tried"}).encode()
    request = urllib.request.Request(f"{url}/create", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        identity = json.load(reply)["experiment_id"]
    with urllib.request.urlopen(f"{url}/get-by-name?experiment_name=tried", timeout=30) as reply:
        assert json.load(reply)["experiment"]["experiment_id"] == identity


@pytest.mark.slow
def test_both_listen_on_loopback_only(services: tuple[Path, str]) -> None:
    folder, _ = services
    roots = [psutil.Process(row["pid"]) for row in shown(folder).values()]
    processes = [process for root in roots for process in (root, *root.children(recursive=True))]
    heard = [each.laddr for process in processes for each in process.net_connections("inet") if each.status == "LISTEN"]
    assert len(heard) >= 5  # of S3: master, volume, filer and S3, with gRPC
    assert {address.ip for address in heard} == {"127.0.0.1"}


@pytest.mark.slow
def test_up_is_idempotent_and_mends_what_has_died(services: tuple[Path, str], environment: dict[str, str]) -> None:
    folder, printed = services
    before = shown(folder)
    Store.open("s3://elastic-train/jobs").write("kept", [b"bytes"])
    again = run("up", folder)
    assert (again.exit_code, again.stdout) == (0, printed)
    assert {name: row["pid"] for name, row in shown(folder).items()} == {n: row["pid"] for n, row in before.items()}

    os.kill(before["s3"]["pid"], signal.SIGKILL)
    psutil.wait_procs([psutil.Process(before["s3"]["pid"])] if psutil.pid_exists(before["s3"]["pid"]) else [], 10)
    table = run("status", folder)
    assert table.exit_code == 1
    assert table.stdout.splitlines()[0].split("\t")[:3] == ["service", "state", "url"]
    assert [line.split("\t")[1] for line in table.stdout.splitlines()[1:]] == ["dead", "running"]

    assert run("up", folder).stdout == printed  # the same addresses and credentials
    after = shown(folder)
    assert after["mlflow"]["pid"] == before["mlflow"]["pid"]
    assert after["s3"]["pid"] != before["s3"]["pid"]
    assert run("status", folder).exit_code == 0
    assert Store.open("s3://elastic-train/jobs").read("kept") == b"bytes"


@pytest.mark.slow
def test_what_a_killed_server_has_left_on_its_port_is_ended(services: tuple[Path, str]) -> None:
    folder, printed = services
    root = psutil.Process(shown(folder)["mlflow"]["pid"])
    children = root.children(recursive=True)
    assert children
    os.kill(root.pid, signal.SIGKILL)
    psutil.wait_procs([root], 10)
    assert shown(folder)["mlflow"]["state"] == "dead"
    again = run("up", folder)
    assert (again.exit_code, again.stdout) == (0, printed), again.stderr
    assert not [child for child in children if child.is_running()]


@pytest.mark.slow
def test_keys_that_the_running_server_does_not_know(services: tuple[Path, str], tmp_path: Path) -> None:
    folder, printed = services
    file, kept = folder / "credentials", tmp_path / "credentials"
    file.rename(kept)
    try:
        lost = run("up", folder)
        assert not file.exists()
        file.touch(mode=0o600)
        file.write_text("export AWS_ACCESS_KEY_ID=local-other\nexport AWS_SECRET_ACCESS_KEY=guessed\n")
        changed = run("up", folder)
    finally:
        kept.rename(file)
    assert (lost.exit_code, changed.exit_code) == (2, 2)
    for sentence in (lost.stderr, changed.stderr):
        assert str(file) in sentence and "elastic-train services down, then up" in sentence
    assert run("up", folder).stdout == printed


@pytest.mark.slow
def test_another_port_while_it_runs_is_refused(services: tuple[Path, str]) -> None:
    refused = run("up", services[0], "--mlflow-port", "23456")
    assert refused.exit_code == 2
    assert "mlflow runs on port" in refused.stderr and "services down" in refused.stderr


# -- without -----------------------------------------------------------------------------------------------------------


def test_nothing_started(tmp_path: Path) -> None:
    assert run("down", tmp_path).exit_code == 0
    status = run("status", tmp_path, "--json")
    assert (status.exit_code, json.loads(status.stdout)) == (1, {"services": []})
    assert not any(tmp_path.iterdir())


def test_down_leaves_a_process_that_only_has_the_number(tmp_path: Path) -> None:
    """As after a crash of the machine, when the number is somebody else's."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        entry = {
            "name": "s3", "url": "http://127.0.0.1:1", "ports": [1], "log": "s3.log", "since": 0.0,
            "process": {"pid": other.pid, "start": "another boot/12345"},
        }  # fmt: skip
        before = {"format": 1, "services": [entry]}  # as 0.1.0 named it
        (tmp_path / "services.json").write_text(json.dumps(before))
        assert shown(tmp_path)["s3"]["state"] == "dead"
        assert run("down", tmp_path).stdout == "s3: did not run\n"
        assert other.poll() is None
        other.communicate(b"\n")


def test_a_process_that_died_is_survived_by_its_children(tmp_path: Path) -> None:
    """Ended with it; but not those of another process that has its number by now."""
    log = tmp_path / "log"
    root = start_detached(["sh", "-c", "sleep 60 & echo $!; wait"], tmp_path, {}, log)
    until(lambda: log.read_text().endswith("\n"))
    child = psutil.Process(int(log.read_text()))
    later = str(int(root.start.rpartition("/")[2]) + 1)
    others = [
        ProcessId(root.pid, f"another boot/{root.start.rpartition('/')[2]}"),
        ProcessId(root.pid, f"{root.start.rpartition('/')[0]}/{later}"),
    ]
    assert [other.end(signal.SIGTERM) for other in others] == [False, False]
    os.kill(root.pid, signal.SIGKILL)
    until(lambda: not root.alive())
    assert child.is_running()
    assert others[0].end(signal.SIGTERM) is False
    assert root.end(signal.SIGTERM) is True
    assert not child.is_running()
    assert root.end(signal.SIGTERM) is False


def test_a_server_that_speaks_no_http_at_first_is_waited_for() -> None:
    answers = [b"starting\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                connection = listener.accept()[0]
                with connection:
                    connection.recv(2**16)
                    connection.sendall(answer)

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        assert wait_until_ready(ProcessId.of(os.getpid()), f"http://127.0.0.1:{listener.getsockname()[1]}", 60.0)
        server.join(60)


def test_a_folder_with_a_space_can_be_read_by_a_shell(tmp_path: Path) -> None:
    record = Record(tmp_path / "a b; false")
    with record.locked():
        read_or_make(record.folder / "credentials")
        for name in ("s3", "mlflow"):
            record.put(Service(name, f"http://{name}", (1,), "log", None, 0.0))
    found = exported("set -e\n" + "\n".join(_environment(record, record.folder)))
    assert found["AWS_ACCESS_KEY_ID"].startswith("local-")


def test_ports_and_those_10000_above_are_never_given_to_clients() -> None:
    """By Linux as it comes."""
    for pairs in (False, True):
        ports = PortPicker().pick("--s3-port", (), count=500, pairs=pairs)
        assert len(set(ports)) == 500
        assert min(ports) > 19999  # Ray's workers are below
        assert max(ports) + 10000 < 32768


@pytest.mark.parametrize("option", ["--s3-port", "--mlflow-port"])
def test_a_port_that_is_taken(tmp_path: Path, option: str) -> None:
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        refused = run("up", tmp_path, option, str(port))
    assert refused.exit_code == 2
    assert f"port {port}" in refused.stderr and option in refused.stderr
    assert not (tmp_path / "services.json").exists()


@pytest.mark.parametrize("weed", ["nowhere/weed", "."])
def test_no_weed(tmp_path: Path, weed: str) -> None:
    refused = run("up", tmp_path, "--weed", weed)
    assert refused.exit_code == 2
    assert "--weed" in refused.stderr


def test_a_server_that_ends_at_once_is_told_with_its_words(tmp_path: Path) -> None:
    weed = tmp_path / "weed"
    weed.write_text("#!/bin/sh\necho out of sockets\nexit 3\n")
    weed.chmod(0o755)
    failed = run("up", tmp_path, "--weed", str(weed))
    assert failed.exit_code == 1
    assert "out of sockets" in failed.stderr and "s3 did not start" in failed.stderr
    assert {row["state"] for row in shown(tmp_path).values()} == {"dead"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ('{"format_version": 2, "services": []}', "is of format 2, and this release"),
        ('{"format_version": 1}', "cannot be read"),
    ],
)
def test_a_record_that_is_not_ours(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "services.json").write_text(text)
    for verb in ("up", "down", "status"):
        refused = run(verb, tmp_path)
        assert refused.exit_code == 2
        assert said in refused.stderr


def test_credentials_that_others_may_read(tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text("export AWS_ACCESS_KEY_ID=a\nexport AWS_SECRET_ACCESS_KEY=b\n")
    (tmp_path / "credentials").chmod(0o644)
    refused = run("up", tmp_path)
    assert refused.exit_code == 2
    assert "chmod 600" in refused.stderr
    (tmp_path / "credentials").write_text("export AWS_ACCESS_KEY_ID=a\n")
    (tmp_path / "credentials").chmod(0o600)
    assert "AWS_SECRET_ACCESS_KEY" in run("up", tmp_path).stderr
