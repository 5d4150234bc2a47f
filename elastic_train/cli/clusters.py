"""``elastic-train cluster``: cluster files, a cluster on this computer, and the watch for the end of a spot machine."""

from __future__ import annotations

import os
import re
import signal
import threading
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_train.cli.guard import UserError
from elastic_train.cli.jobs import Address
from elastic_train.config.errors import ConfigError

if TYPE_CHECKING:
    from elastic_train.config.job import Job

app = typer.Typer(help="Clusters of machines for Ray.", no_args_is_help=True)

Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Cluster files, as for `ray up`.")]
JobFile = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="CONFIG", help="A job file: is there room for its hosts?")
]
Namespaces = Annotated[
    bool | None, typer.Option(help="Whether each machine has a network of its own; default: when this is root.")
]

_LOOK_SECONDS = 1.0
_PLACE = re.compile(r"[\w-]+-REPLACE-ME")


class Cloud(StrEnum):
    """Whose metadata service is asked."""

    AWS = "aws"
    GCP = "gcp"


@app.command()
def validate(files: Files, config: JobFile = None) -> None:
    """Check cluster files before a machine is paid for, and print what their workers have."""
    from elastic_train.cluster.cluster_file import read_cluster
    from elastic_train.config.load import load_job

    job = None if config is None else load_job(config)
    problems: list[str] = []
    for path in files:
        try:
            cluster = read_cluster(path)
        except ConfigError as error:
            problems += error.problems
            continue
        typer.echo(f"{path}: {_capacity(cluster)}")
        if places := sorted(set(_PLACE.findall(path.read_text()))):
            typer.echo(f"{path}: still to be replaced: {', '.join(places)}")
        if job is not None:
            problems += _lack(path, cluster, job)
    if problems:
        raise ConfigError(problems)


def _capacity(cluster: dict[str, Any]) -> str:
    from elastic_train.cluster.cluster_file import worker_groups

    groups = []
    for group in worker_groups(cluster):
        each = ", ".join(f"{group.resources[name]:g} {name}" for name in ("CPU", "GPU") if name in group.resources)
        groups.append(f"{group.most} {group.name}" + (f" with {each} each" if each else ""))
    return f"at most {cluster['max_workers']} workers ({'; '.join(groups)}) and a head without hosts"


def _lack(path: Path, cluster: dict[str, Any], job: Job) -> list[str]:
    """What the cluster can never give the job. Prints what it cannot give in full."""
    from elastic_train.cluster.cluster_file import most_seats

    seats = most_seats(cluster, job.hosts.seat)
    if seats is None or seats >= job.hosts.max:
        return []
    room = f"{path}: the workers have room for {seats} hosts, and the head for none"
    if seats >= job.hosts.min:
        typer.echo(f"{room}; hosts.max={job.hosts.max} will not be reached")
        return []
    return [f"{room}; hosts.min={job.hosts.min} would wait for ever: lower it, or raise max_workers"]


@app.command()
def local(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Such as cluster/local.yaml.")],
    namespaces: Namespaces = None,
) -> None:
    """Run a cluster of made-up machines here, which Ray's autoscaler orders and gives back. Ctrl-C ends it."""
    from elastic_train.cluster.autoscaled import autoscaled_cluster
    from elastic_train.cluster.cluster_file import read_cluster
    from elastic_train.cluster.networks import NetworkError
    from elastic_train.controller.local_cluster import ClusterError

    config = read_cluster(file)
    if config["provider"]["type"] != "external":
        raise UserError(f"{file}: provider.type={config['provider']['type']} needs `ray up`; here it must be external")
    apart = os.geteuid() == 0 if namespaces is None else namespaces
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # while it comes up it is given up like with Ctrl-C
    try:
        with autoscaled_cluster(config, namespaces=apart, include_dashboard=True) as cluster:
            ended = _signalled()
            for line in cluster.lines():
                typer.echo(line)
            while not ended.wait(_LOOK_SECONDS):
                if not cluster.head_lives:
                    raise UserError("the head of the cluster has died, and the cluster with it; start another one")
    except (ClusterError, NetworkError) as error:
        raise UserError(f"the cluster did not come up: {error}") from None


def _signalled() -> threading.Event:
    """Set by SIGINT or SIGTERM, which interrupt nothing from now on."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: ended.set())
    return ended


@app.command("watch-spot")
def watch_spot(
    cloud: Annotated[Cloud, typer.Option(help="Whose machine this is.")],
    address: Address = "auto",
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Of a metadata service that answers as that of the cloud does.")
    ] = None,
) -> None:
    """Tell Ray to drain this node when the cloud announces that it takes the machine. Runs until it is ended."""
    from elastic_train.controller.spot_watch import watch

    watch(cloud.value, address or "auto", endpoint)
