"""Storage in an S3 bucket, of AWS or any server that speaks its protocol.

One botocore client does everything: with its payload signing off and our own checksums it moves bytes as fast as
pyarrow's C++ client, sends one request per read where that sends two, and lets every part be retried by itself.
"""

from __future__ import annotations

import threading
import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar

from elastic_train.config.operation import StorageConfig
from elastic_train.storage.errors import AlreadyExists, StorageError, WrongSettings
from elastic_train.storage.store import Entry, Store, Unfinished, join

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from typing_extensions import Buffer

Answer = TypeVar("Answer")


def open_s3(location: str, config: StorageConfig | None) -> Store:
    """The store at ``bucket/prefix``."""
    bucket, _, prefix = location.partition("/")
    if "@" in bucket or ":" in bucket:  # someone put credentials there: do not repeat them
        raise WrongSettings(
            "s3://...", "the bucket name holds '@' or ':'; credentials belong in the environment, not in the URI"
        )
    if not bucket:
        raise WrongSettings(f"s3://{location}", "the URI names no bucket; give s3://bucket/prefix")
    return S3Store(Bucket(bucket, config or StorageConfig()), prefix.strip("/"))


class Bucket:
    """A bucket with its client, shared by all stores in it. The client is made at the first request."""

    def __init__(self, name: str, config: StorageConfig) -> None:
        self.name = name
        self._config = config
        self._lock = threading.Lock()
        self._client: Any = None
        self._known = False
        self._retries: Any = None

    @property
    def retries(self) -> dict[str, int]:
        """How many requests were repeated so far, by cause."""
        return self._retries.so_far() if self._retries is not None else {}

    def call(self, uri: str, request: Callable[[Any], Any]) -> Any:
        """``request(client)`` with retries; errors become :class:`StorageError` about ``uri``."""
        from elastic_train.storage.s3_retry import retried

        client = self._checked(uri)
        return retried(uri, self._config.retry_seconds, self._retries, lambda: request(client))

    def agreed(self, uri: str, request: Callable[[Any], Answer], first: Answer | None = None) -> Answer:
        """As :meth:`call`, for an answer without a checksum: over plain HTTP it must come twice; ``first`` is one.

        TLS notices every changed bit; TCP's own checksum lets one in 65,536 damaged packets through.
        """
        from elastic_train.storage.s3_read import agreed, parsed

        def ask() -> Answer:
            answer: Answer = self.call(uri, lambda s3: parsed(lambda: request(s3)))
            return answer

        before = ask() if first is None else first
        plain = self._checked(uri).meta.endpoint_url.startswith("http://")
        return agreed(uri, before, ask, self._retries) if plain else before

    def _checked(self, uri: str) -> Any:
        """The client, after one look at the bucket: some servers create a missing one at the first write."""
        from elastic_train.storage.s3_client import make_client
        from elastic_train.storage.s3_retry import RetryCount, retried

        with self._lock:
            if self._client is None:
                self._client, self._retries = make_client(uri, self._config), RetryCount()
            client = self._client
        if not self._known:  # not under the lock: in an outage one thread must not wait for the others' retries
            retried(uri, self._config.retry_seconds, self._retries, self._look)
            self._known = True
        return client

    def _look(self) -> None:
        from botocore.exceptions import ClientError

        from elastic_train.storage.s3_errors import http_status

        try:
            self._client.head_bucket(Bucket=self.name)
        except ClientError as error:
            if http_status(error) == 404:
                error.response["Error"]["Code"] = "NoSuchBucket"  # the answer to HEAD has no body to say so
                raise
            if http_status(error) >= 500 or http_status(error) == 429:
                raise
            # 403 and others: some policies allow objects but not the bucket; the request itself will tell


