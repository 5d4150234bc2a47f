"""The verbs of ``elastic-train checkpoint``, in this process: a command of its own takes a second each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from elastic_train.checkpoint.manifest import CheckpointId, object_path
from elastic_train.cli import checkpoints
from elastic_train.cli import folder as cli_folder
from elastic_train.cli.main import app
from elastic_train.storage.store import Store
from tests.cli.checkpoints import commit_checkpoint, job_record
from tests.cli.command import elastic_train
from tests.config.job_files import GOOD


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def cells(output: str) -> list[list[str]]:
    """A table without a terminal: cells by line, the header first."""
    return [line.split("\t") for line in output.splitlines()]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The folder ``runs/job``, with steps 999 and 1000; commands run beside ``runs``."""
    monkeypatch.chdir(tmp_path)
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    store = Store.open("runs/job")
    job_record(store)
    commit_checkpoint(store, 999, metrics={"loss": 2.5})
    commit_checkpoint(store, 1000, metrics={"loss": 2.25, "eval_loss": 3.5})
    return store


# -- naming a checkpoint ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "job", ["job", "runs/job", "./runs/job/", "file://{here}/runs/job", "{here}/runs/job", "job.yaml"]
)
@pytest.mark.parametrize(("step", "shown"), [("", 1000), ("@999", 999)])
def test_a_checkpoint_is_named_by_job_file_or_folder_and_step(
    store: Store, tmp_path: Path, job: str, step: str, shown: int
) -> None:
    Path("job.yaml").write_text(GOOD.replace("name: good", "name: job"))
    result = run("checkpoint", "show", job.format(here=tmp_path) + step, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["step"] == shown


def test_a_folder_with_odd_characters(store: Store, tmp_path: Path) -> None:
    other = Store.open(str(tmp_path / "a b+c%20@d" / "job"))
    job_record(other)
    commit_checkpoint(other, 7)
    for uri in ("a b+c%20@d/job", f"file://{tmp_path}/a%20b+c%2520@d/job@7"):
        assert json.loads(run("checkpoint", "show", uri, "--json").stdout)["uri"] == other.uri


WRONG = [
    ("nobody", "no job folder runs/nobody; give --storage, the job file, or the URI of the folder itself"),
    ("nobody", "job folders there: job"),
    ("runs/nobody@3", "no job folder {here}/runs/nobody"),
    ("runs", "no job folder runs/runs"),
    ("./runs", "no job folder {here}/runs"),
    ("job@5", "step 5 has no committed checkpoint"),
    ("job@5", "committed steps: 999, 1000"),
    ("job@newest", "'job@newest': @ is followed by a step, e.g. job@1000; without it: the newest"),
    ("job@", "'job@': @ is followed by a step"),
    ("@5", "'@5': @ is followed by a step, e.g. JOB@1000"),
    ("job@-1", "'job@-1': @ is followed by a step"),
    ("gs://bucket/job", "unknown scheme 'gs'; accepted are a local path, file:// and s3://bucket/prefix"),
    ("file://elsewhere/job", "file URI names the host 'elsewhere'"),
    ("s3://bucket/job", "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    ("absent.yaml", "absent.yaml: no such file"),
]


@pytest.mark.parametrize(("reference", "sentence"), WRONG)
def test_a_wrong_name_is_one_sentence(store: Store, tmp_path: Path, reference: str, sentence: str) -> None:
    endpoint = ("--endpoint-url", "http://127.0.0.1:9") if reference.startswith("s3://") else ()
    result = run("checkpoint", "show", reference, *endpoint)
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence.format(here=tmp_path) in result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("verb", ["verify", "pin --reason x", "unpin", "copy ./t", "diff job", "export-hf"])
def test_all_verbs_take_names_in_the_same_way(store: Store, verb: str) -> None:
    name, *more = verb.split()
    result = run("checkpoint", name, "job@5", *more)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: step 5 has no committed checkpoint")


def test_options_that_contradict_the_name(store: Store) -> None:
    result = run("checkpoint", "ls", "runs/job", "--storage", "elsewhere")
    assert result.exit_code == 2
    assert "--storage=elsewhere is for a job given by name; runs/job says itself where its folder is" in result.stderr
    for verb in ("ls", "verify"):
        result = run("checkpoint", verb, "job@999", *(["--all"] if verb == "verify" else []))
        assert (result.exit_code, "leave @999 out" in result.stderr) == (2, True)


def test_an_endpoint_that_is_away_is_reported_soon(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_folder, "FIRST_ANSWER_SECONDS", 0.1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an access key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret key")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    for words in (["ls", "s3://bucket/my jobs/a+b"], ["copy", "job", "s3://bucket/my jobs/a+b/job"]):
        result = run("checkpoint", *words)
        assert (result.exit_code, result.stdout) == (1, "")
        assert "s3://bucket/my jobs/a+b" in result.stderr
        assert "the server could not be reached" in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_no_checkpoint_yet(store: Store) -> None:
    job_record(Store.open("runs/empty"))
    assert "no checkpoint in" in run("checkpoint", "ls", "empty").stdout
    result = run("checkpoint", "verify", "empty")
    assert (result.exit_code, "has no committed checkpoint" in result.stderr) == (2, True)


# -- ls and show -----------------------------------------------------------------------------------------------------


def test_ls_is_in_numeric_order_and_shows_what_was_never_committed(store: Store) -> None:
    """CK-08, CK-03: among 1,500 other keys."""
    store.write(object_path(1001, 2, 0), [b"half"])
    for number in range(1500):
        (Path("runs/job/checkpoints") / f"{number:05}.bin").touch()
    result = run("checkpoint", "ls", "job")
    assert result.exit_code == 0, result.stderr
    head, *lines = cells(result.stdout)
    assert [dict(zip(head, line, strict=True)) | {"age": "", "note": ""} for line in lines] == [
        _line(999, "committed", "1", "1", "dp_shard2", "2", "64", "2.5"),
        _line(1000, "committed", "1", "1", "dp_shard2", "2", "64", "2.25", "3.5"),
        _line(1001, "incomplete", "2", "", "", "1", "4"),
    ]
    listed = json.loads(run("checkpoint", "ls", "job", "--json").stdout)
    assert [(line["step"], line["nbytes"], line["metrics"]) for line in listed] == [
        (999, 64, {"loss": 2.5}),
        (1000, 64, {"loss": 2.25, "eval_loss": 3.5}),
        (1001, 4, {}),
    ]


def _line(step: int, status: str, *rest: str) -> dict[str, str]:
    names = ("gen", "claim", "layout", "objects", "bytes", "loss", "eval_loss")
    values = dict(zip(names, (*rest, *("" for _ in names)), strict=False))
    return {"step": str(step), "status": status, "age": "", "note": "", **values}


def test_show(store: Store) -> None:
    result = run("checkpoint", "show", "job@999")
    assert result.exit_code == 0, result.stderr
    words = result.stdout
    assert "step       999; next sample 7,992; seed 1; saved 2023-11-14 22:13:20 UTC\n" in words
    assert "layout     dp_shard2; generation 1, claim 1\n" in words
    assert "metrics    loss 2.5\n" in words
    assert "kind\ttensors\telements\tbytes\nparam\t1\t16\t64\n" in words
    assert "tensor\tdtype\tshape\tchunks\tbytes\nparam.model.norm.weight\tfloat32\t16\t2\t64\n" in words
    assert "no tensor matches 'exp_avg.*'" in run("checkpoint", "show", "job", "--tensors", "exp_avg.*").stdout
    content = json.loads(run("checkpoint", "show", "job", "--json", "--tensors", "*norm*").stdout)
    assert content["tensors"]["param.model.norm.weight"]["shape"] == [16]


# -- verify ----------------------------------------------------------------------------------------------------------

WHOLE = "step 999: whole: 64 B in 2 objects\n"


def test_verify(store: Store) -> None:
    result = run("checkpoint", "verify", "job", "--all")
    assert (result.exit_code, result.stdout) == (0, WHOLE + WHOLE.replace("999", "1000"))
    assert run("checkpoint", "verify", "job@999").stdout == WHOLE


DAMAGES = {
    "flip": "bytes 0 to 32 (tensor param.model.norm.weight): expected xxh3 {digest}, found xxh3 ",
    "truncate": "bytes 31 to 32 (tensor param.model.norm.weight): expected 32 bytes, found 31 bytes",
    "extend": "bytes 32 to 33: expected 32 bytes, found 33 bytes",
    "remove": "bytes 0 to 32 (tensor param.model.norm.weight): expected 32 bytes, found no such object",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_verify_names_the_damaged_object(store: Store, damage: str) -> None:
    """CK-06"""
    name = object_path(1000, 1, 1)
    content = bytearray(store.read(name))
    if damage == "remove":
        store.delete(name)
    else:
        flipped = bytes([content[0] ^ 1]) + content[1:]
        store.write(name, [{"flip": flipped, "truncate": content[:-1], "extend": bytes(content) + b"x"}[damage]])
    result = run("checkpoint", "verify", "job", "--all")
    assert result.exit_code == 1
    assert result.stdout == WHOLE + "step 1000: DAMAGED: 1 place in 1 of 2 objects\n"
    (chunk,) = (
        c for c in _manifest(store, 1000)["tensors"]["param.model.norm.weight"]["chunks"] if c["object"] == name
    )
    sentence = DAMAGES[damage].format(digest=chunk["xxh3"][0])
    assert f"step 1000: damaged: object {name}, {sentence}" in result.stderr
    (whole, damaged) = json.loads(run("checkpoint", "verify", "job", "--all", "--json").stdout)
    assert (whole["whole"], damaged["whole"], damaged["damages"][0]["object"]) == (True, False, name)


def _manifest(store: Store, step: int) -> dict[str, dict[str, dict[str, list[dict[str, str]]]]]:
    return dict(json.loads(store.read(CheckpointId(step, 1).path))["manifest"])


def test_verify_finds_a_damaged_manifest(store: Store) -> None:
    """CK-06"""
    path = CheckpointId(999, 1).path
    content = bytearray(store.read(path))
    content[50] ^= 1
    store.write(path, [content])
    result = run("checkpoint", "verify", "job", "--all")
    assert result.exit_code == 1
    assert result.stdout == "step 999: DAMAGED: its manifest cannot be read\n" + WHOLE.replace("999", "1000")
    assert f"step 999: damaged: {path} in" in result.stderr
    assert "unreadable" in run("checkpoint", "ls", "job").stdout


def test_a_store_that_does_not_answer_is_no_damage(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from elastic_train.storage.errors import StorageError
    from elastic_train.storage.local import LocalStore

    read, away = LocalStore.read, object_path(1000, 1, 0)

    def fails(self: LocalStore, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if path == away:
            raise StorageError(f"{self.uri}/{path}", "the server could not be reached")
        return read(self, path, offset, length)

    monkeypatch.setattr(LocalStore, "read", fails)
    result = run("checkpoint", "verify", "job", "--all")
    assert (result.exit_code, result.stdout) == (1, WHOLE)
    assert "damaged" not in result.stderr
    assert "not verified: step 1000\n" in result.stderr
    assert (
        f"error: object {away} cannot be read: {store.uri}/{away}: the server could not be reached\n" in result.stderr
    )


# -- diff, pin, copy -------------------------------------------------------------------------------------------------


def test_diff(store: Store) -> None:
    result = run("checkpoint", "diff", "job@999", "job")
    assert result.exit_code == 1
    assert "cursor\t7992\t8000\n" in result.stdout
    assert "param.model.norm.weight\t16\t16\t1.0\t" in result.stdout
    sums = "not the same state: other step, cursor, 1 tensors differ, 0 tensors are equal (128 B read)\n"
    assert result.stdout.endswith(sums)
    same = run("checkpoint", "diff", "job@1000", "runs/job")
    assert same.exit_code == 0
    assert same.stdout.endswith("the same state: 1 tensors are equal bit for bit (0 B read)\n")
    told = json.loads(run("checkpoint", "diff", "job@999", "job", "--json").stdout)
    assert told["tensors"]["param.model.norm.weight"]["absolute"] == 1.0
    assert not told["same"]


def test_pin_and_unpin(store: Store) -> None:
    assert run("checkpoint", "pin", "job@999").exit_code == 2  # a reason must be given
    assert run("checkpoint", "pin", "job@999", "--reason", "for the paper").exit_code == 0
    line = cells(run("checkpoint", "ls", "job").stdout)[1]
    assert (line[0], line[1], line[-1]) == ("999", "pinned", "for the paper")
    assert "pinned     for the paper\n" in run("checkpoint", "show", "job@999").stdout
    assert "is pinned no longer; it was: for the paper" in run("checkpoint", "unpin", "job@999").stdout
    assert "was not pinned" in run("checkpoint", "unpin", "job@999").stdout
    assert cells(run("checkpoint", "ls", "job").stdout)[1][1] == "committed"


def test_copy(store: Store) -> None:
    result = run("checkpoint", "copy", "job@999", "archive of/best", "--pin", "best so far")
    assert result.exit_code == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first.endswith("64 B in 2 objects, all verified")
    assert "a job with name best and storage.uri" in second
    assert cells(run("checkpoint", "ls", "archive of/best").stdout)[1][:2] == ["999", "pinned"]
    assert run("checkpoint", "diff", "job@999", "archive of/best").exit_code == 0
    assert "already; nothing to do" in run("checkpoint", "copy", "job@999", "archive of/best").stdout
    record = json.loads(Path("archive of/best/job.json").read_text())
    assert (record["name"], record["identity"]["seed"], record["copied_from"]) == ("best", 1, store.uri)
    assert run("checkpoint", "copy", "job", "archive of/best").exit_code == 0
    assert run("checkpoint", "verify", "archive of/best", "--all").exit_code == 0


def test_a_copy_goes_into_a_folder_of_the_same_job_only(store: Store) -> None:
    other = Store.open("runs/other")
    job_record(other, seed=2)
    cases = [
        ("runs/other", "runs/other is the folder of another job (seed differ)"),
        ("best", "'best': give the URI of a job folder, e.g. ./best"),
        ("archive/of the best", "the folder's name 'of the best' must be one of a job"),
    ]
    for target, sentence in cases:
        result = run("checkpoint", "copy", "job", target)
        assert (result.exit_code, sentence in result.stderr) == (2, True), result.stderr
    (Path("runs/job/job.json")).unlink()
    assert "has no job.json" in run("checkpoint", "copy", "job", "runs/new").stderr


def test_a_damaged_checkpoint_is_not_copied(store: Store) -> None:
    """CK-06"""
    name = object_path(1000, 1, 1)
    store.write(name, [b"x" * 32])
    result = run("checkpoint", "copy", "job", "archive/job")
    assert result.exit_code == 1
    assert f"object {name}, bytes 0 to 32 (tensor param.model.norm.weight): expected xxh3 " in result.stderr
    assert [line[1] for line in cells(run("checkpoint", "ls", "archive/job").stdout)[1:]] == ["incomplete"]


# -- the command itself ----------------------------------------------------------------------------------------------


def test_the_hugging_face_verbs_are_here_too() -> None:
    above, here = ({c.name: c.callback for c in typer.registered_commands} for typer in (app, checkpoints.app))
    for verb in ("export-hf", "import-hf"):
        assert above[verb] is here[verb] is not None


def test_status_of_a_job_that_is_not_running(store: Store, tmp_path: Path) -> None:
    step = {"step": 1000, "loss": 2.5, "generation": 1}
    Path("runs/job/steps.jsonl").write_text(json.dumps(step) + '\n{"step": 1001, "lo')
    runs = [{"useful": 6.0, "start": 2.0}, {"useful": 3.0, "start": 1.0}]
    ledger = [({"event": "job_started"}, {"event": "time_account", "seconds": seconds}) for seconds in runs]
    events = [*ledger[0], *ledger[1], {"event": "job_finished", "status": "failed"}]
    Path("runs/job/ledger.jsonl").write_text("".join(json.dumps({"time": 0.0, **event}) + "\n" for event in events))
    for job in ("job", "runs/job"):
        result = elastic_train("status", job, cwd=tmp_path, RAY_ADDRESS="127.0.0.1:9")
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("job: not running; last finished step 1000, loss 2.5, generation 1\n")
        assert "job finished  status=failed" in result.stdout
        assert "goodput 75.0 % of 12 host-seconds; start 25.0 %, in all runs" in result.stdout
        assert "time account" not in result.stdout
