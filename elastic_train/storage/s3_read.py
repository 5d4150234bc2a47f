"""Reading from S3 without believing every answer: lengths, checksums, and a second opinion where there is neither."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from botocore.exceptions import ClientError

from elastic_train.storage.errors import StorageError
from elastic_train.storage.s3_errors import BadAnswer, http_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


def read_range(s3: Any, uri: str, address: dict[str, str], offset: int, length: int) -> bytes:
    """Bytes ``[offset, offset + length)``. Raises StorageError only once the server has said twice that they end
    before: a wrong length in an answer says nothing about the object.
    """

    def joined(body: Any) -> tuple[bytes, int]:
        pieces = list(_pieces(body, length))  # of a single one no copy is made
        return b"".join(pieces), sum(map(len, pieces))

    return _range(s3, uri, address, offset, length, joined)


def read_range_into(s3: Any, uri: str, address: dict[str, str], offset: int, length: int) -> bytearray:
    """As :func:`read_range`, in memory that may be written to, and without a second buffer of this size."""

    def filled(body: Any) -> tuple[bytearray, int]:
        data, came = bytearray(length), 0
        for piece in _pieces(body, length):
            data[came : came + len(piece)] = piece[: length - came]
            came += len(piece)
        return data, came

    return _range(s3, uri, address, offset, length, filled)


def _range(
    s3: Any, uri: str, address: dict[str, str], offset: int, length: int, take: Callable[[Any], tuple[Answer, int]]
) -> Answer:
    """What ``take`` makes of the body, with how many bytes came."""
    came = 0
    try:
        answer = s3.get_object(**address, Range=f"bytes={offset}-{offset + length - 1}")
        data, came = take(answer["Body"])
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


def _pieces(body: Any, length: int) -> Iterator[bytes]:
    """What ``body`` has; of what is beyond ``length`` bytes only one."""
    came = 0
    while piece := body.read(min(PIECE_BYTES, length - came) or 1):
        yield piece
        came += len(piece)
        if came > length:
            body.close()
            return


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
