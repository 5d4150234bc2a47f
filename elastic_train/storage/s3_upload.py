"""A stream of bytes to one S3 object: a single PUT when small, a multipart upload when not."""

from __future__ import annotations

import base64
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from elastic_train.storage.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from typing_extensions import Buffer

MIB = 2**20
MAX_PARTS = 10_000
"""Limit of the S3 protocol."""
MIN_PART = 8 * MIB
"""More bytes on the way at once are not faster, and cost a server that holds parts in memory (5 MiB are the least)."""
PARALLEL = 4
"""Parts under way at once; each is held in memory, and one more that is being filled."""


def crc32(body: Buffer) -> str:
    """The checksum header of a body: the server refuses bytes that were damaged on the way."""
    return base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()


def part_size(total: int | None) -> int:
    """Bytes per part for an object of ``total`` bytes: whole MiB, at least 8 MiB, never more than 10,000 parts."""
    needed = -(-(total or 0) // MAX_PARTS)
    return max(MIN_PART, -(-needed // MIB) * MIB)


def upload(
    uri: str,
    address: dict[str, Any],
    call: Callable[[Callable[[Any], Any]], Any],
    chunks: Iterable[Buffer],
    size_hint: int | None,
) -> int:
    """Writes ``chunks`` to the object at ``address`` (Bucket, Key) and returns their size in bytes.

    ``call`` runs one request with retries. The object appears when the last part is in, never before.
    """
    parts = split(chunks, part_size(size_hint))
    begun = deque(islice(parts, 2))
    if len(begun) < 2:
        body = begun.pop() if begun else bytearray()
        call(lambda s3: s3.put_object(**address, Body=body, ChecksumCRC32=crc32(body)))
        return len(body)
    target = address | {"UploadId": call(lambda s3: _begin(s3, address))}
    try:
        done, written = _send_parts(uri, target, call, _chain(begun, parts))
        _complete(address, target, call, done, written)
    except BaseException:
        with suppress(StorageError):  # parts of an open upload are invisible but paid for
            call(lambda s3: s3.abort_multipart_upload(**target))
        raise
    return written


def _begin(s3: Any, address: dict[str, Any]) -> str:
    """The id of a new upload, which the server is asked about: a damaged one would fail all parts."""
    from elastic_train.storage.s3_errors import BadAnswer, error_code
    from elastic_train.storage.s3_read import parsed

    upload_id = parsed(lambda: str(s3.create_multipart_upload(**address, ChecksumAlgorithm="CRC32")["UploadId"]))
    try:
        s3.list_parts(**address, UploadId=upload_id)
    except ClientError as error:
        if error_code(error) != "NoSuchUpload":
            raise
        raise BadAnswer("the server does not know the upload that it has just begun") from error
    return upload_id


def _complete(
    address: dict[str, Any],
    target: dict[str, Any],
    call: Callable[[Callable[[Any], Any]], Any],
    done: list[dict[str, Any]],
    written: int,
) -> None:
    try:
        call(lambda s3: s3.complete_multipart_upload(**target, MultipartUpload={"Parts": done}))
    except StorageError as error:
        # A first attempt whose answer was lost has closed the upload: then the object is there.
        if "NoSuchUpload" not in error.cause or call(lambda s3: s3.head_object(**address))["ContentLength"] != written:
            raise


def split(chunks: Iterable[Buffer], size: int) -> Iterator[bytearray]:
    """The bytes of ``chunks`` in parts of ``size`` bytes, the last one shorter."""
    part = bytearray()
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while len(part) + len(view) >= size:
            room = size - len(part)
            part += view[:room]
            view = view[room:]
            yield part
            part = bytearray()
        part += view
    if part:
        yield part


def _chain(begun: deque[bytearray], rest: Iterator[bytearray]) -> Iterator[bytearray]:
    while begun:
        yield begun.popleft()  # not to be held here while it is under way and after
    yield from rest


def _send_parts(
    uri: str, target: dict[str, Any], call: Callable[[Callable[[Any], Any]], Any], parts: Iterator[bytearray]
) -> tuple[list[dict[str, Any]], int]:
    def send(number: int, body: bytearray) -> dict[str, Any]:
        checksum = crc32(body)
        answer = call(lambda s3: s3.upload_part(**target, PartNumber=number, Body=body, ChecksumCRC32=checksum))
        return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC32": checksum}

    done: list[dict[str, Any]] = []
    written = 0
    under_way: deque[Future[dict[str, Any]]] = deque()
    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="s3-upload") as pool:
        for number, body in enumerate(parts, start=1):
            if number > MAX_PARTS:
                raise StorageError(
                    uri, f"more than {MAX_PARTS} parts of {len(body)} bytes; give write() the size as size_hint"
                )
            if len(under_way) == PARALLEL:
                done.append(under_way.popleft().result())
            written += len(body)
            under_way.append(pool.submit(send, number, body))
        done += [future.result() for future in under_way]
    return done, written
