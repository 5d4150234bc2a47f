"""Verbs about Hugging Face models: import-hf, export-hf. And the check of a job against what it starts from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from elastic_train.cli.folder import with_options
from elastic_train.cli.guard import UserError
from elastic_train.cli.options import CheckpointRef, Endpoint, Region, StorageUri
from elastic_train.cli.progress import progress_bar
from elastic_train.cli.selection import select

if TYPE_CHECKING:
    from elastic_train.config.job import Job
    from elastic_train.model.hf_folder import HfFolder


def import_hf(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder of the model, a path or s3:// URI.")],
    out: Annotated[str | None, typer.Option(help="New file for the YAML (default: print it).")] = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
) -> None:
    """Check a Hugging Face model folder and write the lines that make a job start from it."""
    from pathlib import Path

    from elastic_train.config.operation import StorageConfig
    from elastic_train.model.hf_folder import open_hf_folder

    if out is not None and Path(out).exists():
        raise UserError(f"{out} exists; give another file")
    checked = open_hf_folder(folder, with_options(StorageConfig(), endpoint_url, region))
    text = "\n".join(_job_lines(checked)) + "\n"
    if out is None:
        typer.echo(text, nl=False)
    else:
        Path(out).write_text(text)
        typer.echo(f"{out}: the model section for a job that starts from {checked.store.uri}")


def _job_lines(folder: HfFolder) -> Iterator[str]:
    import yaml

    from elastic_train.config.hf import sliding_window

    dtypes = Counter(tensor.dtype for tensor in folder.tensors.values())
    listed = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.items())
    files = len({tensor.path for tensor in folder.tensors.values()})
    yield (
        f"# {folder.model.num_parameters:,} parameters in {len(folder.tensors)} tensors ({listed}), "
        f"{folder.nbytes:,} bytes in {files} file{'' if files == 1 else 's'}"
    )
    if (window := sliding_window(folder.config)) is not None:
        yield f"# sliding_window {window}: data.sequence_length may be at most {window}"
    section = {"init_from": folder.store.uri, "model": folder.model.model_dump(mode="json")}
    yield yaml.safe_dump(section, sort_keys=False, width=120).rstrip("\n")


def check_source(job: Job) -> None:
    """Raises ConfigError when the job cannot start from its ``init_from``; once it has a checkpoint it need not."""
    if job.init_from is None:
        return
    from elastic_train.checkpoint.catalog import list_checkpoints
    from elastic_train.config.paths import anchored, home
    from elastic_train.model.hf_folder import open_source
    from elastic_train.storage.store import Store

    job = anchored(job, home())
    if not list_checkpoints(Store.open(job.storage.uri, job.storage).sub(job.name)):
        open_source(job)


def export_hf(
    checkpoint: CheckpointRef,
    out: Annotated[str | None, typer.Option(help="New folder (default: exports/JOB-step-STEP).")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16 (default: as in init_from; float32 from random weights)."),
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help="The averaged weights (training.ema_decay).")] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The adapters of a job with lora, alone, in PEFT's format.")
    ] = False,
    data: Annotated[str | None, typer.Option(help="Data set, for its tokenizer (default: the job's).")] = None,
    storage: StorageUri = None,
    endpoint_url: Endpoint = None,
    region: Region = None,
) -> None:
    """Write a checkpoint as a Hugging Face model folder: config, safetensors, tokenizer. Adapters are merged."""
    from elastic_train.checkpoint.adapter_export import export_adapter
    from elastic_train.checkpoint.hf_export import export_hf as export
    from elastic_train.config.lora import LoraConfig
    from elastic_train.config.operation import StorageConfig
    from elastic_train.controller.job_folder import read_record
    from elastic_train.storage.store import Store

    chosen = select(checkpoint, storage, endpoint_url, region)
    name, step = chosen.name, chosen.id.step
    config = read_record(chosen.store)["config"]
    lora = None if config.get("lora") is None else LoraConfig.model_validate(config["lora"], strict=False)
    first = config["data"]["uri"] or config["data"]["sources"][0]["uri"]  # all sources have the same tokenizer
    data_store = Store.open(data or first, StorageConfig(**config["storage"]))
    with progress_bar(transient=True) as progress:
        task = progress.add_task(f"step {step}", total=None)

        def report(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        to = out or f"exports/{name}-step-{step}{'-adapter' if adapter else ''}"
        if adapter:
            folder = export_adapter(chosen.store, step, to, lora, dtype=dtype, ema=ema, progress=report)
        else:
            folder = export(chosen.store, step, data_store, to, lora=lora, dtype=dtype, ema=ema, progress=report)
    what = "the adapters of step" if adapter else "step"
    typer.echo(f"{folder}: {what} {step} of {name} {'for PEFT' if adapter else 'as a Hugging Face model'}")
