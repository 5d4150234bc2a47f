from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from elastic_train.cli.data_prepare import prepare_missing
from elastic_train.cli.main import app
from elastic_train.controller.local_cluster import LocalCluster
from elastic_train.data.corpus import open_corpus
from elastic_train.data.encode import read_shards
from elastic_train.data.prepare import prepare
from tests.cli.command import elastic_train
from tests.data import killed_prepare
from tests.data.data_sets import assert_whole, contents, decoded
from tests.jobs import make_job
from tests.ray_job import refill
from tests.small_memory import can_mount, make_read_only, mounted

TEXTS = [f"The number {number} comes after {number - 1}.\n" * (number % 5 + 1) for number in range(60)]


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """The texts in files of all kinds, some twice."""
    (tmp_path / "in").mkdir()
    for number, text in enumerate(TEXTS[:20]):
        (tmp_path / "in" / f"{number:02d}.txt").write_text(text)
    lines = "".join(json.dumps({"body": text}) + "\n" for text in TEXTS[15:40])
    (tmp_path / "in" / "30.jsonl").write_text(lines)
    (tmp_path / "in" / "31.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.table({"body": TEXTS[35:]}), tmp_path / "in" / "40.parquet", row_group_size=8)
    return tmp_path / "in"


@pytest.mark.slow
def test_all_kinds_of_input_and_a_tokenizer_from_elsewhere(inputs: Path, tmp_path: Path) -> None:
    words = ("data", "prepare", "--input", "in", "--column", "body")
    made = elastic_train(*words, "--output", "one", "--vocab-size", "300", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    manifest = assert_whole(tmp_path / "one")
    assert "documents:  60 (35 left out: 35 duplicate)" in made.stdout
    assert decoded(tmp_path / "one") == TEXTS
    for source in ("one", f"one/{manifest.tokenizer.path}"):
        again = elastic_train(*words, "--output", "two", "--tokenizer", source, cwd=tmp_path)
        assert again.returncode == 0, again.stderr
    assert "two: already there" in again.stdout
    assert assert_whole(tmp_path / "two").tokenizer.sha256 == manifest.tokenizer.sha256


@pytest.mark.slow
def test_conversations(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "One and one?"}, {"role": "assistant", "content": "Two."}]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    (tmp_path / "text.txt").write_text("One and one? Two.")
    text = ("data", "prepare", "--input", "text.txt", "--output", "text", "--vocab-size", "260")
    assert elastic_train(*text, cwd=tmp_path).returncode == 0
    words = ("data", "prepare", "--input", "talk.jsonl", "--output", "sft", "--format", "chat", "--tokenizer", "text")
    refused = elastic_train(*words, cwd=tmp_path)
    assert refused.returncode == 2 and "text has no chat template in tokenizer_config.json or" in refused.stderr
    made = elastic_train(*words, "--chat-template", "t.jinja", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "only the assistant's tokens count in the loss" in made.stdout
    assert decoded(tmp_path / "sft") == ["[user]One and one?[assistant]Two."]
    assert assert_whole(tmp_path / "sft").labelled


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--vocab-size", "300", "--tokenizer", "x"), "give --vocab-size or --tokenizer"),
        (("--eos-token", "x"), "--eos-token is for a tokenizer that is given; give --tokenizer as well"),
        (("--format", "chat"), "--format chat needs the tokenizer whose special tokens"),
        (("--chat-template", "x"), "--chat-template is for conversations; give --format chat"),
        (("--address", "127.0.0.1:1"), "--address is that of a Ray cluster; give --ray as well"),
        (("--ray", "--address", "127.0.0.1:1"), "no Ray cluster answers at 127.0.0.1:1"),
        (("--input", "nowhere"), "input 'nowhere' is not there; accepted are python-stdlib, "),
        (("--input", "bad.jsonl"), "bad.jsonl, line 2, column 10: 'text' is a number; accepted is one JSON object"),
        (("--input", "bad.jsonl", "--tokenizer", "odd.json"), "odd.json has no entry of <|endoftext|>, "),
    ],
)
def test_mistakes_are_sentences(
    tmp_path: Path, words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": 7}\n')
    (tmp_path / "odd.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}')
    refused = CliRunner().invoke(app, ["data", "prepare", "--output", "out", *words])
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: ") and message in refused.stderr, refused.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("output", ["a.txt", "a.txt/below/it"])
def test_an_output_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("one")
    Path("in").mkdir()
    Path("in/b.txt").write_text("two")
    refused = CliRunner().invoke(app, ["data", "prepare", "--input", "in", "--output", output])
    assert refused.exit_code == 2
    said = (
        f"error: the output {tmp_path}/{output} cannot be a folder: {tmp_path}/a.txt is a file; choose another name\n"
    )
    assert refused.stderr == said


def test_a_finished_data_set_is_found_where_nothing_can_be_written(tmp_path: Path) -> None:
    if not can_mount(tmp_path / "trial"):
        pytest.skip("may not mount file systems")
    words = ["data", "prepare", "--input", str(tmp_path / "in"), "--vocab-size", "300", "--output"]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("one two three")
    with mounted(tmp_path / "out", 10e6):
        out = str(tmp_path / "out" / "set")
        made = CliRunner().invoke(app, [*words, out])
        assert made.exit_code == 0 and "in 1 shard\n" in made.stdout, made.stderr
        (tmp_path / "out" / "set" / ".work" / "left").mkdir(parents=True)
        (tmp_path / "out" / "set" / ".work" / "left" / "scan-00000").write_text("of a run that was killed")
        make_read_only(tmp_path / "out")
        again = CliRunner().invoke(app, [*words, out])
        assert again.exit_code == 0 and f"{out}: already there" in again.stdout, again.stderr
        (tmp_path / "in" / "a.txt").write_text("one two three four")
        other = CliRunner().invoke(app, [*words, out])
        assert other.exit_code == 2 and "holds a data set made from other inputs" in other.stderr
        empty = CliRunner().invoke(app, [*words, str(tmp_path / "out" / "empty")])
        assert empty.exit_code != 0 and "Read-only file system" in empty.stderr


def test_folders_whose_names_are_not_utf_8(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/gr\xfc"))
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    words = ["data", "prepare", "--input", str(folder), "--output", f"{folder}-out", "--vocab-size", "300"]
    made = CliRunner().invoke(app, words)
    assert made.exit_code == 0 and "gr\\udcfc-out: written" in made.stdout


@pytest.mark.parametrize("there", [False, True])
def test_data_sets_that_are_missing_get_one_tokenizer(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """Those of a corpus that every machine has; here the library is small, and another one each time."""
    for name in "ab":
        (tmp_path / "library" / name).mkdir(parents=True)
        (tmp_path / "library" / name / "x.py").write_text(f"print({name * 9!r})\n")
    libraries = iter("ab")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "library" / next(libraries)))
    uris = [str(tmp_path / name / "python-stdlib") for name in "ab"]
    if there:
        uris.append(str(tmp_path / "own"))
        prepare(open_corpus(str(inputs), column="body"), uris[2], 280)
    sources = [{"name": f"s{number}", "uri": uri, "weight": 1} for number, uri in enumerate(uris)]
    prepare_missing(make_job(tmp_path, tmp_path, "job", "data.uri=null", f"data.sources={json.dumps(sources)}"))
    (_,) = {assert_whole(Path(uri)).tokenizer.sha256 for uri in uris}


@pytest.mark.slow
@pytest.mark.cluster
def test_a_cluster_gives_the_same_bytes_with_any_number_of_workers_and_without_some(
    inputs: Path, tmp_path: Path, ray_cluster: LocalCluster
) -> None:
    from elastic_train.controller.ray_prepare import cluster_runner
    from elastic_train.data.errors import DataError

    corpus = open_corpus(str(inputs), column="body")
    small = {"shard_tokens": 300, "batch_tokens": 64, "part_bytes": 1000}
    prepare(corpus, str(tmp_path / "alone"), 300, **small)
    expected = contents(tmp_path / "alone")
    refill(ray_cluster, nodes=1, cpus=1)
    with cluster_runner(ray_cluster.address) as run:
        for workers, more in ((1, 0), (2, 1), (4, 2)):
            if more:
                ray_cluster.add_nodes(1, more)
            prepare(corpus, str(tmp_path / f"{workers}"), 300, run=run, **small)
            assert contents(tmp_path / f"{workers}") == expected

        def lose_a_node(phase: str, done: int, total: int) -> None:
            if phase == "encode" and 0 < done < total and len(ray_cluster.nodes) == 4:
                ray_cluster.kill_node(ray_cluster.nodes[-1])

        prepare(corpus, str(tmp_path / "lost"), 300, run=run, progress=lose_a_node, **small)
        assert contents(tmp_path / "lost") == expected and len(ray_cluster.nodes) == 3
        (inputs / "30.jsonl").write_text('{"body": 3}\n')
        with pytest.raises(DataError, match=r"30.jsonl, line 1, column 10: 'body' is a number; accepted is"):
            prepare(open_corpus(str(inputs), column="body"), str(tmp_path / "bad"), 300, run=run, **small)


@pytest.mark.slow
@pytest.mark.cluster
def test_a_run_on_a_cluster_that_is_killed_is_gone_on_with(tmp_path: Path, ray_cluster: LocalCluster) -> None:
    """Killed while it encodes, with work in the hands of the cluster; what had been done is not done again."""
    lines = [json.dumps({"text": text * 40}) for text in TEXTS]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    assert killed_prepare.run(tmp_path / "in.jsonl", str(tmp_path / "alone")) is not None
    refill(ray_cluster, nodes=1, cpus=2)
    out = tmp_path / "out"
    assert killed_prepare.run(tmp_path / "in.jsonl", str(out), kill="encode", ray=ray_cluster.address) is None
    assert not (out / "manifest.json").exists()
    noted = [read_shards(note.read_bytes()) for note in out.glob(".work/*/encode-*")]
    before = {file: file.stat().st_ino for shards in noted for file in [out / shard.path for shard in shards]}
    last = killed_prepare.run(tmp_path / "in.jsonl", str(out), ray=ray_cluster.address)
    assert before and last is not None and last["read"] > 0 and last["encode"] > 0
    assert {file: file.stat().st_ino for file in before} == before
    assert contents(out) == contents(tmp_path / "alone")
