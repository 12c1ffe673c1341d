"""The network that can be broken: passes everything on, until it is told otherwise."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import zmq

from tests.chaos.proxy import Path, Side, Way
from tests.support.raw_engine import until


@asynccontextmanager
async def relayed():
    """A server, and a client that reaches it through a relay."""
    arrived, accepted = bytearray(), []

    class Server(asyncio.Protocol):
        def connection_made(self, transport):
            accepted.append(transport)

        def data_received(self, data):
            arrived.extend(data)
            accepted[-1].write(data.upper())

    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    path = Path(f"{host}:{port}")
    await path.start()
    reader, writer = await asyncio.open_connection(*path.address.split(":"))
    try:
        yield path, arrived, accepted, reader, writer
    finally:
        writer.close()
        await path.close()
        server.close()
        await server.wait_closed()


async def test_what_is_held_up_arrives_whole_after_the_release():
    async with relayed() as (path, arrived, _, reader, writer):
        writer.write(b"one")
        assert await reader.readexactly(3) == b"ONE"
        path.hold(Way.BOTH)
        writer.write(b"two" * 100_000)
        await asyncio.sleep(0.05)
        assert arrived == b"one"
        path.release()
        assert await reader.readexactly(300_000) == b"TWO" * 100_000
        assert arrived == b"one" + b"two" * 100_000


async def test_one_way_can_be_held_up_alone():
    async with relayed() as (path, arrived, _, reader, writer):
        writer.write(b"one")
        await reader.readexactly(3)
        path.hold(Way.TO_RANK)
        writer.write(b"two")
        await until(lambda: arrived == b"onetwo")
        waiting = asyncio.create_task(reader.readexactly(3))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        path.release()
        assert await waiting == b"TWO"


async def test_a_cut_resets_both_ends():
    async with relayed() as (path, _, accepted, reader, writer):
        writer.write(b"one")
        await reader.readexactly(3)
        assert path.cut() == 1
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        await until(accepted[0].is_closing)


async def test_a_half_open_end_stays_open():
    async with relayed() as (path, arrived, accepted, reader, writer):
        writer.write(b"one")
        await reader.readexactly(3)
        path.cut(side=Side.RANK)
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        await asyncio.sleep(0.05)
        assert not accepted[0].is_closing()
        assert arrived == b"one"


async def test_ranks_dial_through_it():
    """As the stub does with `socks_proxy`: libzmq speaks SOCKS5."""
    path = Path()
    await path.start()
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    try:
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        push.setsockopt_string(zmq.SOCKS_PROXY, path.address)
        push.connect(f"tcp://127.0.0.1:{port}")
        push.send(b"hello")
        await until(lambda: pull.getsockopt(zmq.EVENTS) & zmq.POLLIN)
        assert pull.recv(zmq.NOBLOCK) == b"hello"
        assert path.connected == 1
        path.cut()
        await until(lambda: path.connected == 2, "the rank to dial again")
        push.send(b"again")
        await until(lambda: pull.getsockopt(zmq.EVENTS) & zmq.POLLIN)
    finally:
        context.destroy(linger=0)
        await path.close()
