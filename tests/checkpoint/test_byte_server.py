from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from elastic_train.checkpoint.byte_server import ByteServer
from elastic_train.checkpoint.description import Chunk, Description, aligned
from elastic_train.checkpoint.errors import CheckpointError, ImageError, SourceError
from elastic_train.checkpoint.image import Image, State, image_name
from elastic_train.checkpoint.peer import Address, Peer
from elastic_train.checkpoint.sources import RemoteSource
from elastic_train.checkpoint.wire import receive_frame, receive_into, send_frame

TOKEN = "a secret"
NAME = image_name(2, 1, 0)


def make_image(directory: Path, step: int = 5, elements: int = 30_000, name: str = NAME) -> Image:
    """Bytes that no flipped or shifted copy equals."""
    directory.mkdir(exist_ok=True)
    nbytes = elements * 4
    description = Description((Chunk("w", "float32", (elements,), (0,), (elements,), 0, nbytes),), aligned(nbytes))
    image = Image.create(directory / name, 2, 1, description)
    image.begin(step)
    image.data[:] = np.random.default_rng(step).integers(0, 256, image.nbytes, dtype=np.uint8)
    image.finish(step)
    return image


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ByteServer]:
    (tmp_path / "served").mkdir()
    server = ByteServer("127.0.0.1", 0, TOKEN, tmp_path / "served").start()
    yield server
    server.close()


def connect(address: Address, token: str = TOKEN) -> socket.socket:
    """A connection that has said hello, for tests that speak the protocol themselves."""
    sock = socket.create_connection(address, timeout=20)
    send_frame(sock, {"op": "hello", "token": token})
    assert receive_frame(sock) == {"ok": True}
    return sock


def put_request(image: Image, step: int) -> dict[str, Any]:
    return {
        "op": "put",
        "image": image.path.name,
        "step": step,
        "nbytes": image.nbytes,
        "xxh3": xxhash.xxh3_64_hexdigest(image.data.data),
        "description": image.description_text().decode(),
    }


def test_ranges_are_read_over_one_kept_connection(server: ByteServer, tmp_path: Path) -> None:
    image = make_image(tmp_path / "served")
    source = RemoteSource(server.address, TOKEN, NAME, step=5)
    for begin, nbytes in [(0, image.nbytes), (64, 1000), (image.nbytes - 3, 3), (image.nbytes, 0)]:
        assert np.array_equal(source.read(begin, nbytes), image.data[begin : begin + nbytes])
    assert len(server._connections) == 1
    source.close()


