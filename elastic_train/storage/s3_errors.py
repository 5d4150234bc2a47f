"""Which S3 errors are worth another try, and what the others mean in one sentence."""

from __future__ import annotations

import os
import socket
import time
from email.utils import parsedate_to_datetime
from typing import Any

from botocore import exceptions as botocore_errors
from botocore.parsers import ResponseParserError

from elastic_train.storage.errors import NotFound, StorageError, WrongSettings

THROTTLING_CODES = {"SlowDown", "ServiceUnavailable", "Throttling", "ThrottlingException", "TooManyRequests"}
"""The server has too much to do."""

PASSING_CODES = THROTTLING_CODES | {
    "InternalError", "RequestTimeout", "RequestTimeTooSlow", "OperationAborted", "ConditionalRequestConflict",
    "BadDigest", "XAmzContentChecksumMismatch",
}  # fmt: skip
"""Error codes that go away by themselves. BadDigest: the bytes were damaged on the way."""

MISSING_CODES = {"NoSuchKey", "NoSuchBucket", "NoSuchUpload", "404"}
"""What may be missing. Another code in a 404 is a damaged answer, and what is said to be missing may be there."""


class BadAnswer(Exception):
    """An answer that cannot be right; the next one may be."""


PASSING_ERRORS = (
    BadAnswer,
    ResponseParserError,  # XML that is none
    botocore_errors.FlexibleChecksumError,
    botocore_errors.ConnectionError,  # of botocore: no connection in time
    botocore_errors.HTTPClientError,  # a connection that broke or went silent
    botocore_errors.IncompleteReadError,
    ConnectionError,
    TimeoutError,
)

CAUSES = {
    "QuotaExceeded": "the storage quota is used up",
    "InsufficientStorage": "the server is out of disk space",
    "XMinioStorageFull": "the server is out of disk space",
    "AccessDenied": "access denied; the credentials in the environment may not do this",
    "AllAccessDisabled": "access denied; access to the bucket is disabled",
}

WRONG_SETTINGS = {
    "NoSuchBucket": "the bucket does not exist; create it first, elastic_train never creates buckets",
    "InvalidBucketName": "the bucket name is not valid",
    "InvalidAccessKeyId": "bad credentials: the server does not know this AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "bad credentials: AWS_SECRET_ACCESS_KEY does not belong to AWS_ACCESS_KEY_ID",
    "ExpiredToken": "the credentials in the environment have expired",
    "InvalidToken": "bad credentials: AWS_SESSION_TOKEN is not valid",
    "PermanentRedirect": "the bucket is in another region; set storage.region",
    "AuthorizationHeaderMalformed": "the bucket is in another region; set storage.region",
}
"""Causes that the user can mend and that stay until then."""

SECRET_VARIABLES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")


def error_code(error: Exception) -> str:
    """The S3 error code, or the HTTP status where the answer had no body; "" for other errors."""
    response: Any = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def http_status(error: Exception) -> int:
    """The HTTP status of an S3 error, 0 where there was no answer."""
    response: Any = getattr(error, "response", None)
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) if isinstance(response, dict) else 0


def headers_of(error: BaseException) -> dict[str, str]:
    """Headers of the answer, names in lower case; {} where there was none."""
    response: Any = getattr(error, "response", None)
    return dict(response.get("ResponseMetadata", {}).get("HTTPHeaders", {})) if isinstance(response, dict) else {}


def is_passing(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, botocore_errors.ProxyConnectionError | botocore_errors.SSLError):
        return False
    if isinstance(error, botocore_errors.ClientError):
        status, code = http_status(error), error_code(error)
        if code in ("InsufficientStorage", "XMinioStorageFull") or status == 507:
            return False
        return code in PASSING_CODES or status in (408, 429) or status >= 500 or _is_doubtful(status, code)
    return isinstance(error, PASSING_ERRORS)


def _is_doubtful(status: int, code: str) -> bool:
    return status == 404 and code not in MISSING_CODES


def is_throttling(error: BaseException) -> bool:
    """Whether the server said that it has too much to do."""
    return isinstance(error, Exception) and (error_code(error) in THROTTLING_CODES or http_status(error) in (429, 503))


