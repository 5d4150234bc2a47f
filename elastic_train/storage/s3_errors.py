"""Which S3 errors are worth another try, and what the others mean in one sentence."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, TypeVar

from botocore import exceptions as botocore_errors
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from elastic_train.storage.errors import NotFound, StorageError, WrongSettings

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

PASSING_CODES = {
    "SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "Throttling", "ThrottlingException",
    "RequestTimeTooSlow", "OperationAborted", "ConditionalRequestConflict", "TooManyRequests", "BadDigest",
}  # fmt: skip
"""Error codes that go away by themselves. BadDigest: the bytes were damaged on the way."""

PASSING_ERRORS = (
    botocore_errors.ConnectionError,  # of botocore: no connection in time
    botocore_errors.HTTPClientError,  # a connection that broke or went silent
    botocore_errors.IncompleteReadError,
    ConnectionError,
    TimeoutError,
)

CAUSES = {
    "NoSuchBucket": "the bucket does not exist; create it first, elastic_train never creates buckets",
    "InvalidBucketName": "the bucket name is not valid",
    "AccessDenied": "access denied; the credentials in the environment may not do this",
    "AllAccessDisabled": "access denied; access to the bucket is disabled",
    "InvalidAccessKeyId": "bad credentials: the server does not know this AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "bad credentials: AWS_SECRET_ACCESS_KEY does not belong to AWS_ACCESS_KEY_ID",
    "ExpiredToken": "the credentials in the environment have expired",
    "InvalidToken": "bad credentials: AWS_SESSION_TOKEN is not valid",
    "PermanentRedirect": "the bucket is in another region; set storage.region",
    "AuthorizationHeaderMalformed": "the bucket is in another region; set storage.region",
    "QuotaExceeded": "the storage quota is used up",
    "InsufficientStorage": "the server is out of disk space",
    "XMinioStorageFull": "the server is out of disk space",
}

SECRET_VARIABLES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")


def error_code(error: Exception) -> str:
    """The S3 error code, or the HTTP status where the answer had no body; "" for other errors."""
    response: Any = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def http_status(error: Exception) -> int:
    """The HTTP status of an S3 error, 0 where there was no answer."""
    response: Any = getattr(error, "response", None)
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) if isinstance(response, dict) else 0


def is_passing(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, botocore_errors.ProxyConnectionError | botocore_errors.SSLError):
        return False
    if isinstance(error, botocore_errors.ClientError):
        status = http_status(error)
        full = error_code(error) in ("InsufficientStorage", "XMinioStorageFull") or status == 507
        return (error_code(error) in PASSING_CODES or status in (408, 429) or status >= 500) and not full
    return isinstance(error, PASSING_ERRORS)


def retried(uri: str, budget_seconds: float, request: Callable[[], Result]) -> Result:
    """``request()``, repeated with jitter while errors pass and the budget lasts; then :class:`StorageError`."""
    started = time.monotonic()
    attempts = Retrying(
        retry=retry_if_exception(is_passing),
        stop=stop_after_delay(budget_seconds),
        wait=wait_random_exponential(multiplier=0.1, max=5.0),
        reraise=True,
    )
    try:
        return attempts(request)
    except (botocore_errors.BotoCoreError, botocore_errors.ClientError, *PASSING_ERRORS) as error:
        raise translate(uri, error, time.monotonic() - started) from _without_traceback(error)


def translate(uri: str, error: Exception, seconds: float = 0.0) -> StorageError:
    """The storage error for what an S3 request ended with, ``seconds`` after its first attempt."""
    code, status = error_code(error), http_status(error)
    if isinstance(error, botocore_errors.ClientError):
        if code == "NoSuchBucket":
            return WrongSettings(uri, CAUSES[code])
        if code in ("NoSuchKey", "404"):
            return NotFound(uri, "no such object")
        code = "AccessDenied" if code == "403" else code
        said = str(error.response.get("Error", {}).get("Message", "")).rstrip(".")
        tried = f" for {seconds:.0f} seconds of retries" if is_passing(error) else ""
        return StorageError(uri, CAUSES.get(code) or scrub(f"the server answered {code} ({status}: {said}){tried}"))
    if isinstance(error, botocore_errors.NoCredentialsError | botocore_errors.PartialCredentialsError):
        return WrongSettings(uri, "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if is_passing(error):
        return StorageError(uri, scrub(f"the server could not be reached for {seconds:.0f} seconds: {error}"))
    return StorageError(uri, scrub(str(error)))


def scrub(text: str) -> str:
    """``text`` in one line, without the values of the credential variables."""
    for variable in SECRET_VARIABLES:
        value = os.environ.get(variable)
        if value:
            text = text.replace(value, f"${variable}")
    return " ".join(text.split())


def _without_traceback(error: Exception) -> Exception | None:
    """No chained error where its own text would show what :func:`scrub` takes out."""
    return error if scrub(str(error)) == " ".join(str(error).split()) else None
