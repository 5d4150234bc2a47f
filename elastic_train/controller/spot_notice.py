"""The spot notice of AWS: the instance says over its metadata service (IMDSv2) when it will be taken away.

Two minutes before the end ``/latest/meta-data/spot/instance-action`` turns from 404 into
``{"action": "terminate", "time": "2026-09-18T08:22:00Z"}``.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime

logger = logging.getLogger(__name__)

AWS_ENDPOINT = "http://169.254.169.254"
_TOKEN_PATH = "/latest/api/token"
_ACTION_PATH = "/latest/meta-data/spot/instance-action"
_TOKEN_SECONDS = 21600
"""The longest that the service grants."""
_TIMEOUT_SECONDS = 1.0
_POLL_SECONDS = 5.0
"""AWS asks for no more; the notice comes 120 s before the end."""
_ANSWER_BYTES = 4096
_ACTIONS = ("terminate", "stop", "hibernate")

Tell = Callable[[float, str], None]
"""Told the seconds until the end, and the reason."""


class NoAnswer(Exception):
    """The service cannot be asked, or answers what it should not; one sentence."""


class SpotNotice:
    """Asks one instance's metadata service.

    Args:
        endpoint: ``http://`` and address of the service.
        clock: seconds since the epoch.
    """

    def __init__(self, endpoint: str, clock: Callable[[], float] = time.time) -> None:
        self._endpoint, self._clock = endpoint.rstrip("/"), clock
        self._token = ""
        # The service is on the machine's own link: a proxy of the environment would answer for another machine.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._told = ""
        self._complained = False

    def ask(self) -> tuple[float, str] | None:
        """Seconds until the end (negative: it is past) and the action's name; None: no notice.

        Raises:
            NoAnswer: also for a notice that cannot be understood.
        """
        for fresh in (not self._token, True):
            if fresh:
                self._token = self._get_token()
            status, body = self._request("GET", _ACTION_PATH, {"X-aws-ec2-metadata-token": self._token})
            if status != 401:
                break  # else the token has run out
        if status == 404:
            return None
        if status != 200:
            raise NoAnswer(f"GET {_ACTION_PATH} is answered with status {status}")
        action, end = _read(body)
        return end - self._clock(), action

    def _get_token(self) -> str:
        status, body = self._request("PUT", _TOKEN_PATH, {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)})
        token = body.decode("ascii", errors="replace").strip()
        if status != 200 or not token.isprintable() or not token.isascii() or not token:
            raise NoAnswer(f"PUT {_TOKEN_PATH} is answered with status {status} and {body[:40]!r}, which is no token")
        return token

    def _request(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        request = urllib.request.Request(self._endpoint + path, method=method, headers=headers)
        try:
            with self._opener.open(request, timeout=_TIMEOUT_SECONDS) as answer:
                return answer.status, answer.read(_ANSWER_BYTES)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code, b""
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(f"{method} {self._endpoint}{path} gets no answer: {error}") from error

    async def watch(self, tell: Tell, pause: float = _POLL_SECONDS) -> None:
        """Ask every ``pause`` seconds, for ever; ``tell`` of each notice once. What goes wrong is logged once."""
        while True:
            try:
                notice = await asyncio.to_thread(self.ask)
            except NoAnswer as error:
                notice = None
                if not self._complained:
                    logger.warning("no spot notices for now: %s", error)
                self._complained = True
            else:
                self._complained = False
            if notice is not None:
                self._tell_once(*notice, tell)
            await asyncio.sleep(pause)

    def _tell_once(self, seconds: float, action: str, tell: Tell) -> None:
        end = datetime.fromtimestamp(round(self._clock() + seconds), UTC)
        reason = f"spot notice: {action} at {end:%Y-%m-%dT%H:%M:%SZ}"
        if reason != self._told:
            self._told = reason
            tell(max(0.0, seconds), reason)


def _read(body: bytes) -> tuple[str, float]:
    """Action and time (seconds since the epoch) of a notice."""
    try:
        notice = json.loads(body)
        action, end = notice["action"], datetime.fromisoformat(notice["time"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise NoAnswer(f"a notice is not understood: {body[:80]!r} ({type(error).__name__})") from error
    if action not in _ACTIONS:
        raise NoAnswer(f"a notice has action={action!r}, which is none of {', '.join(_ACTIONS)}")
    return action, end.replace(tzinfo=end.tzinfo or UTC).timestamp()