def cause_of_retry(error: BaseException) -> str:
    """A passing error in a few words, for counting."""
    if isinstance(error, botocore_errors.ClientError):
        status, code = http_status(error), error_code(error)
        if _is_doubtful(status, code):
            return "damaged answer"
        return code if code in PASSING_CODES else f"HTTP {status}"
    if isinstance(error, BadAnswer | ResponseParserError | botocore_errors.FlexibleChecksumError):
        return "damaged answer"
    if isinstance(error, botocore_errors.ConnectTimeoutError | botocore_errors.EndpointConnectionError):
        return "no connection"
    if isinstance(error, botocore_errors.ReadTimeoutError):
        return "no answer"
    return "broken connection"


def translate(uri: str, error: Exception, seconds: float = 0.0) -> StorageError:
    """The storage error for what an S3 request ended with, ``seconds`` after its first attempt."""
    if isinstance(error, botocore_errors.ClientError):
        return _translate_answer(uri, error, seconds)
    if isinstance(error, botocore_errors.NoCredentialsError | botocore_errors.PartialCredentialsError):
        return WrongSettings(uri, "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if isinstance(error, botocore_errors.SSLError):
        return WrongSettings(uri, scrub(f"no TLS connection; is the endpoint one of https? {error}"))
    if isinstance(error, BadAnswer | ResponseParserError | botocore_errors.FlexibleChecksumError):
        return StorageError(uri, scrub(f"the server's answers were damaged for {seconds:.0f} seconds: {error}"))
    if isinstance(error, botocore_errors.EndpointConnectionError) and _is_unresolved(error):
        return StorageError(uri, scrub(f"the name of the server was not found for {seconds:.0f} seconds: {error}"))
    if is_passing(error):
        return StorageError(uri, scrub(f"the server could not be reached for {seconds:.0f} seconds: {error}"))
    return StorageError(uri, scrub(str(error)))


def _translate_answer(uri: str, error: botocore_errors.ClientError, seconds: float) -> StorageError:
    code, status = error_code(error), http_status(error)
    if status == 404 and code not in ("NoSuchBucket", "NoSuchUpload"):
        return NotFound(uri, "no such object")
    if (skew := _clock_skew(error)) is not None:
        return WrongSettings(uri, skew)
    if code in WRONG_SETTINGS:
        return WrongSettings(uri, WRONG_SETTINGS[code])
    code = "AccessDenied" if code == "403" else code
    code = "InsufficientStorage" if status == 507 else code
    said = str(error.response.get("Error", {}).get("Message", "")).rstrip(".")
    tried = f" for {seconds:.0f} seconds of retries" if is_passing(error) else ""
    name = f"{status} ({said})" if code == str(status) else f"{code} ({status}: {said})"
    return StorageError(uri, CAUSES.get(code) or scrub(f"the server answered {name}{tried}"))


SKEW_SECONDS = 15 * 60
"""S3 refuses requests whose clock is further off."""


def _clock_skew(error: botocore_errors.ClientError) -> str | None:
    """The sentence for a refusal because of the clock. The answer to a HEAD has no code, but the server's time."""
    code, date = error_code(error), headers_of(error).get("date")
    here, there = time.time(), parsedate_to_datetime(date).timestamp() if date else None
    apart = there is not None and abs(here - there) > SKEW_SECONDS
    if code != "RequestTimeTooSkewed" and not (code in ("403", "AccessDenied") and apart):
        return None
    times = (
        f"this machine's clock says {_utc(here)}, the server's {_utc(there) if there is not None else 'another time'}"
    )
    return f"the clocks differ too much: {times}; at most 15 minutes are accepted, set the clock"


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _is_unresolved(error: BaseException | None) -> bool:
    """Whether a failed look-up of a name is behind ``error``."""
    while error is not None:
        if isinstance(error, socket.gaierror) or type(error).__name__ == "NameResolutionError":
            return True
        error = error.__cause__ or error.__context__
    return False


def scrub(text: str) -> str:
    """``text`` in one line, without the values of the credential variables."""
    for variable in SECRET_VARIABLES:
        value = os.environ.get(variable)
        if value:
            text = text.replace(value, f"${variable}")
    return " ".join(text.split())


def without_traceback(error: Exception) -> Exception | None:
    """The error to chain: none where its own text would show what :func:`scrub` takes out."""
    return error if scrub(str(error)) == " ".join(str(error).split()) else None
