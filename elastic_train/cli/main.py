"""The ``elastic-train`` command.

Exit codes: 0 ok; 1 the job failed or damage was found; 2 the user's error, found before anything was launched;
130 and 143 stopped by SIGINT and SIGTERM.
"""

from __future__ import annotations

import typer

from elastic_train.cli import chaos, checkpoints, clusters, data, huggingface, jobs, services
from elastic_train.cli.evaluate import evaluate
from elastic_train.cli.guard import GuardedGroup
from elastic_train.cli.plan import plan
from elastic_train.cli.quickstart import quickstart
from elastic_train.cli.simulate import simulate
from elastic_train.cli.submit import logs, run, submit

app = typer.Typer(
    name="elastic-train",
    cls=GuardedGroup,
    help="Pretrain language models on machines that come and go.",
    epilog="Exit codes: 0 ok, 1 job failed or damage found, 2 your error, 130/143 stopped by a signal.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _command in (
    ("quickstart", quickstart),
    ("validate", jobs.validate),
    ("plan", plan),
    ("train", jobs.train),
    ("run", run),
    ("submit", submit),
    ("logs", logs),
    ("status", jobs.status),
    ("stop", jobs.stop),
    ("evaluate", evaluate),
    ("simulate", simulate),
):
    app.command(_name)(_command)
app.add_typer(data.app, name="data")
app.add_typer(checkpoints.app, name="checkpoint")
app.add_typer(chaos.app, name="chaos")
app.add_typer(services.app, name="services")
app.add_typer(clusters.app, name="cluster")
app.command("import-hf")(huggingface.import_hf)
app.command("export-hf")(huggingface.export_hf)


@app.callback()
def _root() -> None:
    """Pretrain language models on machines that come and go."""


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
