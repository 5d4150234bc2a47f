"""Progress bars: of the real command, on a real (pseudo) terminal and on a pipe."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_train.checkpoint.manifest import object_path
from elastic_train.storage.store import Store
from tests.cli.checkpoints import commit_checkpoint, job_record
from tests.cli.command import ROOT, elastic_train

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


def test_on_a_pipe_there_is_none_of_it(store: Store, tmp_path: Path) -> None:
    result = elastic_train("checkpoint", "verify", "./job@10", cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "step 10: whole: 64 B in 2 objects\n", "")
