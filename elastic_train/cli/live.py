"""Live progress of a job: a panel on a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic_train.controller.time_account import largest_causes

Status = Mapping[str, Any]
"""Keys, all optional: state, step, steps, loss, tokens_per_second, seconds, data_seconds, generation, layout, hosts,
host_count (when ``hosts`` does not list all), spares, last_events, time (the time account)."""

SPARKS = "▁▂▃▄▅▆▇█"
HISTORY = 60
EVENTS_SHOWN = 6
CAUSES_SHOWN = 4
"""Of what keeps hosts from useful work, the largest."""
LEAST_DATA_WAIT = 1.0
"""Percent of a step; less is not worth a word."""
LONGEST_VALUE = 80
NODE_ID = re.compile(r"[0-9a-f]{40,}")
"""Ray's node ids; eight digits tell them apart."""
TIERS = {"image": "own node", "remote": "other nodes", "object": "storage"}
"""What the kinds of sources of a restore are to people."""
PLAIN_SECONDS = 5.0
"""Without a terminal, a step line at most this often; events at once."""
STATE_STYLES = {
    "running": "green",
    "training": "green",
    "spare": "cyan",
    "starting": "yellow",
    "joining": "yellow",
    "full": "yellow",
    "leaving": "yellow",
    "lost": "red",
}


