"""Keeps passwords of tracking URIs out of everything that is printed."""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from urllib.parse import unquote, urlsplit, urlunsplit

_USER_INFO = re.compile(r"(?<=://)[^/\s@]*(?:@[^/\s@]*)*@")


def redact(text: str) -> str:
    """``text`` with ``user:password@`` in URIs replaced by ``***@``."""
    return _USER_INFO.sub("***@", text)


def strip_http_credentials(uri: str, environment: MutableMapping[str, str]) -> str:
    """An http(s) URI without its user and password, which go to the variables where MLflow looks for them."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or parts.username is None:
        return uri
    environment["MLFLOW_TRACKING_USERNAME"] = unquote(parts.username)
    environment["MLFLOW_TRACKING_PASSWORD"] = unquote(parts.password or "")
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
