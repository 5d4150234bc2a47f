"""``elastic-train chaos``: break things of a running job on purpose and see how it takes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_train.cli.durations import parse_duration
from elastic_train.cli.guard import UserError
from elastic_train.cli.jobs import Address
from elastic_train.cli.options import JobRef

if TYPE_CHECKING:
    from elastic_train.config.faults import Fault

app = typer.Typer(
    help="Break things of a running job on purpose.",
    no_args_is_help=True,
    epilog="Everything happens for real: processes are killed, links go down. The ledger says that it was chaos.",
)

Every = Annotated[
    float | None,
    typer.Option("--every", metavar="DURATION", parser=parse_duration, help="One fault per DURATION; default: one."),
]
For = Annotated[
    float,
    typer.Option(
        "--for", metavar="DURATION", parser=parse_duration, show_default="10m", help="For how long (with --every)."
    ),
]
Seed = Annotated[int, typer.Option(help="Chooses the victims; the same seed, the same choice.")]
Seconds = Annotated[
    float,
    typer.Option(
        "--lasting",
        metavar="DURATION",
        parser=parse_duration,
        show_default="20s",
        help="Of a partition, an outage or the notice of a drain.",
    ),
]
_HELP = {
    "kill-trainer": "SIGKILL a trainer.",
    "kill-host": "SIGKILL a host, a Ray worker with its trainer.",
    "kill-node": "SIGKILL the raylet of a node and all of its processes.",
    "hang": "SIGSTOP a trainer.",
    "partition": "Take a node's link down, and up again.",
    "drain": "Announce to Ray that a node will be taken away.",
    "kill-coordinator": "SIGKILL the job's coordinator.",
    "store-outage": "Let the job's processes be without object storage.",
}


def _verb(kind: str) -> Any:
    def verb(
        job: JobRef,
        every: Every = None,
        duration: For = 600.0,
        seed: Seed = 1,
        seconds: Seconds = 20.0,
        address: Address = None,
    ) -> None:
        from elastic_train.config import faults

        if every is None:
            schedule = [replace(fault, at=0.0) for fault in faults.every(faults.Kind(kind), 1.0, 1.0, seed, seconds)]
        else:
            schedule = faults.every(faults.Kind(kind), every, duration, seed, seconds)
        if not schedule:
            raise UserError(f"--every {every:g}s is longer than --for {duration:g}s: nothing would happen")
        strike(job, schedule, address)

    return verb


for _kind, _help in _HELP.items():
    app.command(_kind, help=_help)(_verb(_kind))


@app.command()
def replay(
    job: JobRef,
    trace: Annotated[
        Path, typer.Option(metavar="FILE", help='Lines like {"at": 11.1, "kind": "kill-trainer"}, at in seconds.')
    ],
    seed: Seed = 1,
    seconds: Seconds = 20.0,
    address: Address = None,
) -> None:
    """The faults of a trace, each at its time."""
    from elastic_train.config.faults import TraceError, read_trace

    try:
        schedule = read_trace(trace, seed, seconds)
    except TraceError as error:
        raise UserError(str(error)) from None
    if any(fault.node is not None or fault.away is not None for fault in schedule):
        raise UserError(
            f"{trace}: node and away are of a real cluster, for simulate; chaos picks whom it strikes (pick)"
        )
    strike(job, schedule, address)


@app.command()
def llama3(
    job: JobRef,
    speed: Annotated[float, typer.Option(min=1, help="Time is compressed so many times; at 1000 one per 11 s.")] = 1000,
    duration: For = 600.0,
    seed: Seed = 1,
    seconds: Seconds = 20.0,
    address: Address = None,
) -> None:
    """Failures at the rate and in the mix of Llama 3's 54 days."""
    from elastic_train.config import faults

    schedule = faults.llama3(duration, speed, seed, seconds)
    if not schedule:
        raise UserError(f"--speed {speed:g} and --for {duration:g}s: the first failure would come later; raise one")
    strike(job, schedule, address)


def strike(job: str, schedule: list[Fault], address: str | None) -> None:
    """Carry ``schedule`` out and print what happens, a line each, and a summary."""
    from elastic_train.cli.folder import job_name
    from elastic_train.cli.reachable import cluster_problem
    from elastic_train.controller.chaos import NoSuchJob, run_chaos

    problem = cluster_problem(address)
    if problem:
        raise UserError(problem)
    story = Story()
    try:
        run_chaos(job_name(job), schedule, address, lambda told: typer.echo(story.line(told)))
    except NoSuchJob as error:
        raise UserError(str(error)) from None
    finally:
        if story.faults:
            typer.echo(story.summary())


class Story:
    """Sentences for what ``run_chaos`` tells."""

    def __init__(self) -> None:
        self.faults = 0
        self._recovered: list[float] = []

    def line(self, told: dict[str, Any]) -> str:
        """One line."""
        if told["told"] == "fault":
            self.faults += 1
            return f"{told['at']:7.1f} s  {told['kind']}: {told['victim']}, at step {told['step']}"
        if told["told"] == "missed":
            return f"{told['at']:7.1f} s  {told['kind']}: not done; {told['reason']}"
        if told["told"] == "adopted":
            return f"           coordinator back at step {told['step']}; {told['steps']} were done without it"
        if told["told"] == "recovered":
            self._recovered.append(told["seconds"])
            place = f"from step {told['step']} as {told['layout']}"
            return f"           back in {told['seconds']:.2f} s, {place} ({told['cause']}: {told['detail']})"
        if told["state"] == "gone":
            return f"the coordinator is gone; the last that was heard of it is step {told['step']}"
        return f"the job has ended: {told['state']} at step {told['step']}"

    def summary(self) -> str:
        """Faults and recoveries, with the median of their seconds."""
        text = f"{self.faults} faults, {len(self._recovered)} generations formed"
        if self._recovered:
            ordered = sorted(self._recovered)
            text += f", median {ordered[len(ordered) // 2]:.2f} s, slowest {ordered[-1]:.2f} s"
        return text
