"""The description of an MLflow run: what happened to the job, as Markdown."""

from __future__ import annotations

import time
from typing import Any

EVENTS_KEPT = 100


class Story:
    """Collects generations and events; ``text`` renders them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._generations: dict[int, dict[str, Any]] = {}
        self._events: list[dict[str, Any]] = []

    def generation(self, message: dict[str, Any]) -> None:
        """A generation, or more about one that is known."""
        known = self._generations.setdefault(int(message["generation"]), {})
        known.update({key: value for key, value in message.items() if value is not None})

    def event(self, message: dict[str, Any]) -> None:
        """An event of the ledger."""
        self._events = [*self._events, message][-EVENTS_KEPT:]

    def text(self) -> str:
        """Markdown: a table of generations, then the last events."""
        lines = [f"### {self.name}", "", "| generation | from step | layout | hosts | cause | recovery, s |"]
        lines.append("|---|---|---|---|---|---|")
        for number, fields in sorted(self._generations.items()):
            hosts = fields.get("hosts")
            cells = [
                number,
                fields.get("step", ""),
                layout_text(fields.get("layout", "")),
                len(hosts) if isinstance(hosts, list) else hosts,
                fields.get("cause", ""),
                _seconds(fields.get("recovery_seconds")),
            ]
            lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
        if self._events:
            lines += ["", "Events:", ""]
            lines += [f"- {_event(message)}" for message in self._events]
        return "\n".join(lines)


def layout_text(layout: Any) -> str:
    """A layout given as text or as sizes of axes, e.g. ``pp2 x dp_shard2``."""
    if not isinstance(layout, dict):
        return str(layout)
    return " x ".join(f"{axis}{size}" for axis, size in layout.items() if size > 1) or "single"


def _seconds(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, (int, float)) else ""


def _cell(value: Any) -> str:
    return str("" if value is None else value).replace("|", "\\|").replace("\n", " ")


def _event(message: dict[str, Any]) -> str:
    fields = {
        key: value for key, value in message.items() if key not in ("type", "event", "time") and value is not None
    }
    stamp = time.strftime("%H:%M:%S", time.gmtime(message.get("time", 0)))
    details = ", ".join(f"{key} {_cell(value)}" for key, value in fields.items() if value != {})
    return f"{stamp} UTC **{str(message.get('event', '')).replace('_', ' ')}** {details}".rstrip()
