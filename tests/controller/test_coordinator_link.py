from __future__ import annotations

import asyncio

import pytest

from elastic_train.controller.coordinator_link import Address, CoordinatorLink
from elastic_train.controller.wire import Connection


async def listen() -> tuple[asyncio.Server, Address]:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[:2]


async def ended_address() -> Address:
    """Where nobody listens."""
    server, address = await listen()
    server.close()
    await server.wait_closed()
    return address


def test_coordinator_is_found_at_its_new_address() -> None:
    async def run() -> Connection | None:
        gone, (server, address) = await ended_address(), await listen()
        answers = iter([None, gone, address])
        connection = await CoordinatorLink(gone, lambda: next(answers), 60.0).connect_again(
            asyncio.get_running_loop().time()
        )
        server.close()
        return connection

    assert asyncio.run(run()) is not None


@pytest.mark.parametrize("patience", [0.0, 0.05])
def test_coordinator_that_does_not_come_back_is_given_up(patience: float) -> None:
    async def run() -> Connection | None:
        gone = await ended_address()
        link = CoordinatorLink(gone, lambda: gone, patience)
        with pytest.raises(OSError):
            await link.connect()
        return await link.connect_again(asyncio.get_running_loop().time())

    assert asyncio.run(run()) is None
