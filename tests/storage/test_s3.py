from __future__ import annotations

import os
import pickle
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from elastic_train.config.operation import StorageConfig
from elastic_train.storage.errors import AlreadyExists, NotFound, StorageError
from elastic_train.storage.s3_errors import scrub
from elastic_train.storage.s3_upload import part_size, split
from elastic_train.storage.store import Entry, Store
from tests.s3_server import S3Server
from tests.storage.network import Network

MIB = 2**20


@pytest.mark.parametrize(
    ("total", "wanted"),
    [(None, 8 * MIB), (0, 8 * MIB), (120 * 10**9, 12 * MIB), (10_000 * 8 * MIB, 8 * MIB), (10**12, 96 * MIB)],
)
def test_no_object_needs_more_than_10000_parts(total: int | None, wanted: int) -> None:
    assert part_size(total) == wanted
    assert -(-(total or 0) // part_size(total)) <= 10_000


def test_an_object_of_120_gb_fits_into_the_parts_that_s3_allows() -> None:
    """CK-09: with fixed parts of 10 MiB 97.66 GiB are the most; here parts grow with the object."""
    size = part_size(120 * 10**9)
    assert size >= 12_000_000  # 11.45 MiB
    assert -(-120 * 10**9 // size) == 9537 <= 10_000
    largest = 5 * 2**40  # of an object in S3
    assert -(-largest // part_size(largest)) <= 10_000
    assert part_size(largest) <= 5 * 2**30  # of a part


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
def test_a_prefix_is_taken_literally(s3_environment: S3Server, s3_bucket: str) -> None:
    start = secrets.token_hex(4)
    store = Store.open(f"s3://{s3_bucket}/{start} b/c+d/%20", StorageConfig(endpoint_url=s3_environment.endpoint_url))
    store.write("x y+z", [b"1"])
    keys = [item["Key"] for item in s3_environment.client().list_objects_v2(Bucket=s3_bucket, Prefix=start)["Contents"]]
    assert keys == [f"{start} b/c+d/%20/x y+z"]
    assert store.read("x y+z") == b"1"


@pytest.mark.slow
def test_the_endpoint_may_come_from_the_environment(
    s3_environment: S3Server, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_environment.endpoint_url)
    store, path = Store.open(f"s3://{s3_bucket}"), secrets.token_hex(4)
    store.create(path, b"1")
    assert store.uri == f"s3://{s3_bucket}"
    assert store.list(path) == [Entry(path, 1)]


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
    s3_environment: S3Server, s3_bucket: str, monkeypatch: pytest.MonkeyPatch, variable: str, cause: str
) -> None:
    monkeypatch.setenv(variable, "wrong-value-4711")
    store = Store.open(f"s3://{s3_bucket}/job", StorageConfig(endpoint_url=s3_environment.endpoint_url))
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


@pytest.mark.slow
def test_an_identity_that_may_only_read(
    s3_environment: S3Server, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = StorageConfig(endpoint_url=s3_environment.endpoint_url)
    uri = f"s3://{s3_bucket}/{secrets.token_hex(4)}"
    Store.open(uri, config).write("x", [b"1"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", f"{s3_environment.access_key}-reader")
    reader = Store.open(uri, config)
    assert reader.read("x") == b"1"
    for call in (lambda: reader.write("x", [b"2"]), lambda: reader.create("y", b"2"), lambda: reader.delete("x")):
        with pytest.raises(StorageError, match=rf"^{uri}/[xy]: access denied; the credentials in the environment"):
            call()
    assert reader.read("x") == b"1"


ALL_OPERATIONS = """
import sys
asked = set()
sys.addaudithook(lambda event, args: asked.add(args[1]) if event == "socket.connect" else None)
sys.addaudithook(lambda event, args: asked.add(args[0]) if event == "socket.getaddrinfo" else None)
from elastic_train.config.operation import StorageConfig
from elastic_train.storage.store import Store
store = Store.open(sys.argv[1], StorageConfig(endpoint_url=sys.argv[2]))
store.write("x", [b"1"]); store.create("y", b"2"); store.read("x"); store.list(); store.delete("x")
print(sorted(map(str, asked)))
"""


@pytest.mark.slow
def test_nothing_but_the_endpoint_is_asked(s3_environment: S3Server, s3_bucket: str) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
        **s3_environment.environment,
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1:1/credentials",
    }
    del environment["AWS_EC2_METADATA_DISABLED"]  # ours to see to
    arguments = [sys.executable, "-c", ALL_OPERATIONS, f"s3://{s3_bucket}/{secrets.token_hex(4)}"]
    done = subprocess.run([*arguments, s3_environment.endpoint_url], env=environment, capture_output=True, text=True)
    host, port = "127.0.0.1", int(s3_environment.endpoint_url.rpartition(":")[2])
    assert (done.returncode, done.stdout.strip()) == (0, str(sorted([host, str((host, port))]))), done.stderr


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


@pytest.fixture
def faulty(s3_environment: S3Server, s3_bucket: str) -> Iterator[tuple[Store, Network]]:
    """A store behind a network with faults; its first request, the look at the bucket, is done."""
    network = Network(s3_environment)
    network.mend()
    config = StorageConfig(endpoint_url=network.endpoint_url, retry_seconds=20.0)
    store = Store.open(f"s3://{s3_bucket}/{secrets.token_hex(4)}", config)
    assert not store.exists("x")
    network.cut_connections()
    yield store, network
    network.cut()


@pytest.mark.slow
def test_a_busy_server_is_asked_again(faulty: tuple[Store, Network]) -> None:
    store, network = faulty
    network.busy = 3
    store.write("x", [b"1"])
    assert network.busy == 0
    network.cut_connections()
    network.busy = 2
    assert store.read("x") == b"1"
    assert network.busy == 0


@pytest.mark.slow
def test_a_create_whose_answer_is_lost_is_still_ours(faulty: tuple[Store, Network]) -> None:
    store, network = faulty
    network.lose_answers = 1
    store.create("x", b"ours")
    assert network.lose_answers == 0
    assert store.read("x") == b"ours"
    network.cut_connections()
    network.lose_answers = 1
    with pytest.raises(AlreadyExists):
        store.create("x", b"another's")
    assert network.lose_answers == 0
    assert store.read("x") == b"ours"


@pytest.mark.slow
def test_a_large_write_survives_lost_answers(faulty: tuple[Store, Network]) -> None:
    store, network = faulty
    data = secrets.token_bytes(2**16) * 700  # six parts
    network.lose_answers = 4
    assert store.write("x", [data], len(data)) == len(data)
    assert network.lose_answers == 0
    assert store.read("x") == data


@pytest.mark.slow
def test_a_server_that_stays_busy_is_an_error_after_the_budget(s3_environment: S3Server, s3_bucket: str) -> None:
    network = Network(s3_environment)
    network.mend()
    network.busy = 10**6
    store = Store.open(f"s3://{s3_bucket}/x", StorageConfig(endpoint_url=network.endpoint_url, retry_seconds=0.3))
    with pytest.raises(StorageError, match=r"x/y: the server answered .* for \d+ seconds of retries$"):
        store.read("y")
    network.cut()
