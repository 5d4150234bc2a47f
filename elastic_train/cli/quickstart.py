"""The main job: prepare data, start three Ray nodes, train, lose a node, go on, take it back, export, report."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_train.cli.guard import FAILED, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from elastic_train.config.job import Job
    from elastic_train.controller.local_cluster import LocalCluster
    from elastic_train.controller.local_node import LocalNode
    from elastic_train.controller.run import Outcome

WORKER_NODES = 2
HOSTS_PER_NODE = 2
KILL_AT = 0.25
"""Share of the steps after which a node is killed."""
STEPS_WITHOUT = 5
"""Steps on the survivors before the node comes back."""


def quickstart(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...")] = None,
    corpus: Annotated[str, typer.Option(help="python-stdlib, python-doc, or a text file or folder.")] = "python-stdlib",
    config: Annotated[str | None, typer.Option(help="Job file; default: jobs/configs/quickstart.yaml.")] = None,
) -> None:
    """Train a small model on a local cluster of real nodes, kill one in the middle, and show what happened."""
    from rich.console import Console

    console = Console()
    job = _job(config, corpus, overrides or [])
    _prepare(job, corpus, console)
    outcome, drill = _train(job, console)
    if outcome.state != "finished":
        console.print(f"[red]{outcome.state}[/red]: {outcome.message}")
        raise typer.Exit(outcome.exit_code or FAILED)
    _report(job, outcome, drill, console)


def _job(config: str | None, corpus: str, overrides: list[str]) -> Job:
    """The quickstart's job under the first name that is not taken, on the chosen corpus."""
    import elastic_train
    from elastic_train.data.corpus import open_corpus
    from elastic_train.planner.admission import admit_job

    path = Path(config) if config else Path(elastic_train.__file__).parents[1] / "jobs" / "configs" / "quickstart.yaml"
    if not path.exists():
        raise UserError(f"{path} is not there; run in a checkout of the project or give --config")
    job = admit_job(path, [f"data.uri=runs/data/{open_corpus(corpus).name}", *overrides])
    name, number = job.name, 1
    while (Path(job.storage.uri) / name).exists():
        number += 1
        name = f"{job.name}-{number}"
    return job.model_copy(update={"name": name})


def _prepare(job: Job, corpus: str, console: Console) -> None:
    from elastic_train.cli.progress import phase_reporter, progress_bar
    from elastic_train.data.corpus import open_corpus
    from elastic_train.data.prepare import prepare

    with progress_bar() as progress:
        source = open_corpus(corpus)
        made = prepare(
            source, job.data.first_uri, job.model.vocab_size, storage=job.storage, progress=phase_reporter(progress)
        )
    manifest, size = made.manifest, int(str(made.manifest.inputs["corpus_bytes"]))
    console.print(
        f"[bold]data[/bold]     {corpus}: {manifest.documents:,} files, {size / 1e6:.1f} MB, "
        f"{manifest.tokens:,} tokens{' (prepared before)' if made.reused else ''}"
    )


def _train(job: Job, console: Console) -> tuple[Outcome, Drill]:
    from elastic_train.cli.live import LiveView
    from elastic_train.controller.local_cluster import LocalCluster
    from elastic_train.controller.run import run_job

    with ExitStack() as stack:
        with console.status("starting a Ray cluster: one head and two worker nodes"):
            cluster = stack.enter_context(LocalCluster())
            cluster.add_nodes(WORKER_NODES, HOSTS_PER_NODE)
        console.print(f"[bold]cluster[/bold]  head and {WORKER_NODES} worker nodes at {cluster.address}")
        console.print(f"[bold]model[/bold]    {job.model.num_parameters:,} parameters; job {job.name!r}")
        with LiveView(job.name, console) as view:
            drill = Drill(cluster, job.training.steps)

            def on_status(status: dict[str, Any]) -> None:
                view.update(status)
                drill.watch(status)

            try:
                outcome = run_job(job, address=cluster.address, on_status=on_status)
            finally:
                drill.join()
    return outcome, drill


