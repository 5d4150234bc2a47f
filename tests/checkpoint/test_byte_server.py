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
from elastic_train.checkpoint.errors import CheckpointError, ImageError, NoRoom, SourceError
from elastic_train.checkpoint.gather import MOST_GATHERED
from elastic_train.checkpoint.image import Image, State, image_name
from elastic_train.checkpoint.peer import Address, Peer
from elastic_train.checkpoint.sources import RemoteSource
from elastic_train.checkpoint.spans import Runs
from elastic_train.checkpoint.wire import receive_frame, receive_into, send_frame
from tests.small_memory import can_mount, mounted

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
        send_frame(sock, {"op": "read", "image": NAME, "step": 5, "ranges": []})
        assert receive_frame(sock) == {"ok": False, "error": "wrong token"}
        assert receive_frame(sock) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"image": "../served/" + NAME}, "image name"),
        ({"image": image_name(2, 1, 1)}, "No such file"),
        ({"step": 6}, "WHOLE at step 5; step 6 is wanted"),
        ({"step": "5"}, "step='5' must be an integer"),
        ({"ranges": None}, "ranges must be a list of at most 4096 rows, not None"),
        ({"ranges": [[0, 1, 1, 1]] * 5000}, "ranges must be a list of at most 4096 rows, not 5000 of them"),
        ({"ranges": [[-1, 8, 8, 1]]}, "range [-1, 8, 8, 1] must be four integers from 0 on"),
        ({"ranges": [[0, True, 8, 1]]}, "range [0, True, 8, 1] must be four integers"),
        ({"ranges": [[0, 1.0, 8, 1]]}, "must be four integers"),
        ({"ranges": [[0, 8, 8]]}, "range [0, 8, 8] must be four integers"),
        ({"ranges": [[0, 8, 8, 1, 1]]}, "must be four integers"),
        ({"ranges": ["0881"]}, "range '0881' must be four integers"),
        ({"ranges": [[0, 8, 8, 2**62]]}, "must be four integers"),
        ({"ranges": [[0, 8, 8, 10**4000]]}, "must be four integers"),
        ({"ranges": [list(range(10**6))]}, "must be four integers"),
        ({"ranges": [[0, 0, 8, 1]]}, "must have length >= 1"),
        ({"ranges": [[0, 8, 8, 0]]}, "must have length >= 1, stride >= length and count >= 1"),
        ({"ranges": [[0, 8, 7, 2]]}, "range [0, 8, 7, 2] must have length >= 1, stride >= length"),
        ({"ranges": [[0, 8, 0, 10**15]]}, "stride >= length"),
        ({"ranges": [[0, 1, 1, 10**15]]}, "ends at byte 1000000000000000, behind the 120000 bytes of the image"),
        ({"ranges": [[0, 10**15, 10**15, 1]]}, "ends at byte 1000000000000000, behind the 120000 bytes"),
        ({"ranges": [[119_999, 2, 2, 1]]}, "ends at byte 120001, behind the 120000 bytes"),
        ({"ranges": [[0, 8, 16, 4], [48, 8, 8, 1]]}, "range [48, 8, 8, 1] begins before byte 56, the end of the one"),
        ({"ranges": [[64, 8, 8, 1], [0, 8, 8, 1]]}, "range [0, 8, 8, 1] begins before byte 72"),
        ({"ranges": [[0, 8, 8, 1]] * 2}, "begins before byte 8"),
        ({"op": "delete"}, "op='delete' must be 'read' or 'put'"),
    ],
)
def test_bad_requests_are_refused_with_a_reason_and_the_connection_goes_on(
    server: ByteServer, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    image = make_image(tmp_path / "served")
    request = {"op": "read", "image": NAME, "step": 5, "ranges": [[0, 4, 8, 2]]}
    with connect(server.address) as sock:
        send_frame(sock, request | change)
        answer = receive_frame(sock)
        assert answer is not None
        assert answer["ok"] is False
        assert reason in answer["error"]
        send_frame(sock, request)
        wanted = image.data[:4].tobytes() + image.data[8:12].tobytes()
        assert receive_frame(sock) == {"ok": True, "nbytes": 8, "xxh3": xxhash.xxh3_64_hexdigest(wanted)}
        received = bytearray(8)
        receive_into(sock, memoryview(received))
        assert received == wanted


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


def test_a_full_server_makes_room_by_what_is_over_and_else_says_that_it_has_none(tmp_path: Path) -> None:
    assert can_mount(tmp_path / "probe"), "this test needs root, to mount a small tmpfs"
    image = make_image(tmp_path / "own", 5)
    with mounted(tmp_path / "small", 2.5 * image.nbytes):
        server = ByteServer("127.0.0.1", 0, TOKEN, tmp_path / "small").start()
        peer = Peer(server.address, TOKEN)
        for rank in range(2):
            Image.create(tmp_path / "small" / image_name(1, rank, 0), 1, rank, image.description())
        server.fence(2, keep=[image_name(1, 0, 0)])
        peer.put(image.path, 5)
        assert {path.name for path in (tmp_path / "small").glob("*.img")} == {image_name(1, 0, 0), NAME}
        other = make_image(tmp_path / "own", 5, name=image_name(2, 1, 1))
        with pytest.raises(NoRoom, match=r"host .* refused: .*small/g00000002-r00001-b1.img needs \d+ bytes"):
            peer.put(other.path, 5)
        peer.put(image.path, 5)  # the connection goes on
        server.close()


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
    """Answers one read with each of ``payloads`` and one announcement for all of them; then it is gone."""

    def __init__(self, payloads: list[bytes], announced: dict[str, Any]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._serve, args=(payloads, announced))
        self._thread.start()

    def _serve(self, payloads: list[bytes], announced: dict[str, Any]) -> None:
        with self._listener, self._listener.accept()[0] as sock:
            receive_frame(sock)
            send_frame(sock, {"ok": True})
            for payload in payloads:
                receive_frame(sock)
                send_frame(sock, announced)
                sock.sendall(payload)

    def join(self) -> None:
        self._thread.join()


@pytest.mark.parametrize(
    ("payloads", "nbytes", "reason"),
    [
        ([b"abcdefgX"] * 4, 8, "sent bytes of .* with xxh3"),
        ([b"abcd"], 8, "closed after 4 of 8 bytes"),
        ([b"abcd"], 4, "answered with 4 bytes; 8 were asked for"),
    ],
)
def test_the_reader_notices_wrong_and_missing_bytes(payloads: list[bytes], nbytes: int, reason: str) -> None:
    liar = LyingServer(payloads, {"ok": True, "nbytes": nbytes, "xxh3": xxhash.xxh3_64_hexdigest(b"abcdefgh")})
    with pytest.raises(CheckpointError, match=reason):
        RemoteSource(liar.address, TOKEN, NAME, step=5).read(0, 8)
    liar.join()


def test_bytes_that_were_spoilt_on_the_way_are_asked_for_again() -> None:
    payloads = [b"abcdefgX", b"Xbcdefgh", b"abXdefgh", b"abcdefgh"]
    server = LyingServer(payloads, {"ok": True, "nbytes": 8, "xxh3": xxhash.xxh3_64_hexdigest(b"abcdefgh")})
    assert RemoteSource(server.address, TOKEN, NAME, step=5).read(0, 8).tobytes() == b"abcdefgh"
    server.join()


def test_scattered_bytes_come_in_one_answer(server: ByteServer, tmp_path: Path) -> None:
    image = make_image(tmp_path / "served")
    source = RemoteSource(server.address, TOKEN, NAME, step=5)
    runs = [Runs(3, 5, 7, 100), Runs(701, 1, 1, 1), Runs(704, 2, 2, 50), Runs(10_000, 1000, 30_000, 4)]
    wanted = b"".join(
        image.data[at : at + run.length].tobytes()
        for run in runs
        for at in range(run.begin, run.begin + run.count * run.stride, run.stride)
    )
    assert source.gather(runs).tobytes() == wanted
    assert len(wanted) == 500 + 1 + 100 + 4000


def test_no_request_makes_a_server_put_together_more_than_its_limit(server: ByteServer, tmp_path: Path) -> None:
    image = make_image(tmp_path / "served", elements=MOST_GATHERED // 4 + 64)
    source = RemoteSource(server.address, TOKEN, NAME, step=5)
    half = MOST_GATHERED // 2
    with pytest.raises(SourceError, match="ranges of 67108866 bytes in all are scattered; at most 67108864 are put"):
        source.gather([Runs(0, half + 1, half + 1, 2)])
    assert np.array_equal(source.gather([Runs(0, image.nbytes, image.nbytes, 1)]), image.data)
    assert np.array_equal(source.gather([Runs(0, half, half + 2, 2)])[half:], image.data[half + 2 : 2 * half + 2])


def test_an_image_that_is_overwritten_while_it_is_served_is_never_taken_for_the_old_one(
    server: ByteServer, tmp_path: Path
) -> None:
    """A writer goes through steps as fast as it can: an answer is all of the step that was asked for, or a refusal."""
    image = make_image(tmp_path / "served", 5)
    fifth = image.data.copy()
    stop = threading.Event()

    def write() -> None:
        step = 5
        while not stop.wait(0.0005):  # long enough that some answers come between two steps
            step += 1  # as of a trainer, steps never come back
            image.begin(step)
            image.data[:] = fifth ^ (step % 251)
            image.finish(step)

    def ask(step: int) -> bool | None:
        expected = (fifth ^ (step % 251)).reshape(-1, 2, 4)[:, 0].ravel()
        try:
            source = RemoteSource(server.address, TOKEN, NAME, step=step)
            return np.array_equal(source.gather([Runs(0, 4, 8, 15_000)]), expected)
        except SourceError:
            return None

    image.begin(5)
    image.data[:] = fifth ^ 5
    image.finish(5)
    outcomes = [ask(5)]
    writer = threading.Thread(target=write)
    writer.start()
    outcomes += [ask(image.step) for _ in range(500)]
    stop.set()
    writer.join()
    assert True in outcomes
    assert False not in outcomes


def test_a_server_needs_a_token(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="token"):
        ByteServer("127.0.0.1", 0, "", tmp_path)
