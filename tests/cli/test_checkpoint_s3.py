"""The checkpoint verbs on a real S3 server, path style, below a prefix with spaces and plus signs."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elastic_train.checkpoint.manifest import object_path
from elastic_train.config.operation import StorageConfig
from elastic_train.storage.store import Store
from tests.cli.checkpoints import commit_checkpoint, job_record
from tests.cli.test_checkpoint_commands import cells, run
from tests.s3_server import S3Server

pytestmark = pytest.mark.slow


@pytest.fixture
def s3(
    s3_environment: S3Server, s3_bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Store]:
    """Opens stores in the bucket; commands know the server from AWS_ENDPOINT_URL, and run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_environment.endpoint_url)
    config = StorageConfig(endpoint_url=s3_environment.endpoint_url, retry_seconds=5.0)
    prefix = f"s3://{s3_bucket}/{secrets.token_hex(4)}/team a+b/runs 1+1%20"
    return lambda name: Store.open(f"{prefix}/{name}", config)


@pytest.fixture
def store(s3: Callable[..., Store]) -> Store:
    """A job folder with steps 999 and 1000."""
    store = s3("job")
    job_record(store)
    for step in (999, 1000):
        commit_checkpoint(store, step)
    return store


def test_both_of_999_and_1000_are_listed_among_1500_other_keys(store: Store) -> None:
    """CK-08: more keys than a page of a listing holds, which sort before the manifests."""
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: store.write(f"checkpoints/a{n:05}", [b"x"]), range(1500)))
    result = run("checkpoint", "ls", store.uri)
    assert result.exit_code == 0, result.stderr
    assert [line[:2] for line in cells(result.stdout)[1:]] == [["999", "committed"], ["1000", "committed"]]
    assert json.loads(run("checkpoint", "show", store.uri, "--json").stdout)["step"] == 1000


def test_damage_is_named_by_its_key(store: Store, s3_server: S3Server, s3_bucket: str) -> None:
    """CK-06: one object shorter by a byte, one byte flipped in another, behind the program's back."""
    client = s3_server.client()
    for rank, step in ((0, 999), (1, 1000)):
        key = f"{store.uri.removeprefix(f's3://{s3_bucket}/')}/{object_path(step, 1, rank)}"
        content = client.get_object(Bucket=s3_bucket, Key=key)["Body"].read()
        content = content[:-1] if step == 999 else content[:9] + bytes([content[9] ^ 1]) + content[10:]
        client.put_object(Bucket=s3_bucket, Key=key, Body=content)
    result = run("checkpoint", "verify", store.uri, "--all")
    assert result.exit_code == 1
    truncated, flipped = result.stderr.splitlines()
    assert truncated == (
        f"step 999: damaged: object {object_path(999, 1, 0)}, bytes 31 to 32 (tensor param.model.norm.weight): "
        "expected 32 bytes, found 31 bytes"
    )
    assert flipped.startswith(
        f"step 1000: damaged: object {object_path(1000, 1, 1)}, bytes 0 to 32 (tensor param.model.norm.weight): "
        "expected xxh3 "
    )


def test_a_checkpoint_goes_to_s3_and_back_and_is_the_same(s3: Callable[..., Store], tmp_path: Path) -> None:
    local = Store.open("runs/job")
    job_record(local)
    commit_checkpoint(local, 50, ranks=3)
    there = s3("archived").uri
    for source, target in (("job", there), (f"{there}@50", "back/job")):
        result = run("checkpoint", "copy", source, target)
        assert result.exit_code == 0, result.stderr
    again = run("checkpoint", "copy", "job@50", there)
    assert again.stdout == f"step 50 is in {there} already; nothing to do\n"
    for other in (there, "back/job"):
        same = run("checkpoint", "diff", "job", other)
        assert (same.exit_code, "the same state" in same.stdout) == (0, True)
        assert run("checkpoint", "verify", other, "--all").exit_code == 0
    assert run("checkpoint", "pin", there, "--reason", "kept").exit_code == 0
    assert cells(run("checkpoint", "ls", there).stdout)[1][:2] == ["50", "pinned"]
    name = run("checkpoint", "ls", "archived", "--storage", there.removesuffix("/archived"))
    assert cells(name.stdout)[1][0] == "50"


def test_the_endpoint_may_be_given_or_be_in_the_job_file(
    store: Store, s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.config.job_files import GOOD

    monkeypatch.delenv("AWS_ENDPOINT_URL")
    url = s3_environment.endpoint_url
    assert run("checkpoint", "show", store.uri, "--endpoint-url", url, "--region", "eu-west-1").exit_code == 0
    folder = store.uri.removesuffix("/job")
    Path("job.yaml").write_text(
        GOOD.replace("name: good", "name: job") + f"storage: {{uri: '{folder}', endpoint_url: '{url}'}}\n"
    )
    assert run("checkpoint", "show", "job.yaml@999").exit_code == 0


def test_what_cannot_be_used_is_one_sentence(
    store: Store, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = store.uri.removesuffix("/job")
    job_record(Store.open("runs/job"))
    commit_checkpoint(Store.open("runs/job"), 50)
    cases = [
        (2, ("ls", "s3://missing-bucket/job"), "the bucket does not exist; create it first"),
        (2, ("copy", "job", "s3://missing-bucket/job"), "the bucket does not exist; create it first"),
        (2, ("ls", f"{folder}/nobody"), f"no job folder {folder}/nobody"),
        (2, ("ls", folder), f"no job folder {folder}"),
        (2, ("verify", f"{store.uri}@3"), "committed steps: 999, 1000"),
    ]
    for code, words, sentence in cases:
        result = run("checkpoint", *words)
        assert (result.exit_code, result.stdout) == (code, "")
        assert result.stderr.startswith("error: ")
        assert sentence in result.stderr
        assert len(result.stderr.splitlines()) == 1
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", f"{s3_server.access_key}-reader")
    assert run("checkpoint", "verify", store.uri).exit_code == 0
    denied = run("checkpoint", "copy", "job", f"{folder}/new")
    assert (denied.exit_code, "access denied" in denied.stderr) == (1, True)
