"""What ``elastic-train chaos`` says before anything is broken; ``test_saboteur.py`` breaks things."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.cli.chaos import Story
from elastic_train.cli.durations import parse_duration
from tests.cli.command import elastic_train


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30.0), ("30s", 30.0), ("1.5h", 5400.0), ("10m", 600.0), ("2d", 172800.0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["hang", "job", "--every", "2z"], "'2z' is no duration; write 30s, 10m or 1.5h"),
        (["hang", "job", "--every", "0s"], "'0s' is no duration"),
        (
            ["hang", "job", "--every", "20s", "--for", "10s"],
            "--every 20s is longer than --for 10s: nothing would happen",
        ),
        (["hang", "job", "--address", "127.0.0.1:1"], "no Ray cluster"),
        (
            ["llama3", "job", "--speed", "1", "--for", "1s"],
            "--speed 1 and --for 1s: the first failure would come later",
        ),
        (["explode", "job"], "No such command 'explode'"),
        (["replay", "job"], "Missing option '--trace'"),
        (["replay", "job", "--trace", "none.jsonl"], "none.jsonl cannot be read"),
        (["replay", "job", "--trace", "named.jsonl"], "named.jsonl: node and away are of a real cluster, for simulate"),
        (["replay", "job", "--trace", "bad.jsonl"], "bad.jsonl, line 2: kind='explode' is none of kill-trainer, "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_a_sentence_and_breaks_nothing(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    (tmp_path / "bad.jsonl").write_text('{"at": 1, "kind": "hang"}\n{"at": 2, "kind": "explode"}\n')
    (tmp_path / "named.jsonl").write_text('{"at": 1, "kind": "hang", "node": "gpu-17"}\n')
    done = elastic_train("chaos", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert sentence in " ".join(done.stderr.replace("│", " ").split())


def test_the_story_counts_what_was_done_and_how_long_it_took() -> None:
    story = Story()
    fault = {"told": "fault", "at": 11.1, "kind": "hang", "victim": "rank 0, host 1 on node a", "step": 7}
    assert story.line(fault) == "   11.1 s  hang: rank 0, host 1 on node a, at step 7"
    missed = {"told": "missed", "at": 12.0, "kind": "drain", "victim": "", "step": 7, "reason": "there was no victim"}
    assert story.line(missed) == "   12.0 s  drain: not done; there was no victim"
    for seconds in (0.5, 3.0, 1.0):
        told = {"told": "recovered", "cause": "hang", "detail": "no news", "layout": "dp_shard2", "step": 7}
        assert "back in" in story.line(told | {"seconds": seconds})
    assert story.line({"told": "ended", "state": "failed", "step": 9}) == "the job has ended: failed at step 9"
    gone = story.line({"told": "ended", "state": "gone", "step": 9})
    assert gone == "the coordinator is gone; the last that was heard of it is step 9"
    assert story.summary() == "1 faults, 3 generations formed, median 1.00 s, slowest 3.00 s"
