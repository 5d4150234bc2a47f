"""The client of S3: our own retries, time limits and checksums, and nothing asked of AWS that was not asked for."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import EndpointConnectionError
from botocore.loaders import create_loader

from elastic_train.storage import outage
from elastic_train.storage.errors import WrongSettings

if TYPE_CHECKING:
    from elastic_train.config.operation import StorageConfig

READ_TIMEOUT_SECONDS = 30.0
"""Longest wait for an answer; less when the budget of retries is shorter."""


def make_client(uri: str, config: StorageConfig) -> Any:
    """A client of boto3; ``uri`` is for errors. Raises :class:`WrongSettings`."""
    endpoint = config.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    keys: dict[str, Any] = {}
    if endpoint:
        # A server of one's own: nothing may be asked of AWS, neither the region nor an instance's credentials.
        os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
        keys = _environment_credentials(uri)
    session = botocore.session.get_session()
    session.register_component("data_loader", _loader())
    try:
        client = boto3.Session(botocore_session=session).client(
            "s3", region_name=config.region, endpoint_url=endpoint, **keys, config=_client_config(config, endpoint)
        )
    except ValueError as error:
        raise WrongSettings(uri, f"endpoint_url={endpoint!r} is not accepted: {error}") from None
    if endpoint:
        client.meta.events.register("before-call.s3", _follow_no_redirect)
    client.meta.events.register("before-send.s3", _not_in_an_outage)
    return client


@cache
def _loader() -> Any:
    """Of botocore's description of S3, which takes a new one 50 ms of CPU time to read: every store has a client."""
    return create_loader()


def _not_in_an_outage(request: Any, **_: Any) -> None:
    if outage.seconds_left():
        raise EndpointConnectionError(endpoint_url=request.url)


def _client_config(config: StorageConfig, endpoint: str | None) -> Any:
    # A server that stays silent must not take much longer than the budget.
    read_timeout = max(min(READ_TIMEOUT_SECONDS, config.retry_seconds), config.connect_timeout_seconds)
    return Config(
        signature_version="s3v4",
        connect_timeout=config.connect_timeout_seconds,
        read_timeout=read_timeout,
        retries={"total_max_attempts": 1},  # ours have a time budget
        max_pool_connections=32,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path" if endpoint else "auto", "payload_signing_enabled": False},
    )


def _follow_no_redirect(params: dict[str, Any], **_: Any) -> None:
    """botocore looks for the bucket's region when it is sent elsewhere, again and again when it is not told one."""
    params["context"].setdefault("s3_redirect", {})["redirected"] = True


def _environment_credentials(uri: str) -> dict[str, Any]:
    access, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    if not access or not secret:
        raise WrongSettings(uri, "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    return {
        "aws_access_key_id": access,
        "aws_secret_access_key": secret,
        "aws_session_token": os.environ.get("AWS_SESSION_TOKEN") or None,
    }