class S3Store(Store):
    """Objects of a bucket below a key prefix."""

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self._bucket = bucket
        self._start = f"{prefix}/" if prefix else ""
        self.uri = f"s3://{bucket.name}/{prefix}".rstrip("/")

    def sub(self, path: str) -> Store:
        return S3Store(self._bucket, self._start + self._key(path))

    @property
    def retries(self) -> dict[str, int]:
        return self._bucket.retries

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        from elastic_train.storage.s3_read import read_range

        if offset == 0 and length is None:
            return self._read_whole(path)
        wanted = self._length(path, offset, length)
        return self._range(path, offset, wanted, read_range) if wanted else b""

    def read_buffer(self, path: str, offset: int = 0, length: int | None = None) -> bytearray:
        from elastic_train.storage.s3_read import read_range_into

        wanted = self._length(path, offset, length)
        return self._range(path, offset, wanted, read_range_into) if wanted else bytearray()

    def _length(self, path: str, offset: int, length: int | None) -> int:
        if length is None:
            length = self.size(path) - offset
            if length < 0:
                raise StorageError(
                    join(self.uri, path), f"bytes from {offset} wanted, but its size is {offset + length}"
                )
        return length

    def _range(self, path: str, offset: int, length: int, read: Callable[..., Answer]) -> Answer:
        uri, address = join(self.uri, path), self._address(path)
        data: Answer = self._bucket.call(uri, lambda s3: read(s3, uri, address, offset, length))
        return data

    def read_agreed(self, path: str, offset: int, length: int) -> bytes:
        if length == 0:
            return b""
        from elastic_train.storage.s3_read import read_range

        uri, address = join(self.uri, path), self._address(path)
        return self._bucket.agreed(uri, lambda s3: read_range(s3, uri, address, offset, length))

    def _read_whole(self, path: str) -> bytes:
        from elastic_train.storage.s3_read import read_whole

        uri, address = join(self.uri, path), self._address(path)
        first = data, checked = self._bucket.call(uri, lambda s3: read_whole(s3, address))
        if not checked:
            data, _ = self._bucket.agreed(uri, lambda s3: read_whole(s3, address), first)
        return bytes(data)

    def size(self, path: str) -> int:
        address = self._address(path)
        return int(self._bucket.call(join(self.uri, path), lambda s3: s3.head_object(**address)["ContentLength"]))

    def write(self, path: str, chunks: Iterable[Buffer], size_hint: int | None = None) -> int:
        from elastic_train.storage.s3_upload import upload

        uri = join(self.uri, path)
        return upload(uri, self._address(path), lambda request: self._bucket.call(uri, request), chunks, size_hint)

    def create(self, path: str, data: bytes) -> None:
        from botocore.exceptions import ClientError

        from elastic_train.storage.s3_errors import http_status
        from elastic_train.storage.s3_upload import crc32

        uri, attempts = join(self.uri, path), 0

        def put(s3: Any) -> bool:
            nonlocal attempts
            attempts += 1
            try:
                s3.put_object(**self._address(path), Body=data, ChecksumCRC32=crc32(data), IfNoneMatch="*")
            except ClientError as error:
                if http_status(error) != 412:
                    raise
                return False
            return True

        if self._bucket.call(uri, put):
            return
        # An attempt whose answer was lost may have been ours: then the object holds our bytes.
        if attempts == 1 or self.read(path) != data:
            raise AlreadyExists(uri, "exists already")

    def append(self, path: str, data: bytes) -> None:
        raise StorageError(join(self.uri, path), "S3 cannot append to an object")

    def list(self, prefix: str = "") -> list[Entry]:
        request = {"Bucket": self._bucket.name, "Prefix": self._start + self._prefix(prefix)}
        found: list[Entry] = []
        more = True
        while more:
            page, marker = self._bucket.agreed(join(self.uri, prefix), lambda s3: _list_page(s3, request))
            more = marker is not None
            request["ContinuationToken"] = marker or ""
            found += [Entry(key[len(self._start) :], size, modified) for key, size, modified in page]
        return sorted(entry for entry in found if not entry.path.endswith("/"))

    def delete(self, path: str) -> None:
        address = self._address(path)
        self._bucket.call(join(self.uri, path), lambda s3: s3.delete_object(**address))

    def now(self) -> float:
        answer = self._bucket.call(self.uri, lambda s3: s3.head_bucket(Bucket=self._bucket.name))
        said = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        return parsedate_to_datetime(said).timestamp() if said else time.time()

    def unfinished(self, prefix: str = "") -> Sequence[Unfinished]:
        request = {"Bucket": self._bucket.name, "Prefix": self._start + self._prefix(prefix)}
        found: list[Unfinished] = []
        more = True
        while more:
            page, markers = self._bucket.agreed(join(self.uri, prefix), lambda s3: _uploads_page(s3, request))
            more = markers is not None
            request.update(markers or {})
            found += [Unfinished(key[len(self._start) :], started, token) for key, started, token in page]
        return sorted(found, key=lambda write: (write.path, write.token))

    def abandon(self, write: Unfinished) -> None:
        address = self._address(write.path) | {"UploadId": write.token}
        try:
            self._bucket.call(join(self.uri, write.path), lambda s3: s3.abort_multipart_upload(**address))
        except StorageError as error:
            if "NoSuchUpload" not in error.cause:
                raise

    def _address(self, path: str) -> dict[str, Any]:
        return {"Bucket": self._bucket.name, "Key": self._start + self._key(path)}


def _list_page(s3: Any, request: dict[str, str]) -> tuple[list[tuple[str, int, float]], str | None]:
    """((key, size, modified) of each object, token of the next page) of one LIST."""
    answer = s3.list_objects_v2(**request)
    page = [(item["Key"], item["Size"], item["LastModified"].timestamp()) for item in answer.get("Contents", ())]
    return page, answer["NextContinuationToken"] if answer.get("IsTruncated", False) else None


def _uploads_page(s3: Any, request: dict[str, str]) -> tuple[list[tuple[str, float, str]], dict[str, str] | None]:
    """((key, started, token) of each open upload, markers of the next page)."""
    answer = s3.list_multipart_uploads(**request)
    page = [(item["Key"], item["Initiated"].timestamp(), item["UploadId"]) for item in answer.get("Uploads", ())]
    if not answer.get("IsTruncated", False):
        return page, None
    return page, {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}
