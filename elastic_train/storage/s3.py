"""Storage in an S3 bucket, of AWS or any server that speaks its protocol.

One boto3 client does everything: with its payload signing off and our own checksums it moves bytes as fast as
pyarrow's C++ client, sends one request per read where that sends two, and lets every part be retried by itself.
"""

from __future__ import annotations

import os
import threading
import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from elastic_train.config.operation import StorageConfig
from elastic_train.storage.errors import AlreadyExists, NotFound, StorageError, WrongSettings
from elastic_train.storage.store import Entry, Store, Unfinished, join

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from typing_extensions import Buffer

READ_TIMEOUT_SECONDS = 30.0


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

    def call(self, uri: str, request: Callable[[Any], Any]) -> Any:
        """``request(client)`` with retries; errors become :class:`StorageError` about ``uri``."""
        from elastic_train.storage.s3_errors import retried

        client = self._checked(uri)
        return retried(uri, self._config.retry_seconds, lambda: request(client))

    def _checked(self, uri: str) -> Any:
        """The client, after one look at the bucket: some servers create a missing one at the first write."""
        from elastic_train.storage.s3_errors import retried

        with self._lock:
            if self._client is None:
                self._client = _make_client(uri, self._config)
            client = self._client
        if not self._known:  # not under the lock: in an outage one thread must not wait for the others' retries
            retried(uri, self._config.retry_seconds, self._look)
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


def _make_client(uri: str, config: StorageConfig) -> Any:
    endpoint = config.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    keys: dict[str, Any] = {}
    if endpoint:
        # A server of one's own: nothing may be asked of AWS, neither the region nor an instance's credentials.
        os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
        keys = _environment_credentials(uri)
    import boto3
    from botocore.config import Config

    try:
        return boto3.session.Session().client(
            "s3",
            endpoint_url=endpoint,
            region_name=config.region,
            **keys,
            config=Config(
                signature_version="s3v4",
                connect_timeout=config.connect_timeout_seconds,
                read_timeout=READ_TIMEOUT_SECONDS,
                retries={"total_max_attempts": 1},  # ours have a time budget
                max_pool_connections=32,
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"addressing_style": "path" if endpoint else "auto", "payload_signing_enabled": False},
            ),
        )
    except ValueError as error:
        raise WrongSettings(uri, f"endpoint_url={endpoint!r} is not accepted: {error}") from None


def _environment_credentials(uri: str) -> dict[str, Any]:
    access, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    if not access or not secret:
        raise WrongSettings(uri, "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    return {
        "aws_access_key_id": access,
        "aws_secret_access_key": secret,
        "aws_session_token": os.environ.get("AWS_SESSION_TOKEN") or None,
    }


class S3Store(Store):
    """Objects of a bucket below a key prefix."""

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self._bucket = bucket
        self._start = f"{prefix}/" if prefix else ""
        self.uri = f"s3://{bucket.name}/{prefix}".rstrip("/")

    def sub(self, path: str) -> Store:
        return S3Store(self._bucket, self._start + self._key(path))

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            return b""
        whole = offset == 0 and length is None
        end = "" if length is None else str(offset + length - 1)
        address = self._address(path) | ({} if whole else {"Range": f"bytes={offset}-{end}"})
        uri = join(self.uri, path)
        try:
            data: bytes = self._bucket.call(uri, lambda s3: s3.get_object(**address)["Body"].read())
        except NotFound:
            raise
        except StorageError as error:
            if "InvalidRange" not in error.cause:
                raise
            size = self.size(path)
            if length is None and offset == size:  # a range of no bytes, which HTTP has no way to ask for
                return b""
            raise StorageError(uri, f"bytes from {offset} wanted, but its size is {size}") from None
        if length is not None and len(data) != length:
            raise StorageError(uri, f"bytes {offset} to {offset + length} wanted, but its size is {offset + len(data)}")
        return data

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
            page = self._bucket.call(join(self.uri, prefix), lambda s3: s3.list_objects_v2(**request))
            more = page.get("IsTruncated", False)
            request["ContinuationToken"] = page.get("NextContinuationToken", "")
            found += [
                Entry(item["Key"][len(self._start) :], item["Size"], item["LastModified"].timestamp())
                for item in page.get("Contents", ())
            ]
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
            page = self._bucket.call(join(self.uri, prefix), lambda s3: s3.list_multipart_uploads(**request))
            more = page.get("IsTruncated", False)
            request["KeyMarker"] = page.get("NextKeyMarker", "")
            request["UploadIdMarker"] = page.get("NextUploadIdMarker", "")
            found += [
                Unfinished(item["Key"][len(self._start) :], item["Initiated"].timestamp(), item["UploadId"])
                for item in page.get("Uploads", ())
            ]
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