class LiveView:
    """Context manager; feed it with ``update`` from any thread."""

    def __init__(self, name: str, console: Console | None = None) -> None:
        self._name = name
        self._console = console or Console()
        self._live: Live | None = None
        self._lock = threading.Lock()
        self._losses: deque[float] = deque(maxlen=HISTORY)
        self._events: deque[str] = deque(maxlen=EVENTS_SHOWN)
        self._seen: set[str] = set()
        self._status: dict[str, Any] = {}
        self._printed: tuple[Any, ...] = ()
        self._printed_at = -math.inf
        self._last_line = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            # Not transient: the last state of the job stays on the screen after the end.
            self._live = Live(self._render(), console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(self._render())
            self._live.stop()
            self._live = None
        elif self._status and self._facts() != self._last_line:
            self._print_step()

    def update(self, status: Status) -> None:
        """Take in a newer status. Events already seen are not repeated."""
        with self._lock:
            step = status.get("step")
            if status.get("loss") is not None and step != self._status.get("step"):
                self._losses.append(float(status["loss"]))
            self._status.update(status)
            fresh = [line for line in map(event_line, status.get("last_events") or ()) if line not in self._seen]
            self._seen.update(fresh)
            self._events.extend(fresh)
            if self._live is not None:
                self._live.update(self._render())
                return
            for line in fresh:
                self._console.print(Text(line), soft_wrap=True)
            change = (status.get("state"), status.get("generation"), status.get("layout"))
            if change != self._printed or time.monotonic() - self._printed_at >= PLAIN_SECONDS:
                self._printed, self._printed_at = change, time.monotonic()
                self._print_step()

    def _print_step(self) -> None:
        self._last_line = self._facts()
        self._console.print(Text(self._last_line), soft_wrap=True)

    def _facts(self) -> str:
        return " | ".join(_facts(self._name, self._status))

    def _render(self) -> RenderableType:
        status = self._status
        title = Text.assemble((self._name, "bold"), "  ", str(status.get("state", "starting")))
        parts: list[RenderableType] = [self._progress(), self._curve()]
        if _has_time(status):
            parts.append(self._time())
        if status.get("hosts"):
            parts += [Text(), hosts_table(status["hosts"])]
            if (more := status.get("host_count", 0) - len(status["hosts"])) > 0:
                parts.append(Text(f"and {more} more hosts", style="dim"))
        if self._events:
            parts += [Text(), *(Text(line, style="dim", overflow="ellipsis", no_wrap=True) for line in self._events)]
        return Panel(Group(*parts), title=title, title_align="left", border_style="blue")

    def _progress(self) -> RenderableType:
        step, steps = self._status.get("step") or 0, self._status.get("steps") or 0
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(width=16)
        row.add_column(ratio=1)
        row.add_column(justify="right")
        bar = ProgressBar(total=steps or None, completed=step, pulse=not steps)
        rate = self._status.get("tokens_per_second")
        wait = f", {share:.0f} % data wait" if (share := _data_wait(self._status)) >= LEAST_DATA_WAIT else ""
        row.add_row(f"step {step}/{steps or '?'}", bar, f"{rate:,.0f} tokens/s{wait}" if rate else "")
        return row

    def _curve(self) -> RenderableType:
        loss = self._status.get("loss")
        generation, layout = self._status.get("generation"), self._status.get("layout")
        spares = self._status.get("spares") or 0
        count = spares if isinstance(spares, int) else len(spares)
        where = f"generation {generation}: {layout}" if generation else ""
        if count:
            where += f", {count} spare{'' if count == 1 else 's'}"
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(width=16)
        row.add_column(ratio=1, no_wrap=True)
        row.add_column(justify="right")
        row.add_row(
            f"loss {loss:.4f}" if loss is not None else "loss -", Text(sparkline(self._losses), "magenta"), where
        )
        return row

    def _time(self) -> RenderableType:
        account = self._status["time"]
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(width=16)
        row.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        row.add_column(justify="right")
        rest = Text(largest_causes(account, CAUSES_SHOWN), "dim")
        row.add_row(f"goodput {100 * account['goodput']:.1f} %", rest, f"{account['host_seconds']:,.0f} host-seconds")
        return row


def _data_wait(status: Status) -> float:
    """Percent of the last step in which it waited for its samples."""
    seconds = status.get("seconds")
    return 100 * (status.get("data_seconds") or 0.0) / seconds if seconds else 0.0


def _has_time(status: Status) -> bool:
    return bool((status.get("time") or {}).get("host_seconds"))


def time_line(account: Mapping[str, Any]) -> str:
    """A time account in a sentence, e.g. ``goodput 91.2 % of 140 host-seconds; start 5.0 %, detection 1.1 %``."""
    rest = largest_causes(account, CAUSES_SHOWN)
    text = f"goodput {100 * account['goodput']:.1f} % of {account['host_seconds']:,.0f} host-seconds"
    return f"{text}; {rest}" if rest else text


def sparkline(values: Iterable[float]) -> str:
    """One character per value, low to high; ``!`` for a value that is not finite."""
    series = list(values)
    finite = [value for value in series if math.isfinite(value)]
    if not finite:
        return "!" * len(series)
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    top = len(SPARKS) - 1
    return "".join(SPARKS[round((v - low) / span * top)] if math.isfinite(v) else "!" for v in series)


def hosts_table(hosts: Iterable[Mapping[str, Any]]) -> Table:
    """One row per host."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("host", "address", "node", "pid", "rank", "state"):
        table.add_column(column)
    for host in hosts:
        state = str(host.get("state", ""))
        cells = [
            _short(host.get(key)) if host.get(key) is not None else "-"
            for key in ("id", "address", "node", "pid", "rank")
        ]
        table.add_row(*cells, Text(state, STATE_STYLES.get(state.lower(), "")))
    return table


def event_line(event: str | Mapping[str, Any]) -> str:
    """A ledger event in one line: clock time, name, the rest as ``key=value``."""
    if isinstance(event, str):
        return event
    rest = dict(event)
    when = rest.pop("time", None)
    name = str(rest.pop("event", "event")).replace("_", " ")
    clock = time.strftime("%H:%M:%S ", time.localtime(when)) if isinstance(when, (int, float)) else ""
    if isinstance(rest.get("restored_bytes"), Mapping):
        served = rest.pop("restored_bytes")
        rest["restored"] = {TIERS.get(kind, kind): f"{nbytes / 1e6:,.1f} MB" for kind, nbytes in served.items()}
    told = {key: value for key, value in rest.items() if value is not None and value != {}}
    return f"{clock}{name}" + "".join(f"  {key}={_short(value)}" for key, value in told.items())


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, (list, tuple)):
        return ",".join(map(_short, value))
    if isinstance(value, Mapping):
        return ",".join(f"{key}:{_short(inner)}" for key, inner in value.items())
    text = " ".join(str(value).split())
    if NODE_ID.fullmatch(text):
        return text[:8]
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def _facts(name: str, status: Status) -> list[str]:
    facts = [name, str(status.get("state", "starting"))]
    if status.get("step") is not None:
        facts.append(f"step {status['step']}/{status.get('steps') or '?'}")
    if status.get("loss") is not None:
        facts.append(f"loss {status['loss']:.4f}")
    if status.get("tokens_per_second"):
        facts.append(f"{status['tokens_per_second']:,.0f} tokens/s")
    if (share := _data_wait(status)) >= LEAST_DATA_WAIT:
        facts.append(f"{share:.0f} % data wait")
    if _has_time(status):
        facts.append(f"goodput {100 * status['time']['goodput']:.1f} %")
    if status.get("generation"):
        facts.append(f"generation {status['generation']}: {status.get('layout')}")
    return facts


def status_lines(name: str, status: Status) -> list[str]:
    """A status as plain lines, for ``elastic-train status``."""
    lines = [" | ".join(_facts(name, status))]
    lines += [
        f"  host {host.get('id')} on {_short(host.get('node'))} pid {host.get('pid')}: {host.get('state')}"
        for host in status.get("hosts") or ()
    ]
    if _has_time(status):
        lines.append(f"  {time_line(status['time'])}")
    return lines + [f"  {event_line(event)}" for event in (status.get("last_events") or ())[-EVENTS_SHOWN:]]
