"""``elastic-train plan``: does it fit, in which layout, how long, at what cost. Starts nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastic_train.cli.counts import parse_count
from elastic_train.cli.guard import UserError
from elastic_train.cli.options import AsJson, Endpoint, Region, StorageUri

if TYPE_CHECKING:
    from elastic_train.cli.plan_answer import Answer
    from elastic_train.cli.plan_question import Question

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[JOB.yaml] [SECTION.KEY=VALUE]...", help="Job file, then overrides. What they say stays."),
]
Model = Annotated[
    str | None, typer.Option(metavar="NAME", help="Instead of a job file: a preset, or a Hugging Face config.json.")
]
Gpus = Annotated[int | None, typer.Option(help="How many accelerators there are (job file: hosts.max).")]
Gpu = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Their kind: a100-40gb, a100-80gb, h100-80gb, h200, b200, mi300x, cpu, or YAML."),
]
GpuMemory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Of one, with its unit: 80GB, 80GiB, 81559MiB (default: the kind's).")
]
HostMemory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="CPU memory of a node, for parallel.offload (default: the kind's).")
]
Seq = Annotated[int | None, typer.Option(help="Tokens per sequence.")]
GlobalBatch = Annotated[int | None, typer.Option(help="Sequences per step.")]
Tokens = Annotated[str | None, typer.Option(metavar="N", help="Of the whole training, e.g. 15T: for days and cost.")]
PriceText = Annotated[
    str | None,
    typer.Option("--price", metavar="N|FILE", help="Per accelerator and hour: a number, or a YAML table of prices."),
]
Top = Annotated[int | None, typer.Option(min=1, help="Layouts to show (default: 8).")]
Show = Annotated[
    int | None, typer.Option(min=1, metavar="#", help="Which of them the options below are about (default: 1).")
]
PerStage = Annotated[bool, typer.Option("--per-stage", help="Itemise memory by pipeline rank.")]
Traffic = Annotated[
    bool, typer.Option("--traffic", help="List what it exchanges in a step: bytes and seconds by axis.")
]
Picture = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw its pipeline: .svg or .png.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report with plots.")]
WriteJob = Annotated[Path | None, typer.Option(metavar="FILE", help="Write it as a job file.")]
Calibrate = Annotated[
    str | None, typer.Option(metavar="JOB", help="Take speeds from a finished run: a job's name, file or folder.")
]
Params = Annotated[str | None, typer.Option(metavar="P", help="Without a model: parameters, e.g. 70e9 or 70B.")]
Ranks = Annotated[int | None, typer.Option(help="With --params: ranks that share the state.")]
StrategyName = Annotated[str | None, typer.Option("--strategy", help="With --params: ddp, zero1, zero2, zero3, hsdp.")]
FlopRate = Annotated[
    str | None, typer.Option(metavar="N", help="With --params and --tokens: sustained by the whole cluster, e.g. 25P.")
]


def plan(
    words: Words = None,
    model: Model = None,
    gpus: Gpus = None,
    gpu: Gpu = None,
    gpu_memory: GpuMemory = None,
    host_memory: HostMemory = None,
    seq: Seq = None,
    global_batch: GlobalBatch = None,
    tokens: Tokens = None,
    price: PriceText = None,
    calibrate: Calibrate = None,
    top: Top = None,
    show: Show = None,
    per_stage: PerStage = False,
    traffic: Traffic = False,
    pipeline_picture: Picture = None,
    html: Html = None,
    write_job: WriteJob = None,
    params: Params = None,
    ranks: Ranks = None,
    strategy: StrategyName = None,
    flops_per_second: FlopRate = None,
    as_json: AsJson = False,
    storage: StorageUri = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
) -> None:
    """Answer before renting: does it fit, in which layout, how long, at what cost. Starts nothing."""
    count = None if tokens is None else parse_count("--tokens", tokens)
    if params is not None:
        if words or model or gpus is not None:
            raise UserError("--params asks without a model: leave out the job file, --model and --gpus")
        _only_with_a_model(
            {
                "--gpu": gpu, "--gpu-memory": gpu_memory, "--host-memory": host_memory,
                "--seq": seq, "--global-batch": global_batch,
                "--price": price, "--calibrate": calibrate, "--top": top, "--show": show, "--html": html,
                "--per-stage": per_stage or None, "--traffic": traffic or None,
                "--pipeline-picture": pipeline_picture, "--write-job": write_job,
            }
        )  # fmt: skip
        _textbook(params, ranks, strategy, count, flops_per_second, as_json)
        return
    for name, value in (("--ranks", ranks), ("--strategy", strategy), ("--flops-per-second", flops_per_second)):
        if value is not None:
            raise UserError(f"{name} {value} is for --params; with a model use --gpus and parallel.data=zero3, say")
    from elastic_train.cli.plan_files import Files
    from elastic_train.cli.plan_question import Asked, question_of

    files = Files(pipeline_picture, html, write_job)
    files.check()
    top, show = 8 if top is None else top, 1 if show is None else show
    question = question_of(Asked(words or (), model, gpus, gpu, gpu_memory, host_memory, seq, global_batch, count))
    answer = _answer(question, top, price, calibrate, (storage, endpoint_url, region))
    if show > len(answer.priced):
        there = len(answer.priced)
        raise UserError(f"--show {show}: {there} {'layout is' if there == 1 else 'layouts are'} there")
    files.write(answer, show)
    if as_json:
        from elastic_train.cli.plan_json import document

        typer.echo(json.dumps(document(answer), indent=2))
        return
    from elastic_train.cli.plan_tables import print_answer

    print_answer(answer, per_stage=show if per_stage else None, traffic=show if traffic else None)


def _only_with_a_model(given: dict[str, object]) -> None:
    for name, value in given.items():
        if value is not None:
            raise UserError(
                f"{name} is for a job file or --model; --params goes with --ranks, --strategy, --tokens and "
                "--flops-per-second"
            )


def _textbook(
    params: str, ranks: int | None, strategy: str | None, tokens: float | None, rate: str | None, as_json: bool
) -> None:
    from elastic_train.cli.plan_textbook import answer

    answer(
        parse_count("--params", params),
        1 if ranks is None else ranks,
        strategy,
        tokens=tokens,
        flops_per_second=None if rate is None else parse_count("--flops-per-second", rate),
        as_json=as_json,
    )


def _answer(
    question: Question,
    top: int,
    price: str | None,
    calibrate: str | None,
    place: tuple[str | None, str | None, str | None],
) -> Answer:
    from elastic_train.cli.plan_answer import answer_of
    from elastic_train.cli.prices import price_of

    told: list[str] = []
    if calibrate is not None:
        from elastic_train.cli.plan_calibration import calibrated

        question, told = calibrated(question, calibrate, *place)
    chosen = None if price is None else price_of(price, question.accelerator.name)
    return answer_of(question, top, chosen, told)
