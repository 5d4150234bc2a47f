"""Start, end and show the local services."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_train.cli.guard import FAILED, UserError
from elastic_train.cli.options import AsJson
from elastic_train.cli.services.process import start_detached, wait_until_ready
from elastic_train.cli.services.record import Record, Service
from elastic_train.cli.services.servers import KINDS, Server, mlflow_server, s3_server

if TYPE_CHECKING:
    from elastic_train.cli.services.secrets_file import Credentials

BUCKET = "elastic-train"
JOBS = f"s3://{BUCKET}/jobs"

Folder = Annotated[Path, typer.Option("--folder", help="Where data, logs and credentials of the services are.")]
Port = Annotated[int | None, typer.Option(min=1024, max=55535, help="Default: the one of last time, or a free one.")]


def up(
    folder: Folder = Path("runs/services"),
    weed: Annotated[str | None, typer.Option(help="SeaweedFS; default: the one beside Python, or on PATH.")] = None,
    s3_port: Port = None,
    mlflow_port: Port = None,
) -> None:
    """Start the services that do not run, wait until they answer, and print the environment that jobs need."""
    from elastic_train.cli.services.ports import PortPicker

    folder, ports = folder.absolute(), PortPicker()
    with Record(folder).locked() as record:
        keys = _keys(record)
        servers = []  # all is looked at before the first one is started
        if _must_start(record, "s3", s3_port):
            wanted = _wanted(record, "s3", s3_port)
            servers.append(s3_server(_subfolder(folder, "s3"), weed, ports, wanted, keys))
        if _must_start(record, "mlflow", mlflow_port):
            servers.append(mlflow_server(_subfolder(folder, "mlflow"), ports, _wanted(record, "mlflow", mlflow_port)))
        started = [_start(record, server) for server in servers]
        for service in record.services.values():  # also one that an interrupted command has left starting
            _await(service, started)
        _make_bucket(record, keys)
    for line in _environment(record, folder):
        typer.echo(line)


def _keys(record: Record) -> Credentials:
    """Those of the file, or new ones. Raises UserError when the S3 server runs with keys whose file is gone."""
    from elastic_train.cli.services.secrets_file import read_or_make

    file, s3 = record.folder / "credentials", record.services.get("s3")
    if s3 is not None and s3.running and not file.exists():
        raise UserError(
            f"{file} is gone, and s3 runs with the keys that were in it; elastic-train services down, then up makes "
            "new ones"
        )
    return read_or_make(file)


def _must_start(record: Record, name: str, port: int | None) -> bool:
    """Ends what one that died has left behind. Raises UserError when it runs on another port than the given one."""
    service = record.services.get(name)
    if service is None or not service.running:
        if service is not None and service.process is not None:
            service.process.end(KINDS[name].end_signal)
        return True
    if port not in (None, service.ports[0]):
        raise UserError(
            f"{name} runs on port {service.ports[0]} already; elastic-train services down, then give {port}"
        )
    return False


def _wanted(record: Record, name: str, port: int | None) -> tuple[int, ...]:
    """The given port, else those of last time."""
    if port is not None:
        return (port,)
    return record.services[name].ports if name in record.services else ()


def _subfolder(folder: Path, name: str) -> Path:
    (folder / name).mkdir(exist_ok=True)
    return folder / name


def _start(record: Record, server: Server) -> Service:
    log = record.folder / f"{server.name}.log"
    process = start_detached(server.command, record.folder / server.name, server.environment, log)
    service = Service(server.name, server.url, server.ports, str(log), process, time.time())
    record.put(service)
    return service


def _await(service: Service, started: list[Service]) -> None:
    kind = KINDS[service.name]
    if service.process and wait_until_ready(service.process, service.url + kind.health, kind.start_seconds):
        return
    for each in started:
        if each.process:
            each.process.end(KINDS[each.name].end_signal)
    last = Path(service.log).read_text(errors="replace").splitlines()[-15:]
    typer.echo("\n".join([*last, f"error: {service.name} did not start; its log is {service.log}"]), err=True)
    raise typer.Exit(FAILED)


def _make_bucket(record: Record, keys: Credentials) -> None:
    """Raises UserError when the server does not let the keys do it."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    url = record.services["s3"].url
    client: Any = boto3.client(
        "s3",
        endpoint_url=url,
        aws_access_key_id=keys.access_key,
        aws_secret_access_key=keys.secret_key,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}, proxies={}),
    )
    try:
        if BUCKET not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
            client.create_bucket(Bucket=BUCKET)
    except (ClientError, BotoCoreError) as error:
        raise UserError(
            f"the S3 server at {url} does not give the bucket {BUCKET} to the keys of {record.folder / 'credentials'} "
            f"({error}); elastic-train services down, then up starts it with these keys"
        ) from None


def _environment(record: Record, folder: Path) -> list[str]:
    return [
        f". {shlex.quote(str(folder / 'credentials'))}   # AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        f"export AWS_ENDPOINT_URL={record.services['s3'].url}",
        f"export MLFLOW_TRACKING_URI={record.services['mlflow'].url}",
        f"# job files: storage.uri={JOBS} tracking.uri={record.services['mlflow'].url}",
    ]


def down(folder: Folder = Path("runs/services")) -> None:
    """End the services that were started in this folder; data, credentials and ports stay for the next time."""
    import dataclasses

    folder = folder.absolute()
    if not (folder / "services.json").exists():
        typer.echo(f"no services were started in {folder}")
        return
    with Record(folder).locked() as record:
        for service in list(record.services.values()):
            ended = service.process is not None and service.process.end(KINDS[service.name].end_signal)
            typer.echo(f"{service.name}: {'ended' if ended else 'did not run'}")
            record.put(dataclasses.replace(service, process=None))


def status(folder: Folder = Path("runs/services"), as_json: AsJson = False) -> None:
    """Show the services. Exit code 1 unless all run."""
    from elastic_train.cli.tables import Column, age, print_table, size

    services = list(Record(folder.absolute()).load().services.values())
    rows = [_row(service) for service in services]
    if as_json:
        typer.echo(json.dumps({"services": rows}))
    else:
        columns = [Column("service", left=True), Column("state", left=True), Column("url", left=True), Column("pid")]
        columns += [Column("since", lambda since: age(time.time() - since)), Column("memory", size), Column("log")]
        print_table(columns, [list(row.values()) for row in rows])
    if not services or not all(service.running for service in services):
        raise typer.Exit(FAILED)


def _row(service: Service) -> dict[str, Any]:
    running = service.running and service.process is not None
    return {
        "service": service.name,
        "state": service.state,
        "url": service.url,
        "pid": service.process.pid if running and service.process else None,
        "since": service.since if running else None,
        "memory": service.process.memory() if running and service.process else None,
        "log": service.log,
    }
