"""The verbs of ``elastic-train checkpoint``."""

from __future__ import annotations

import typer

from elastic_train.cli import huggingface
from elastic_train.cli.checkpoints import checking, collecting, comparing, keeping, listing, moving

app = typer.Typer(
    help="List, show, verify, compare, pin, clean up, copy and convert checkpoints.",
    epilog=r"JOB\[@STEP] is a job's name (with --storage), its job file, or the URI of its folder, and a step.",
    no_args_is_help=True,
)
for _name, _command in (
    ("ls", listing.list_all),
    ("show", listing.show),
    ("verify", checking.verify),
    ("diff", comparing.diff),
    ("pin", keeping.pin),
    ("unpin", keeping.unpin),
    ("gc", collecting.collect),
    ("copy", moving.copy),
    ("export-hf", huggingface.export_hf),
    ("import-hf", huggingface.import_hf),
):
    app.command(_name)(_command)