@dataclass(slots=True)
class Drill:
    """The planned failure: SIGKILL of a worker node after a quarter of the steps, its return soon after."""

    cluster: LocalCluster
    steps: int
    killed_at: float | None = None
    killed_step: int = 0
    returned_at: float | None = None
    _thread: threading.Thread | None = field(default=None, repr=False)

    def watch(self, status: dict[str, Any]) -> None:
        """Act when the time has come. Called with every status; never blocks."""
        if status["state"] != "running":
            return
        if self.killed_at is None:
            spread = {host["node"] for host in status["hosts"] if host["rank"] is not None}
            if status["step"] >= self.steps * KILL_AT and len(spread) == WORKER_NODES:  # somebody must be left
                self._kill(status)
        elif self.returned_at is None and status["step"] >= self.killed_step + STEPS_WITHOUT:
            self.returned_at = time.time()
            self._thread = threading.Thread(target=self.cluster.add_nodes, args=(1, HOSTS_PER_NODE), daemon=True)
            self._thread.start()

    def _kill(self, status: dict[str, Any]) -> None:
        nodes = [self.cluster.node_of(host["pid"]) for host in status["hosts"] if host["rank"] is not None]
        victim: LocalNode | None = nodes[-1] if nodes else None
        if victim is not None:
            self.killed_step, self.killed_at = status["step"], time.time()
            self.cluster.kill_node(victim)

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()


def _report(job: Job, outcome: Outcome, drill: Drill, console: Console) -> None:
    from elastic_train.checkpoint.hf_export import export_hf
    from elastic_train.storage.json_lines import read_json_lines
    from elastic_train.storage.store import Store
    from elastic_train.tracking.plots import plot_job
    from elastic_train.tracking.time_plot import plot_time

    store = Store.open(outcome.job_folder)
    lines, ledger = (read_json_lines(store, f"{name}.jsonl") for name in ("steps", "ledger"))
    folder = Path(outcome.job_folder)
    plots = plot_job(store, folder / "loss.png"), plot_time(ledger, folder / "time.png", title=job.name)
    exported = export_hf(store, outcome.step, Store.open(job.data.first_uri, job.storage), folder / "exports" / "hf")
    for name, value in [*_facts(lines, ledger, drill), *_places(outcome, plots, exported)]:
        console.print(f"[bold]{name:<15}[/bold] {value}", soft_wrap=True, highlight=False)  # lines to copy stay whole


def _facts(lines: list[dict[str, Any]], ledger: list[dict[str, Any]], drill: Drill) -> list[tuple[str, str]]:
    tokens = sum(line["valid_tokens"] for line in lines) / sum(line["seconds"] for line in lines)
    facts = [
        ("loss", f"{lines[0]['loss']:.3f} at step 1, {lines[-1]['loss']:.3f} at step {lines[-1]['step']}"),
        ("speed", f"{tokens:,.0f} tokens/s while training"),
    ]
    if drill.killed_at is None:
        return facts
    before = [line for line in lines if line["time"] <= drill.killed_at][-1]
    after = next(line for line in lines if line["time"] > drill.killed_at and line["generation"] > before["generation"])
    formed = next(event for event in ledger if event.get("generation") == after["generation"] and "layout" in event)
    facts += [
        ("node killed", f"after step {before['step']} in layout {before['layout']} (SIGKILL of all its processes)"),
        ("loss around it", f"{before['loss']:.3f} before, {after['loss']:.3f} after"),
        ("steps lost", str(max(before["step"] - formed["step"], 0))),  # one more may have finished before the kill
        (
            "recovered in",
            f"{after['time'] - drill.killed_at:.2f} s to the next finished step, in layout {after['layout']}",
        ),
    ]
    grown = next((e for e in ledger if e.get("cause") == "growth" and e["event"] == "generation_formed"), None)
    if grown is not None:
        facts.append(
            (
                "node taken in",
                f"at step {grown['step']}, layout {grown['layout']}, pause {grown['recovery_seconds']:.2f} s",
            )
        )
    return facts


def _places(outcome: Outcome, plots: tuple[Path, Path], exported: Path) -> list[tuple[str, str]]:
    from elastic_train.cli.live import time_line

    tracking = outcome.tracking
    places = [
        ("time of hosts", time_line(outcome.time)),
        ("loss plot", str(plots[0])),
        ("time plot", str(plots[1])),
        ("model", f"{exported} (Hugging Face format)"),
        ("job folder", outcome.job_folder),
    ]
    if tracking.get("ui_command"):
        places += [("MLflow run", tracking["run_id"]), ("MLflow UI", _callable(tracking["ui_command"]))]
    if tracking.get("lost"):
        places.append(("not in MLflow", f"{tracking['lost']} steps; steps.jsonl in the job folder has them all"))
    return places


def _callable(command: str) -> str:
    """The command as it works in the reader's shell: with the path of our environment where that is not active."""
    program, rest = command.split(" ", 1)
    found = shutil.which(program)
    if found is not None:
        return command
    beside = Path(sys.executable).parent / program
    return f"{beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside} {rest}"
