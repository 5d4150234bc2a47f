"""What a job whose hosts come and go was trained on: proved by the command, which also finds what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import elastic_train
from tests.jobs import assert_same_curve, make_job
from tests.local_job import LocalJob

pytestmark = pytest.mark.slow

Lines = list[dict[str, Any]]


def without_step_12(lines: Lines) -> Lines:
    return lines[:11] + lines[12:]


def with_a_sample_twice(lines: Lines) -> Lines:
    lines[11]["samples"][3] = lines[10]["samples"][0]
    return lines


def with_anothers_bytes(lines: Lines) -> Lines:
    lines[11]["batch"] = lines[10]["batch"]
    return lines


def with_a_slot_twice(lines: Lines) -> Lines:
    lines[11]["slots"] = [[0, 3], [2, 8]]
    return lines


FAULTS: list[tuple[Callable[[Lines], Lines], str]] = [
    (without_step_12, "gap: step 12 is missing"),
    (with_a_sample_twice, "was used 2 times"),
    (with_anothers_bytes, "differs: step 12: trained on other bytes"),
    (with_a_slot_twice, "repeat: step 12: slot 2 was computed 2 times"),
]


def test_hosts_come_and_go_and_every_sample_is_used_once(corpus: Path, reference: Lines, tmp_path: Path) -> None:
    """Three data ranks for eight slots, then two, then three again, then one."""
    job = make_job(corpus, tmp_path, "audited", "parallel.pp=1", "hosts.max=3", "hosts.settle_seconds=0")
    with LocalJob(job) as run:
        run.start_hosts("abc")
        run.wait_step(4)
        run.kill_host("c2")
        run.wait(lambda status: status["step"] >= 8 and status["layout"] == "dp_shard2")
        run.pause_trainer()  # else the job may be over before the newcomer is there
        run.start_host("d", "d")
        run.wait(lambda status: status["spares"] == 1)
        run.resume_trainer()
        run.wait(lambda status: status["layout"] == "dp_shard3" and status["state"] == "running")
        run.kill_host("a0")
        run.kill_host("b1")
        assert run.finish()["state"] == "finished"
    assert_same_curve(run.lines("steps"), reference)  # digests included, of one data rank there
    folder = tmp_path / "audited"
    sound = elastic_train("data", "audit", "--job", str(folder), cwd=tmp_path)
    assert sound.returncode == 0, sound.stdout + sound.stderr
    assert "audited: 30 steps, 240 samples; the bytes of 30 compared" in sound.stdout
    assert "no gap, no repeat: every step was trained on its own samples" in sound.stdout
    by_log = elastic_train("data", "audit", "--job", str(folder), "--no-bytes", cwd=tmp_path)
    assert "only a comparison of bytes proves it" in by_log.stdout
    written = (folder / "steps.jsonl").read_text()
    for change, sentence in FAULTS:
        lines = change([json.loads(line) for line in written.splitlines()])
        (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        found = elastic_train("data", "audit", "--job", str(folder), cwd=tmp_path)
        assert found.returncode == 1, found.stdout + found.stderr
        assert sentence in found.stdout
        assert "no gap" not in found.stdout
    (folder / "steps.jsonl").write_text("".join(written.splitlines(keepends=True)[:-2]))
    short = elastic_train("data", "audit", "--job", str(folder), cwd=tmp_path)
    assert (short.returncode, "gap: steps 29 to 30 are missing" in short.stdout) == (1, True), short.stdout
    record = json.loads((folder / "job.json").read_text())
    record["identity"]["data_digest"] = "0" * 64
    (folder / "job.json").write_text(json.dumps(record))
    other = elastic_train("data", "audit", "--job", str(folder), cwd=tmp_path)
    assert (other.returncode, "was trained on data of digest 0000000000000000" in other.stderr) == (2, True)
    (folder / "job.json").write_text("{}")
    assert (
        "job.json is not the record of a job"
        in elastic_train("data", "audit", "--job", str(folder), cwd=tmp_path).stderr
    )
