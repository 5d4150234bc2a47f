from __future__ import annotations

import pickle
import secrets
import socket
from collections.abc import Iterator

import pytest

from elastic_train.config.job import StorageConfig
from elastic_train.storage.errors import NotFound, StorageError
from elastic_train.storage.s3_errors import scrub
from elastic_train.storage.s3_upload import part_size, split
from elastic_train.storage.store import Store
from tests.s3_server import S3Server

MIB = 2**20


@pytest.mark.parametrize(
    ("total", "wanted"),
    [(None, 16 * MIB), (0, 16 * MIB), (120 * 10**9, 16 * MIB), (10_000 * 16 * MIB, 16 * MIB), (10**12, 96 * MIB)],
)
def test_no_object_needs_more_than_10000_parts(total: int | None, wanted: int) -> None:
    assert part_size(total) == wanted
    assert -(-(total or 0) // part_size(total)) <= 10_000


def test_split_keeps_bytes_and_sizes() -> None:
    parts = list(split([b"abc", b"", b"defghijk", b"l"], 4))
    assert parts == [b"abcd", b"efgh", b"ijkl"]
    assert list(split([], 4)) == []


@pytest.mark.slow
def test_listing_goes_beyond_the_first_thousand_keys(s3_store: Store) -> None:
    paths = [f"checkpoints/step-{number:08d}.json" for number in range(1005)]
    for path in paths:
        s3_store.write(path, [b"x"])
    assert [entry.path for entry in s3_store.list("checkpoints/")] == paths


@pytest.mark.slow
def test_a_prefix_is_taken_literally(s3_environment: S3Server) -> None:
    bucket = s3_environment.create_bucket(f"bucket-{secrets.token_hex(4)}")
    store = Store.open(f"s3://{bucket}/a b/c+d/%20", StorageConfig(endpoint_url=s3_environment.endpoint_url))
    store.write("x y+z", [b"1"])
    keys = [item["Key"] for item in s3_environment.client().list_objects_v2(Bucket=bucket)["Contents"]]
    assert keys == ["a b/c+d/%20/x y+z"]
    assert store.read("x y+z") == b"1"


@pytest.mark.slow
def test_the_endpoint_may_come_from_the_environment(s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_environment.endpoint_url)
    bucket = s3_environment.create_bucket(f"bucket-{secrets.token_hex(4)}")
    store = Store.open(f"s3://{bucket}")
    store.create("x", b"1")
    assert store.uri == f"s3://{bucket}" and [entry.path for entry in store.list()] == ["x"]


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["read", "write", "exists", "list", "create"])
def test_a_missing_bucket_is_never_created(s3_environment: S3Server, operation: str) -> None:
    bucket = f"missing-{secrets.token_hex(4)}"
    store = Store.open(f"s3://{bucket}/job", StorageConfig(endpoint_url=s3_environment.endpoint_url))
    arguments = {"write": ("x", [b"1"]), "create": ("x", b"1"), "list": ()}.get(operation, ("x",))
    with pytest.raises(
        StorageError, match=rf"^s3://{bucket}/job.*: the bucket does not exist; create it first"
    ) as caught:
        getattr(store, operation)(*arguments)
    assert not isinstance(caught.value, NotFound)
    assert bucket not in [item["Name"] for item in s3_environment.client().list_buckets()["Buckets"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "cause"),
    [
        ("AWS_SECRET_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY does not belong to AWS_ACCESS_KEY_ID"),
        ("AWS_ACCESS_KEY_ID", "the server does not know this AWS_ACCESS_KEY_ID"),
    ],
)
def test_bad_credentials_are_named_but_not_shown(
    s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch, variable: str, cause: str
) -> None:
    bucket = s3_environment.create_bucket(f"bucket-{secrets.token_hex(4)}")
    monkeypatch.setenv(variable, "wrong-value-4711")
    store = Store.open(f"s3://{bucket}/job", StorageConfig(endpoint_url=s3_environment.endpoint_url))
    for call in (
        lambda: store.read("x"),
        lambda: store.write("x", [b"1"]),
        lambda: store.create("x", b"1"),
        store.list,
    ):
        with pytest.raises(StorageError) as caught:
            call()
        assert cause in str(caught.value)
        shown = str(caught.value) + repr(caught.value) + str(caught.value.__cause__)
        for secret in ("wrong-value-4711", s3_environment.secret_key, s3_environment.access_key):
            assert secret not in shown


@pytest.mark.parametrize("missing", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_without_credentials_nothing_is_asked(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "one")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "two")
    monkeypatch.delenv(missing)
    store = Store.open("s3://bucket/x", StorageConfig(endpoint_url="http://127.0.0.1:1"))
    with pytest.raises(StorageError, match="no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        store.read("x")


def test_credentials_in_the_uri_are_refused_and_not_repeated() -> None:
    with pytest.raises(StorageError) as caught:
        Store.open("s3://key:secret-4711@bucket/x")
    assert "4711" not in str(caught.value)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that nobody listens on, held so that nobody else takes it."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def test_an_unreachable_endpoint_is_an_error_after_the_budget(
    monkeypatch: pytest.MonkeyPatch, silent_port: int
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "access-4711")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-4711")
    endpoint = f"http://127.0.0.1:{silent_port}"
    store = Store.open("s3://bucket/x", StorageConfig(endpoint_url=endpoint, retry_seconds=0.3))
    with pytest.raises(
        StorageError, match=rf"^s3://bucket/x/y: the server could not be reached .*{endpoint}"
    ) as caught:
        store.read("y")
    assert "4711" not in str(caught.value)


def test_messages_are_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    assert scrub("denied:\n key hush-hush of x") == "denied: key $AWS_SECRET_ACCESS_KEY of x"


def test_errors_travel_between_processes() -> None:
    error = pickle.loads(pickle.dumps(NotFound("s3://b/x", "no such object")))
    assert isinstance(error, NotFound) and (error.uri, error.cause) == ("s3://b/x", "no such object")


@pytest.mark.slow
def test_s3_cannot_append(s3_store: Store) -> None:
    with pytest.raises(StorageError, match="S3 cannot append"):
        s3_store.append("log", b"x")


@pytest.mark.slow
def test_a_failed_upload_leaves_no_open_parts(s3_store: Store, s3_environment: S3Server) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x" * 40_000_000
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError):
        s3_store.write("x", chunks())
    bucket = s3_store.uri.split("/")[2]
    assert s3_environment.client().list_multipart_uploads(Bucket=bucket).get("Uploads", []) == []
