"""Turns the errors that people can act on into sentences on stderr and exit codes. Never a traceback for those."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from elastic_train.checkpoint.errors import CheckpointError, DamagedChunk, SourceError
from elastic_train.config.errors import ConfigError
from elastic_train.data.errors import DataError
from elastic_train.storage.errors import FutureFormat, NotFound, StorageError, WrongSettings

OK, FAILED, USER_ERROR, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143


class UserError(Exception):
    """The command was asked for something that cannot be done; the message says what would do."""


class GuardedGroup(TyperGroup):
    """The root command: every verb runs inside its ``invoke``."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise _exit(USER_ERROR, *error.problems) from None
        except (StorageError, SourceError) as error:
            # What is not there was asked for by the user; a store that does not answer is nobody's mistake.
            asked = isinstance(error, NotFound | WrongSettings | FutureFormat)
            raise _exit(USER_ERROR if asked else FAILED, str(error)) from None
        except DamagedChunk as error:
            raise _exit(FAILED, str(error)) from None
        except (UserError, DataError, CheckpointError) as error:
            raise _exit(USER_ERROR, str(error)) from None
        except KeyboardInterrupt:
            raise _exit(INTERRUPTED, "interrupted") from None


def _exit(code: int, *sentences: str) -> typer.Exit:
    for sentence in sentences:
        typer.echo(f"error: {sentence}", err=True)
    return typer.Exit(code)
