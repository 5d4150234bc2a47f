from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.console import Console

from elastic_train.cli.live import LiveView, event_line, sparkline, status_lines, time_line


def status(step: int, **fields: Any) -> dict[str, Any]:
    return {
        "state": "running",
        "step": step,
        "steps": 20,
        "loss": 5.0 - step / 10,
        "tokens_per_second": 1234.5,
        "generation": 1,
        "layout": "pp2 x dp_shard2",
        "hosts": [
            {"id": 0, "node": "a1", "pid": 11, "state": "training"},
            {"id": 1, "node": "b2", "pid": 12, "state": "spare"},
        ],
        "spares": 1,
        "last_events": [{"time": 0.0, "event": "host_joined", "host": 0}],
        **fields,
    }


def screen(terminal: bool, *statuses: dict[str, Any]) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, height=40, color_system=None)
    with LiveView("job", console) as view:
        for each in statuses:
            view.update(each)
    return out.getvalue()


def test_a_terminal_shows_everything() -> None:
    text = screen(True, {"state": "starting"}, status(1), status(2))
    for part in (
        "job  running",
        "step 2/20",
        "loss 4.8000",
        "1,234 tokens/s",
        "generation 1: pp2 x dp_shard2, 1 spare",
    ):
        assert part in text
    for part in ("a1", "b2", "training", "spare", "host joined  host=0", "━"):
        assert part in text
    assert "█▁" in text  # the loss of two steps, falling


def test_hosts_that_are_not_listed_are_counted() -> None:
    assert "and 9998 more hosts" in screen(True, status(1, host_count=10000))
    assert "more hosts" not in screen(True, status(1, host_count=2))


def test_plain_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_train.cli.live.PLAIN_SECONDS", math.inf)
    lost = {"time": 0.0, "event": "host_lost", "host": 1, "pid": None}
    change = status(4, generation=2, layout="pp2", last_events=[status(1)["last_events"][0], lost])
    lines = screen(False, status(1), status(2), status(3), change, status(5, generation=2, layout="pp2")).splitlines()
    assert [line for line in lines if "host joined" in line] == lines[:1]
    assert sum("host lost  host=1" in line for line in lines) == 1
    steps = [line for line in lines if "| step " in line]
    assert steps[0] == "job | running | step 1/20 | loss 4.9000 | 1,234 tokens/s | generation 1: pp2 x dp_shard2"
    assert "step 4/20" in steps[1], "a change of generation is printed at once, steps in between are not"
    assert "step 5/20" in steps[-1], "the last state is always printed"


ACCOUNT = {
    "goodput": 0.912,
    "host_seconds": 1200.0,
    "seconds": {"useful": 1094.4, "start": 60.0, "detection": 30.0, "form": 9.6, "restore": 5.7, "data_wait": 0.3},
}


def test_goodput_and_what_keeps_from_it() -> None:
    text = screen(True, status(1, time=ACCOUNT))
    assert "goodput 91.2 %" in text
    assert "start 5.0 %, detection 2.5 %, form 0.8 %, restore 0.5 %" in text
    assert "1,200 host-seconds" in text
    assert "| goodput 91.2 % |" in screen(False, status(1, time=ACCOUNT))
    line = "goodput 91.2 % of 1,200 host-seconds; start 5.0 %, detection 2.5 %, form 0.8 %, restore 0.5 %"
    assert f"  {line}" in status_lines("job", status(3, time=ACCOUNT))
    assert time_line({"goodput": 1.0, "host_seconds": 3.0, "seconds": {"useful": 3.0}}) == (
        "goodput 100.0 % of 3 host-seconds"
    )
    nobody = {"goodput": 0.0, "host_seconds": 0.0, "seconds": {}}
    assert "goodput" not in screen(True, status(0, time=nobody))


def test_a_status_with_nothing_in_it_is_drawn() -> None:
    empty = {"state": "starting", "step": 0, "steps": 20, "loss": None, "generation": 0, "layout": "", "hosts": []}
    assert "starting" in screen(True, empty)
    assert "starting" in screen(False, empty)


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0]) == "▁"
    assert sparkline([0.0, 7.0, 3.5, math.nan, 1.0]) == "▁█▅!▂"
    assert sparkline([math.nan, math.inf]) == "!!"


def test_event_line() -> None:
    event = {"time": 0.0, "event": "generation_formed", "layout": "pp2", "form_seconds": 0.51234, "cause": None}
    assert event_line(event).endswith("generation formed  layout=pp2  form_seconds=0.512")
    assert event_line("as it is") == "as it is"
    restored = {"event": "generation_formed", "restored_bytes": {"image": 21_040_000, "object": 3_000}}
    assert event_line(restored) == "generation formed  restored=own node:21.0 MB,storage:0.0 MB"
    joined = {"event": "host_joined", "node": "0123456789" * 5, "phases": {"build": 0.25, "load": 1}, "bytes": {}}
    assert event_line(joined) == "host joined  node=01234567  phases=build:0.25,load:1"


def test_status_lines() -> None:
    lines = status_lines("job", status(3))
    assert lines[0].startswith("job | running | step 3/20")
    assert "  host 0 on a1 pid 11: training" in lines
    assert any("host joined" in line for line in lines)
