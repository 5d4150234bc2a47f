from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable

import pytest

from elastic_train.controller.wire import Connection, Message, WireError, decode, encode, token_matches

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def received(talk: Talk, limit: int | None = None) -> list[Message | WireError | None]:
    """What a server's connection receives from a peer that does ``talk``, up to the first None or error."""
    got: list[Message | WireError | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer) if limit is None else Connection(reader, writer, limit=limit)
        try:
            while not got or isinstance(got[-1], dict):
                got.append(await connection.receive())
        except WireError as error:
            got.append(error)
        finally:
            connection.close()
            done.set()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        await talk(reader, writer)
        await asyncio.wait_for(done.wait(), 60)
        writer.close()
        server.close()

    done = asyncio.Event()
    asyncio.run(run())
    return got


def sends(*pieces: bytes) -> Talk:
    """Sends each piece in a segment of its own, then closes its direction."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.write_eof()

    return talk


def test_messages_survive_the_way_whatever_is_in_them() -> None:
    messages = [
        {"type": "a", "text": 'quotes " and \n newlines', "unicode": "é\u2028\U0001f600", "none": None},
        {"type": "b", "numbers": [0, -1, 2**62, 1.5e-300], "nested": {"deep": [{"er": []}]}},
    ]
    assert all(encode(message).count(b"\n") == 1 for message in messages)
    assert [decode(encode(message)) for message in messages] == messages
    assert received(sends(*map(encode, messages))) == [*messages, None]


def test_lines_may_come_in_pieces_and_together() -> None:
    first, second, third = ({"type": "x", "n": n, "long": "y" * 100_000} for n in range(3))
    data = encode(first) + encode(second) + encode(third)
    cuts = [0, 1, 7, len(encode(first)) - 1, len(encode(first)) + 5, len(data)]
    pieces = [data[begin:end] for begin, end in itertools.pairwise(cuts)]
    assert received(sends(*pieces)) == [first, second, third, None]


def test_a_message_that_the_peer_did_not_finish_is_no_message() -> None:
    whole, torn = {"type": "whole"}, encode({"type": "torn"})[:-1]
    assert received(sends(encode(whole) + torn)) == [whole, None]
    assert received(sends()) == [None]


def test_a_line_up_to_the_limit_is_taken_and_a_longer_one_refused() -> None:
    fits = {"type": "x", "pad": ""}
    fits["pad"] = "y" * (1000 - len(encode(fits)))
    assert len(encode(fits)) == 1000
    assert received(sends(encode(fits)), limit=1000) == [fits, None]
    taken = received(sends(encode(fits | {"pad": fits["pad"] + "y"})), limit=1000)
    assert len(taken) == 1
    assert isinstance(taken[0], WireError)
    assert "1000 bytes" in str(taken[0])


def test_an_endless_line_is_refused_long_before_its_end() -> None:
    """The peer sends 64 MB without a newline; the connection must close instead of keeping them."""
    sent = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        try:
            while sent < 64 * 2**20:
                writer.write(b"x" * 65536)
                await writer.drain()
                sent += 65536
        except ConnectionError:
            pass

    taken = received(talk, limit=10_000)
    assert isinstance(taken[0], WireError)
    assert sent < 32 * 2**20


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"garbage\n",
        b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.\n",  # a pickle
        b"\xff\xfe{\x00}\x00\n",
        b"GET / HTTP/1.1\r\n",
        b"[1, 2]\n",
        b'"join"\n',
        b"null\n",
        b"{}\n",
        b'{"type": 3}\n',
        b'{"token": "x"}\n',
        b'{"type": "x"\n',
        b"[" * 100_000 + b"\n",
        b'{"type": ' + b"9" * 5000 + b"}\n",
    ],
    ids=lambda line: repr(line[:16]),
)
def test_what_is_not_a_message_is_refused(line: bytes) -> None:
    with pytest.raises(WireError):
        decode(line)
    taken = received(sends(encode({"type": "before"}), line, encode({"type": "after"})))
    assert taken[0] == {"type": "before"}
    assert isinstance(taken[1], WireError)
    assert len(taken) == 2


def test_a_refusal_says_what_was_wrong_and_repeats_little_of_it() -> None:
    with pytest.raises(WireError, match="'type'"):
        decode(b'{"kind": "join"}')
    with pytest.raises(WireError) as caught:
        decode(json.dumps(["x" * 10_000]).encode())
    assert len(str(caught.value)) < 300


def test_the_token_must_be_the_same_string() -> None:
    assert token_matches({"type": "join", "token": "sécret"}, "sécret")
    for wrong in ("secret", "", "sécret ", "sécre", "\ud800", None, 7, ["sécret"], {"sécret": 1}, True):
        assert not token_matches({"type": "join", "token": wrong}, "sécret"), wrong
    assert not token_matches({"type": "join"}, "sécret")


def test_send_never_blocks_and_drops_a_peer_that_does_not_read() -> None:
    async def run() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = Connection(reader, writer, max_backlog=2**20)
            count = 0
            while not writer.is_closing() and count < 10_000:
                connection.send({"type": "x", "pad": "y" * 10_000})  # no await: the peer gets no turn to read
                count += 1
            closed_after.set_result(count)
            connection.send({"type": "x"})  # to a closed connection: no error
            connection.abort()

        closed_after: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        _reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        count = await asyncio.wait_for(closed_after, 60)
        assert 100 < count < 10_000  # more than the backlog's 105 messages, the kernel's buffers take some
        writer.close()
        server.close()

    asyncio.run(run())
