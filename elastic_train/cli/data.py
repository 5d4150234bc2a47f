"""The verbs of ``elastic-train data``."""

from __future__ import annotations

import typer

from elastic_train.cli import data_show
from elastic_train.cli.data_audit import audit_data
from elastic_train.cli.data_prepare import prepare_data

app = typer.Typer(help="Prepare, inspect, verify, show and audit token shards.", no_args_is_help=True)
for _name, _command in (
    ("prepare", prepare_data),
    ("inspect", data_show.inspect),
    ("verify", data_show.verify),
    ("show", data_show.show),
    ("audit", audit_data),
):
    app.command(_name)(_command)
