"""``elastic-train simulate``: what failures will cost a job, before anything is rented."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastic_train.cli.durations import parse_duration
from elastic_train.cli.guard import UserError
from elastic_train.cli.options import AsJson, Endpoint, Region, StorageUri

if TYPE_CHECKING:
    from elastic_train.cli.simulate_asked import Asked
    from elastic_train.cli.simulate_question import Question

BEST = ("interval", "spares")


def _duration(text: str, what: str, *, default: str | None = None) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        text, metavar="DURATION", parser=parse_duration, help=what, show_default=default or False
    )
    return option


def simulate(
    job: Annotated[
        str | None,
        typer.Argument(metavar="[JOB.yaml]", help="Takes hosts, layouts, intervals and waits of a job file."),
    ] = None,
    like: Annotated[str | None, typer.Option(help="llama3: 16,384 GPUs, 54 days, 419 failures.")] = None,
    run: Annotated[
        str | None, typer.Option("--from", metavar="JOB", help="Simulate a real run of yours again, from its logs.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes of the full job.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="Hosts of the job on a node.", show_default="8")] = None,
    spares: Annotated[int | None, typer.Option(help="Nodes that stand by.", show_default="0")] = None,
    mtbf_hours: Annotated[
        float | None,
        typer.Option(help="Mean time between failures of one node.", show_default="6335 for 8 GPUs, Llama 3's"),
    ] = None,
    failures: Annotated[
        str, typer.Option(metavar="DISTRIBUTION|FILE", help="exponential, weibull:SHAPE, or a trace as of chaos.")
    ] = "exponential",
    rack_nodes: Annotated[int, typer.Option(help="So many neighbours are lost at once ...")] = 0,
    rack_mtbf_hours: Annotated[float | None, typer.Option(help="... once in so many hours, each group.")] = None,
    spot: Annotated[str | None, typer.Option(metavar="RATE", help="Reclaims of a node, as 0.05/h or 1/d.")] = None,
    notice: Annotated[float, _duration("--notice", "Between a reclaim's notice and its end.", default="2m")] = 120.0,
    replace: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Until a lost node is replaced: 1h, exponential:MEAN or lognormal:MEAN:SIGMA.",
            show_default="1h",
        ),
    ] = None,
    days: Annotated[float | None, typer.Option(help="Length of the run.", show_default="30")] = None,
    step: Annotated[float | None, _duration("--step", "A step of the full job.", default="10s")] = None,
    unit_nodes: Annotated[
        int | None, typer.Option(help="Nodes of one replica of the model: only whole ones work.", show_default="1")
    ] = None,
    min_nodes: Annotated[
        int | None, typer.Option(help="With fewer the job waits.", show_default="1; restart: all")
    ] = None,
    checkpoint_every: Annotated[
        float | None, _duration("--checkpoint-every", "Work between two checkpoints.", default="10m; restart: 5m")
    ] = None,
    checkpoint_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Of a checkpoint, as 840GB.", show_default="of the job's state; else 10GB a host"
        ),
    ] = None,
    storage_write: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="To storage, of all hosts, as 2TB/s.", show_default="164 MB/s a host"),
    ] = None,
    storage_read: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="From storage, all hosts together.", show_default="929 MB/s a host"),
    ] = None,
    checkpoint_takes: Annotated[
        float | None,
        _duration("--checkpoint-takes", "Until a checkpoint is committed.", default="its size by --storage-write"),
    ] = None,
    checkpoint_stall: Annotated[
        float | None, typer.Option(help="Seconds for which it stops the job.", show_default="0; restart: 5")
    ] = None,
    partners: Annotated[int | None, typer.Option(help="Copies in other nodes' memory.", show_default="1")] = None,
    recovery: Annotated[
        str | None,
        typer.Option(help="elastic (this engine), restart (of the whole job), both.", show_default="elastic"),
    ] = None,
    pause: Annotated[float | None, _duration("--pause", "Of every recovery, instead of the measured ones.")] = None,
    price: Annotated[float | None, typer.Option(help="Of one GPU and hour.")] = None,
    best: Annotated[str | None, typer.Option(metavar="interval|spares", help="Search for the best.")] = None,
    seed: Annotated[int, typer.Option(help="Of the first run.")] = 1,
    runs: Annotated[
        int | None, typer.Option(help="With seeds one after the other.", show_default="20; a trace: 1")
    ] = None,
    as_json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a PNG.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with tables and the picture.")] = None,
    storage: StorageUri = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
) -> None:
    """Simulate failures and recovery: goodput, effective training time, cost."""
    from elastic_train.cli.simulate_asked import Asked

    asked = Asked(
        job=job, like=like, nodes=nodes, gpus_per_node=gpus_per_node, mtbf_hours=mtbf_hours, days=days, spares=spares,
        unit_nodes=unit_nodes, min_nodes=min_nodes, step=step, checkpoint_every=checkpoint_every,
        checkpoint_size=checkpoint_size, storage_write=storage_write, storage_read=storage_read,
        checkpoint_takes=checkpoint_takes, checkpoint_stall=checkpoint_stall, partners=partners, failures=failures,
        rack_nodes=rack_nodes, rack_mtbf_hours=rack_mtbf_hours, spot=spot, notice=notice, replace=replace,
        recovery=recovery, pause=pause, seed=seed, runs=runs,
    )  # fmt: skip
    if best not in (None, *BEST):
        raise UserError(f"--best={best}: must be one of {', '.join(BEST)}")
    if price is not None and not 0 <= price < float("inf"):
        raise UserError(f"--price={price:g}: must be a number of at least 0")
    if run is not None and (best is not None or asked != Asked(seed=seed, runs=runs)):
        raise UserError(
            "--from takes cluster, failures and costs from the run's logs: only --seed and --runs go with it"
        )
    from elastic_train.cli.simulate_question import asked_of
    from elastic_train.cli.simulate_report import report

    question = _of_run(run, asked, storage, endpoint_url, region) if run is not None else asked_of(asked)
    report(question, asked, price=price, best=best, as_json=as_json, plot=plot, html=html)


def _of_run(run: str, asked: Asked, storage: str | None, endpoint_url: str | None, region: str | None) -> Question:
    from elastic_train.cli.folder import open_folder
    from elastic_train.cli.simulate_question import question_of_run
    from elastic_train.storage.json_lines import read_json_lines

    if asked.runs is not None and asked.runs < 1:
        raise UserError(f"--runs={asked.runs}: must be at least 1")
    name, store = open_folder(run, storage, endpoint_url, region)
    return question_of_run(name, read_json_lines(store, "ledger.jsonl"), read_json_lines(store, "steps.jsonl"), asked)
