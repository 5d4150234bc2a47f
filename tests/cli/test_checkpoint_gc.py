"""``elastic-train checkpoint gc``: what it shows, and that it removes that and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_train.checkpoint.catalog import list_checkpoints
from elastic_train.checkpoint.claims import take_claim
from elastic_train.checkpoint.manifest import CheckpointId, object_path
from elastic_train.checkpoint.pins import pin
from elastic_train.storage.store import Store
from tests.cli.checkpoints import commit_checkpoint, job_record
from tests.cli.test_checkpoint_commands import cells, run
from tests.config.job_files import GOOD


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Steps 5 to 8, 5 pinned, and an attempt of a dead save; ``job.json`` keeps two."""
    monkeypatch.chdir(tmp_path)
    store = Store.open("runs/job")
    job_record(store)
    for step in (5, 6, 7, 8):
        commit_checkpoint(store, step)
    pin(store, CheckpointId(5, 1), "for the paper")
    store.write(object_path(7, 0, 0), [b"half"])
    take_claim(store, 8, "node-b pid 7", 1.7e9)
    return store


def test_a_dry_run_shows_all_and_removes_nothing(store: Store) -> None:
    before = store.list()
    result = run("checkpoint", "gc", "job", "--dry-run", "--grace-seconds", "0")
    assert result.exit_code == 0, result.stderr
    rules, *table = result.stdout.splitlines()
    assert rules == ("rules (job.json): keep the newest 2, no others by step, none by metric; grace time 0 s")
    lines = cells("\n".join(table[1:5]))
    assert [(line[0], line[2], line[4]) for line in lines] == [
        ("5", "keep", "64"),
        ("6", "remove", "64"),
        ("7", "keep", "64"),
        ("8", "keep", "64"),
    ]
    assert (lines[0][3], lines[1][3], lines[2][3]) == ("pinned", "no rule keeps it", "newest")
    assert table[5:] == [
        "garbage: 1 object in checkpoints/step-00000007-g0, 4 B",
        "1 checkpoint to remove, 68 B in all to free",
    ]
    assert store.list() == before


def test_it_removes_what_it_has_shown_and_says_for_whom(store: Store) -> None:
    asked = run("checkpoint", "gc", "job")
    assert (asked.exit_code, "give --yes or --dry-run" in asked.stderr) == (2, True)
    assert list_checkpoints(store) == [5, 6, 7, 8]
    result = run("checkpoint", "gc", "job", "--yes", "--keep-last", "1")
    assert result.exit_code == 0, result.stderr
    assert "removing on behalf of claim 2, of node-b pid 7\n" in result.stdout
    assert result.stdout.endswith("removed 2 checkpoints, 4 objects\n")
    assert list_checkpoints(store) == [5, 8]
    assert store.exists(object_path(7, 0, 0)), "younger than the grace time"
    again = run("checkpoint", "gc", "job", "--yes")
    assert again.stdout.endswith("0 checkpoints to remove, 0 B in all to free\n")


def test_the_rules_of_a_job_file_go_before_those_of_the_first_submission(store: Store) -> None:
    Path("job.yaml").write_text(GOOD.replace("name: good", "name: job") + "checkpoint: {keep_last: 4}\n")
    plan = json.loads(run("checkpoint", "gc", "job.yaml", "--dry-run", "--json").stdout)
    assert (plan["rules"]["keep_last"], plan["nbytes"]) == (4, 0)
    store.delete("job.json")
    result = run("checkpoint", "gc", "job", "--dry-run")
    assert (result.exit_code, "has no job.json with rules; give the job file" in result.stderr) == (2, True)
    assert run("checkpoint", "gc", "job@5").exit_code == 2
