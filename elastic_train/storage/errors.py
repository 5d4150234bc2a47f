"""What can go wrong with storage, said in one sentence."""

from __future__ import annotations


class StorageError(Exception):
    """An operation on ``uri`` failed for good; ``str()`` is one sentence with the URI and the cause."""

    def __init__(self, uri: str, cause: str) -> None:
        super().__init__(f"{uri}: {cause}")
        self.uri = uri
        self.cause = cause

    def __reduce__(self) -> tuple[type[StorageError], tuple[str, str]]:
        return type(self), (self.uri, self.cause)


class NotFound(StorageError):
    """The object does not exist."""


class WrongSettings(StorageError):
    """The user's URI, endpoint, bucket or credentials cannot be used; trying again changes nothing."""


class FutureFormat(StorageError):
    """The file was written by a later release, in a format that this one does not know. It is not damaged."""


class AlreadyExists(StorageError):
    """A conditional create found the object there."""