def test_one_source_serves_many_threads(server: ByteServer, tmp_path: Path) -> None:
    image = make_image(tmp_path / "served")
    source = RemoteSource(server.address, TOKEN, NAME, step=5)
    right: list[bool] = []

    def read(start: int) -> None:
        for begin in range(start, 50_000, 997):
            right.append(np.array_equal(source.read(begin, 500), image.data[begin : begin + 500]))

    threads = [threading.Thread(target=read, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(right) > 300
    assert all(right)


def test_a_wrong_token_is_refused(server: ByteServer, tmp_path: Path) -> None:
    make_image(tmp_path / "served")
    with pytest.raises(SourceError, match="refused: wrong token"):
        RemoteSource(server.address, "another", NAME, step=5).read(0, 1)
    with pytest.raises(SourceError, match="refused: wrong token"):
        Peer(server.address, "").put(make_image(tmp_path / "own").path, 5)


def test_a_request_before_the_hello_is_refused(server: ByteServer, tmp_path: Path) -> None:
    make_image(tmp_path / "served")
    with socket.create_connection(server.address, timeout=20) as sock:
        send_frame(sock, {"op": "read", "image": NAME, "step": 5, "byte_offset": 0, "nbytes": 1})
        assert receive_frame(sock) == {"ok": False, "error": "wrong token"}
        assert receive_frame(sock) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"image": "../served/" + NAME}, "image name"),
        ({"image": image_name(2, 1, 1)}, "No such file"),
        ({"step": 6}, "WHOLE at step 5; step 6 is wanted"),
        ({"step": "5"}, "step='5' must be an integer"),
        ({"byte_offset": -1}, "byte_offset=-1 must be an integer from 0"),
        ({"nbytes": 10**15}, "nbytes=1000000000000000 must be an integer from 0"),
        ({"nbytes": True}, "nbytes=True must be"),
        ({"op": "delete"}, "op='delete' must be 'read' or 'put'"),
    ],
)
def test_bad_requests_are_refused_with_a_reason_and_the_connection_goes_on(
    server: ByteServer, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    image = make_image(tmp_path / "served")
    request = {"op": "read", "image": NAME, "step": 5, "byte_offset": 0, "nbytes": 8}
    with connect(server.address) as sock:
        send_frame(sock, request | change)
        answer = receive_frame(sock)
        assert answer is not None
        assert answer["ok"] is False
        assert reason in answer["error"]
        send_frame(sock, request)
        assert receive_frame(sock) == {"ok": True, "nbytes": 8, "xxh3": xxhash.xxh3_64_hexdigest(image.data[:8].data)}
        received = bytearray(8)
        receive_into(sock, memoryview(received))
        assert received == image.data[:8].tobytes()


def test_a_torn_image_is_not_served(server: ByteServer, tmp_path: Path) -> None:
    make_image(tmp_path / "served").begin(7)
    with pytest.raises(SourceError, match=r"refused: .*WRITING at step 7; step 5 is wanted"):
        RemoteSource(server.address, TOKEN, NAME, step=5).read(0, 1)


def test_frames_over_the_limit_end_the_connection_before_anything_is_allocated(server: ByteServer) -> None:
    with socket.create_connection(server.address, timeout=20) as sock:
        sock.sendall(b"\xff\xff\xff\xff")
        assert sock.recv(1) == b""
    with connect(server.address) as sock:
        sock.sendall(b"\xff\xff\xff\xff")
        assert sock.recv(1) == b""


def test_put_makes_the_same_whole_image_and_its_description(server: ByteServer, tmp_path: Path) -> None:
    peer = Peer(server.address, TOKEN)
    for step in (5, 6, 7):
        image = make_image(tmp_path / "own", step)
        assert peer.put(image.path, step) == image.nbytes
        copy = Image.open(tmp_path / "served" / NAME)
        copy.require(step)
        assert np.array_equal(copy.data, image.data)
        assert (copy.generation, copy.rank, copy.description()) == (2, 1, image.description())
    peer.close()


def test_put_writes_into_the_image_that_is_there(server: ByteServer, tmp_path: Path) -> None:
    peer = Peer(server.address, TOKEN)
    peer.put(make_image(tmp_path / "own", 5).path, 5)
    before = (tmp_path / "served" / NAME).stat().st_ino
    peer.put(make_image(tmp_path / "own", 6).path, 6)
    assert (tmp_path / "served" / NAME).stat().st_ino == before


def test_put_of_an_image_of_another_step_is_an_error_of_the_sender(server: ByteServer, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="step 6 is wanted"):
        Peer(server.address, TOKEN).put(make_image(tmp_path / "own", 5).path, 6)


def test_a_payload_with_a_flipped_bit_is_refused_and_the_copy_is_torn(server: ByteServer, tmp_path: Path) -> None:
    image = make_image(tmp_path / "own", 6)
    payload = bytearray(image.data.tobytes())
    payload[1234] ^= 4
    with connect(server.address) as sock:
        send_frame(sock, put_request(image, 6))
        assert receive_frame(sock) == {"ok": True}
        sock.sendall(payload)
        answer = receive_frame(sock)
        assert answer is not None
        assert "arrived with xxh3" in answer["error"]
    assert Image.open(tmp_path / "served" / NAME).state is State.WRITING


def test_a_payload_that_is_cut_off_leaves_a_torn_copy(server: ByteServer, tmp_path: Path) -> None:
    image = make_image(tmp_path / "own", 6)
    with connect(server.address) as sock:
        send_frame(sock, put_request(image, 6))
        assert receive_frame(sock) == {"ok": True}
        sock.sendall(image.data[:5000].data)
    server.close()
    assert Image.open(tmp_path / "served" / NAME).state is State.WRITING


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"image": "/tmp/x"}, "image name"),
        ({"nbytes": 64}, "must be the 120000 of its description"),
        ({"nbytes": 2**41}, "nbytes=2199023255552 must be an integer from 0"),
        ({"description": "{}"}, "not a snapshot description"),
        ({"xxh3": 7}, "xxh3=7 must be a string"),
    ],
)
def test_bad_puts_are_refused_before_the_payload(
    server: ByteServer, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    image = make_image(tmp_path / "own", 6)
    with connect(server.address) as sock:
        send_frame(sock, put_request(image, 6) | change)
        answer = receive_frame(sock)
        assert answer is not None
        assert reason in answer["error"]


def test_an_older_step_or_generation_never_replaces_a_copy(server: ByteServer, tmp_path: Path) -> None:
    peer = Peer(server.address, TOKEN)
    peer.put(make_image(tmp_path / "own", 6).path, 6)
    with pytest.raises(SourceError, match="already holds step 6; step 5 came too late"):
        peer.put(make_image(tmp_path / "own", 5).path, 5)
    server.fence(3)
    with pytest.raises(SourceError, match="is of generation 2; accepted are 3 and later"):
        peer.put(make_image(tmp_path / "own", 7).path, 7)
    Image.open(tmp_path / "served" / NAME).require(6)


def test_two_senders_of_one_image_do_not_mix(server: ByteServer, tmp_path: Path) -> None:
    image = make_image(tmp_path / "own", 6)
    with connect(server.address) as sock:
        send_frame(sock, put_request(image, 6))
        assert receive_frame(sock) == {"ok": True}
        with pytest.raises(SourceError, match="is being received on another connection"):
            Peer(server.address, TOKEN).put(image.path, 6)
        sock.sendall(image.data.data)
        assert receive_frame(sock) == {"ok": True}
    Image.open(tmp_path / "served" / NAME).require(6)


def test_a_peer_comes_back_to_a_server_that_was_restarted(server: ByteServer, tmp_path: Path) -> None:
    image = make_image(tmp_path / "served")
    source = RemoteSource(server.address, TOKEN, NAME, step=5)
    assert len(source.read(0, 10)) == 10
    server.close()
    again = ByteServer(*server_address(source), TOKEN, tmp_path / "served").start()
    assert np.array_equal(source.read(0, 10), image.data[:10])
    again.close()
    with pytest.raises(SourceError, match="does not answer"):
        source.read(0, 10)


def server_address(source: RemoteSource) -> Address:
    return source._peer.address


class LyingServer:
    """Answers one read with other bytes than it announces."""

    def __init__(self, payload: bytes, announced: dict[str, Any]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._serve, args=(payload, announced))
        self._thread.start()

    def _serve(self, payload: bytes, announced: dict[str, Any]) -> None:
        with self._listener, self._listener.accept()[0] as sock:
            receive_frame(sock)
            send_frame(sock, {"ok": True})
            receive_frame(sock)
            send_frame(sock, announced)
            sock.sendall(payload)

    def join(self) -> None:
        self._thread.join()


@pytest.mark.parametrize(
    ("payload", "nbytes", "reason"),
    [
        (b"abcdefgX", 8, "sent bytes of .* with xxh3"),
        (b"abcd", 8, "closed after 4 of 8 bytes"),
        (b"abcd", 4, "answered with 4 bytes; 8 were asked for"),
    ],
)
def test_the_reader_notices_wrong_and_missing_bytes(payload: bytes, nbytes: int, reason: str) -> None:
    liar = LyingServer(payload, {"ok": True, "nbytes": nbytes, "xxh3": xxhash.xxh3_64_hexdigest(b"abcdefgh")})
    with pytest.raises(CheckpointError, match=reason):
        RemoteSource(liar.address, TOKEN, NAME, step=5).read(0, 8)
    liar.join()


def test_a_server_needs_a_token(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="token"):
        ByteServer("127.0.0.1", 0, "", tmp_path)
