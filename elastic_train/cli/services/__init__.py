"""The verbs of ``elastic-train services``."""

from __future__ import annotations

import typer

from elastic_train.cli.services.verbs import down, status, up

app = typer.Typer(help="An S3 server and an MLflow server on this machine, to try things out.", no_args_is_help=True)
for _name, _command in (("up", up), ("down", down), ("status", status)):
    app.command(_name)(_command)
