"""Reading from S3 without believing every answer: lengths, checksums, and a second opinion where there is neither."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from botocore.exceptions import ClientError

from elastic_train.storage.errors import StorageError
from elastic_train.storage.s3_errors import BadAnswer, http_status

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_train.storage.s3_retry import RetryCount

Answer = TypeVar("Answer")

CHECKED = ("ChecksumCRC32", "ChecksumSHA1", "ChecksumSHA256")
"""Checksums that botocore compares by itself; the other kinds need a library that is not installed."""
PIECE_BYTES = 2**20
"""Taken from a connection at a time."""
OPINIONS = 10
"""Answers that are asked for at most until two in a row agree."""


def read_whole(s3: Any, address: dict[str, str]) -> tuple[bytes, bool]:
    """An object's bytes, and whether the server sent a checksum of them all, which was then compared.

    There is one for everything that was written by one PUT with a checksum, as all small objects of ours are.
    """
    answer = s3.get_object(**address, ChecksumMode="ENABLED")
    data: bytes = answer["Body"].read()
    # A checksum with "-" in it is one of the parts' checksums, as of a multipart upload.
    return data, any("-" not in answer[field] for field in CHECKED if field in answer)


def read_range(s3: Any, uri: str, address: dict[str, str], offset: int, length: int) -> bytearray:
    """Bytes ``[offset, offset + length)``. Raises StorageError only once the server has said twice that they end
    before: a wrong length in an answer says nothing about the object.
    """
    data, came = bytearray(length), 0
    try:
        answer = s3.get_object(**address, Range=f"bytes={offset}-{offset + length - 1}")
        came = _take(answer["Body"], data)
    except ClientError as error:
        if http_status(error) != 416:
            raise
    else:
        if came == length and answer.get("ContentRange", f"bytes {offset}-").startswith(f"bytes {offset}-"):
            return data
    size = int(s3.head_object(**address)["ContentLength"])
    if offset + length > size:
        raise StorageError(uri, f"bytes {offset} to {offset + length} wanted, but its size is {size}")
    raise BadAnswer(f"{came} bytes came instead of bytes {offset} to {offset + length}")


def _take(body: Any, data: bytearray) -> int:
    """Fills ``data`` and returns how many bytes ``body`` has; of those beyond ``data`` only one is counted.

    Piece by piece, because a second buffer of this size would cost more than the copy.
    """
    came = 0
    while piece := body.read(min(PIECE_BYTES, len(data) - came) or 1):
        if came == len(data):
            body.close()
            return came + 1
        data[came : came + len(piece)] = piece
        came += len(piece)
    return came


def parsed(read: Callable[[], Answer]) -> Answer:
    """``read()``, which takes an XML answer apart. A damaged one can lack fields or have nonsense in them."""
    try:
        return read()
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise BadAnswer(f"an answer that cannot be understood: {type(error).__name__}: {error}") from error


def agreed(uri: str, before: Answer, ask: Callable[[], Answer], count: RetryCount) -> Answer:
    """The answer that came twice in a row; ``before`` is the first.

    For what has no checksum: the answer to LIST is XML, and a flipped bit in a key, a size or a date still parses;
    a checkpoint that seems not to be listed would be taken for garbage.
    """
    for _ in range(OPINIONS):
        answer = ask()
        if answer == before:
            return answer
        count.add("differing answers")
        before = answer
    raise StorageError(uri, f"of {OPINIONS + 1} answers of the server no two in a row were the same")
