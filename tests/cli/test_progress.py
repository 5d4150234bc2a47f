"""Progress bars: of the real command, on a real (pseudo) terminal and on a pipe."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_train.checkpoint.manifest import object_path
from elastic_train.data.sources import open_training
from elastic_train.storage.store import Store
from tests.cli.checkpoints import commit_checkpoint, job_record
from tests.cli.command import ROOT, elastic_train
from tests.jobs import make_corpus, make_job

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HIDE_CURSOR, SHOW_CURSOR, ERASE_LINE = "\x1b[?25l", "\x1b[?25h", "\x1b[2K"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.open(str(tmp_path / "job"))
    job_record(store)
    commit_checkpoint(store, 10)
    return store


def on_a_terminal(cwd: Path, *arguments: str) -> tuple[int, str, str]:
    """Runs ``elastic-train`` with stderr on a terminal; returns its exit code, its stdout and what the terminal got."""
    terminal, stderr = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "TERM": "xterm"}
    command = [sys.executable, "-m", "elastic_train.cli.main", *arguments]
    with subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True) as run:
        os.close(stderr)
        seen = b""
        try:
            while block := os.read(terminal, 65536):
                seen += block
        except OSError:  # how Linux says that the other end is closed
            pass
        finally:
            os.close(terminal)
        assert run.stdout is not None
        stdout = run.stdout.read()
    return run.returncode, stdout, seen.decode()


def test_on_a_terminal_verify_shows_a_bar_with_bytes_and_takes_it_away(store: Store, tmp_path: Path) -> None:
    code, stdout, seen = on_a_terminal(tmp_path, "checkpoint", "verify", "./job@10")
    assert (code, stdout) == (0, "step 10: whole: 64 B in 2 objects\n")
    shown = ESCAPE.sub("", seen)
    assert "step 10" in shown
    assert "━" in shown
    assert "64/64 bytes" in shown
    assert "Traceback" not in shown
    assert seen.count(HIDE_CURSOR) == seen.count(SHOW_CURSOR) == 1
    assert seen.index(HIDE_CURSOR) < seen.index(SHOW_CURSOR)
    after = seen[seen.index("64/64 bytes") :]
    assert ERASE_LINE in after
    assert ESCAPE.sub("", after[after.rindex(ERASE_LINE) :]).strip() == ""


def test_damage_is_named_below_the_bar(store: Store, tmp_path: Path) -> None:
    path = object_path(10, 1, 1)
    store.write(path, [b"\0" * 32])
    code, stdout, seen = on_a_terminal(tmp_path, "checkpoint", "verify", "./job@10")
    assert (code, stdout) == (1, "step 10: DAMAGED: 1 place in 1 of 2 objects\n")
    last = seen[seen.rindex(ERASE_LINE) + len(ERASE_LINE) :]
    assert last.startswith("step 10: damaged: ")
    assert path in last


@pytest.mark.slow
def test_prepare_shows_bytes_per_second_and_time_left_and_only_on_a_terminal(tmp_path: Path) -> None:
    """Files in rising number, so that there is something left to do when the first of them are done."""
    texts = [f"{number} " * 20_000 for number in range(40)]
    (tmp_path / "in").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "in" / f"{number:02}.txt").write_text(text)
    words = ("data", "prepare", "--input", "in", "--vocab-size", "300", "--output")
    code, stdout, seen = on_a_terminal(tmp_path, *words, "one")
    assert code == 0
    whole = sum(len(text) for text in texts) / 1e6
    for phase in ("read", "encode"):
        bars = [line for line in re.split(r"[\r\n]+", ESCAPE.sub("", seen)) if line.startswith(phase)]
        assert any(re.search(r"[\d.]+ [kM]B/s +\d+:\d\d:\d\d", bar) for bar in bars), bars
        assert f"{whole:.1f}/{whole:.1f} MB" in bars[-1]
    piped = elastic_train(*words, "two", cwd=tmp_path)
    assert (piped.returncode, piped.stderr) == (0, "")
    assert piped.stdout == stdout.replace("one: written", "two: written")
    assert "B/s" not in stdout and "\x1b" not in stdout


def test_the_audit_counts_steps(tmp_path: Path) -> None:
    job = make_job(make_corpus(tmp_path), tmp_path, "counted")
    store = Store.open(str(tmp_path / "counted"))
    identity = {"model": {}, "data_digest": open_training(job).digest}
    record = {"format_version": 1, "config": job.model_dump(mode="json"), "identity": identity}
    store.write("job.json", [json.dumps(record).encode()])
    store.write("steps.jsonl", [b'{"step": 1}\n{"step": 2}\n'])
    code, stdout, seen = on_a_terminal(tmp_path, "data", "audit", "--job", "./counted")
    assert (code, "counted: 2 steps, " in stdout) == (0, True), stdout + seen
    assert "2/2 steps" in ESCAPE.sub("", seen)
    assert "bytes" not in seen


def test_on_a_pipe_there_is_none_of_it(store: Store, tmp_path: Path) -> None:
    result = elastic_train("checkpoint", "verify", "./job@10", cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "step 10: whole: 64 B in 2 objects\n", "")
