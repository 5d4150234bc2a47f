from __future__ import annotations

from pathlib import Path

from tests.cli.command import elastic_train


def test_prepare_then_inspect(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(5):
        (tmp_path / "text" / f"{number}.txt").write_text(f"The number {number} comes after {number - 1}.\n" * 40)
    arguments = ("data", "prepare", "--corpus", "text", "--out", "shards", "--vocab-size", "300")
    made = elastic_train(*arguments, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "shards: written" in made.stdout
    assert "documents:  5" in made.stdout
    again = elastic_train(*arguments, cwd=tmp_path)
    assert "shards: already there" in again.stdout
    seen = elastic_train("data", "inspect", "shards", "--sequence-length", "16", cwd=tmp_path)
    assert seen.returncode == 0
    assert "samples: " in seen.stdout
    assert seen.stdout.count("shard: ") == 1


def test_other_inputs_are_refused_unless_overwriting_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three\n" * 50)
    first = ("data", "prepare", "--corpus", "a.txt", "--out", "shards", "--vocab-size")
    assert elastic_train(*first, "260", cwd=tmp_path).returncode == 0
    refused = elastic_train(*first, "270", cwd=tmp_path)
    assert refused.returncode == 2
    assert "made from other inputs" in refused.stderr
    assert elastic_train(*first, "270", "--overwrite", cwd=tmp_path).returncode == 0
