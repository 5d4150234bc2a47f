"""What an older release has left is gone on with; what a later one has left is refused by name, and left alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_train import __version__
from elastic_train.checkpoint.catalog import list_checkpoints, load_manifest, read_catalog
from elastic_train.checkpoint.hf_source import kept_source
from elastic_train.checkpoint.manifest import CheckpointId
from elastic_train.checkpoint.pins import pin_reason, pinned
from elastic_train.checkpoint.sealed import seal, unseal
from elastic_train.checkpoint.verify import verify_checkpoint
from elastic_train.controller.job_folder import JobFolder, job_store
from elastic_train.controller.resumption import open_data, take_over
from elastic_train.data.errors import DataError
from elastic_train.storage.errors import FutureFormat
from elastic_train.storage.json_lines import read_json_lines
from tests.cli.command import elastic_train
from tests.jobs import assert_same_curve
from tests.local_job import LocalJob
from tests.upgrades.write_release import old_job


def version(release: Path) -> list[int]:
    return [int(number) for number in release.name.split("_")[1:]]


RELEASES = sorted(Path(__file__).parent.glob("release_*"), key=version)
NEWEST = RELEASES[-1]
CLAIM, MANIFEST = "checkpoints/claim-00000001.json", "checkpoints/step-00000006-c1.json"


def copied(release: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(release, tmp_path / release.name))


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_a_job_of_an_older_release_goes_on(release: Path, tmp_path: Path) -> None:
    """On another number of hosts: the same curve as without a break, and every older line and checkpoint stays."""
    folder = copied(release, tmp_path)
    job = old_job(folder, "hosts.max=1")
    store = job_store(job)
    for step in (3, 6):
        assert verify_checkpoint(store, load_manifest(store, step)) == []
    before = {name: read_json_lines(store, name) for name in ("journal.jsonl", "ledger.jsonl", "steps.jsonl")}
    with LocalJob(job, run_id="newer") as run:
        run.start_hosts("a")
        assert run.finish()["state"] == "finished"
    assert [event["step"] for event in run.told("resumed")] == [6]
    reference = [json.loads(line) for line in (folder / "reference.jsonl").read_text().splitlines()]
    assert_same_curve(run.lines("steps"), reference)
    for name, lines in before.items():
        after = read_json_lines(store, name)
        assert after[: len(lines)] == lines
        assert after[len(lines)]["format_version"] == 1
    assert list_checkpoints(store) == [3, 6, 9]
    assert pinned(read_catalog(store).entries) == {CheckpointId(3, 1)}
    assert pin_reason(store, CheckpointId(3, 1)) == "kept for tests"


def of_json(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 99}))


def of_last_line(path: Path) -> None:
    *lines, last = path.read_text().splitlines()
    path.write_text("\n".join([*lines, json.dumps(json.loads(last) | {"format_version": 99})]) + "\n")


def of_sealed(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        record: dict[str, Any] = json.loads(unseal(name, path.read_bytes()))
        path.write_bytes(seal(name, json.dumps(record | {"format_version": 99, "new": 1}).encode()))

    return change


@pytest.mark.parametrize(
    ("path", "change", "reads"),
    [
        ("job.json", of_json, "format 1"),
        ("journal.jsonl", of_last_line, "format 1"),
        ("ledger.jsonl", of_last_line, "format 1"),
        ("steps.jsonl", of_last_line, "format 1"),
        (CLAIM, of_sealed("claim"), "format 1"),
        (MANIFEST, of_sealed("manifest"), "formats 1 to 2"),
    ],
)
def test_a_file_of_a_later_release_is_refused_and_left_alone(
    path: str, change: Callable[[Path], None], reads: str, tmp_path: Path
) -> None:
    job = old_job(copied(NEWEST, tmp_path))
    file = Path(job.storage.uri) / job.name / path
    change(file)
    content = file.read_bytes()
    with pytest.raises(FutureFormat) as refused:
        JobFolder(job).open(open_data(job).digest)
        take_over(job_store(job), "test", 1.0)
    sentence = str(refused.value)
    assert path in sentence
    assert f"is of format 99, and this release of elastic_train ({__version__}) reads {reads}; use" in sentence
    assert file.read_bytes() == content
    with pytest.raises(FutureFormat), LocalJob(job):
        pass


def test_data_of_a_later_release_are_refused(tmp_path: Path) -> None:
    folder = copied(NEWEST, tmp_path)
    manifest = folder / "data" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format_version": 3', '"format_version": 4'))
    with pytest.raises(DataError, match=r"manifest\.json is of format 4, and this release .* reads formats 1 to 3; "):
        open_data(old_job(folder))


def test_other_records_of_a_later_release(tmp_path: Path) -> None:
    job = old_job(copied(NEWEST, tmp_path))
    store, pin = job_store(job), CheckpointId(3, 1)
    store.write("checkpoints/pins/step-00000003-c1.json", [b'{"format_version": 2, "because": []}'])
    assert (pin_reason(store, pin) or "").startswith("(the pin is of format 2, and this release")
    assert pin in pinned(read_catalog(store).entries)
    store.write("hf/source.json", [b'{"format_version": 2}'])
    with pytest.raises(FutureFormat, match=r"hf/source\.json: is of format 2"):
        kept_source(store)


@pytest.mark.parametrize(
    "words",
    [
        ("data", "audit", "--job"),
        ("export-hf",),
        ("checkpoint", "gc"),
        ("checkpoint", "ls"),
        ("status",),
    ],
)
def test_the_command_line_says_so_too(words: tuple[str, ...], tmp_path: Path) -> None:
    """Each reads another file first; all of them are of a later release."""
    folder = copied(NEWEST, tmp_path)
    job_folder = folder / "jobs" / "old"
    of_json(job_folder / "job.json")
    of_sealed("manifest")(job_folder / MANIFEST)
    for name in ("journal", "ledger", "steps"):
        of_last_line(job_folder / f"{name}.jsonl")
    result = elastic_train(*words, str(job_folder), cwd=tmp_path, RAY_ADDRESS="127.0.0.1:9")
    assert result.returncode == 2, result.stdout + result.stderr
    (sentence,) = result.stderr.splitlines()
    assert f"is of format 99, and this release of elastic_train ({__version__}) reads format" in sentence
