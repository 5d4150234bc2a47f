from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import warm


def report() -> None:
    print(os.environ.get("WARM_TEST"), os.getcwd(), "torch" in sys.modules, sys.argv[1:])
    sys.exit(int(input()))


def fail() -> None:
    raise ValueError("on purpose")


def wait_for_ever() -> None:
    print("here", flush=True)
    signal.pause()


def test_a_process_has_the_callers_environment_and_folder_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARM_TEST", "yes")
    monkeypatch.chdir(tmp_path)
    process, another = warm.start("tests.test_warm:report", "one"), warm.start("tests.test_warm:wait_for_ever")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0)
    process.stdin.write("7\n")
    process.stdin.close()
    assert process.wait(60) == process.poll() == process.returncode == 7
    process.kill()  # too late, and no error
    assert process.stdout.read() == f"yes {tmp_path} True ['one']\n"
    assert another.stdout.readline() == "here\n"
    open_files = sorted(int(name) for name in os.listdir(f"/proc/{another.pid}/fd"))
    assert open_files == [0, 1, 2]
    another.kill()
    assert another.wait(60) == -signal.SIGKILL
    assert not psutil.pid_exists(another.pid)


def test_an_error_is_told_and_is_an_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    assert warm.start("tests.test_warm:fail").wait(60) == 1
    assert "ValueError: on purpose" in capfd.readouterr().err
