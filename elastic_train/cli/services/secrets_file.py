"""The credentials of the local S3 server, in a file that only its owner may read."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from elastic_train.cli.guard import UserError

_NAMES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


@dataclass(frozen=True, slots=True)
class Credentials:
    access_key: str
    secret_key: str


def read_or_make(file: Path) -> Credentials:
    """Lines ``export NAME=VALUE``, which a shell can read; made when there is no file yet. Raises UserError."""
    if not file.exists():
        made = Credentials(f"local-{secrets.token_hex(8)}", secrets.token_urlsafe(30))
        lines = [f"export {name}={value}\n" for name, value in zip(_NAMES, _values(made), strict=True)]
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.writelines(lines)
        return made
    mode = file.stat().st_mode & 0o777
    if mode & 0o077:
        raise UserError(f"{file} has the mode {mode:o}, so others may read it; chmod 600 {file}, or remove it")
    found = dict(line.removeprefix("export ").split("=", 1) for line in file.read_text().splitlines() if "=" in line)
    if any(not found.get(name) for name in _NAMES):
        raise UserError(f"{file} lacks {' or '.join(_NAMES)}; remove it, and new ones are made")
    return Credentials(*(found[name] for name in _NAMES))


def _values(credentials: Credentials) -> tuple[str, str]:
    return credentials.access_key, credentials.secret_key
