"""Arguments and options that several verbs have."""

from __future__ import annotations

from typing import Annotated

import typer

JobRef = Annotated[
    str, typer.Argument(metavar="JOB", help="Name of the job, its job file, or the URI of its folder (has a slash).")
]
CheckpointRef = Annotated[
    str,
    typer.Argument(
        metavar="JOB[@STEP]",
        help="Name of the job, its job file, or the URI of its folder (has a slash); @STEP: default the newest.",
    ),
]
StorageUri = Annotated[
    str | None,
    typer.Option(
        "--storage",
        metavar="URI",
        help="Where the folder of a JOB given by name is: path, file:// or s3:// (default: runs).",
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option("--endpoint-url", metavar="URL", help="S3 endpoint of another provider (default: AWS_ENDPOINT_URL)."),
]
Region = Annotated[str | None, typer.Option("--region", help="S3 region (default: us-east-1).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
