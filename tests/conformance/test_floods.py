"""Floods against a server in its own process: each ends with the right code after a bounded count, in bounded memory.

Meanwhile another client, on its own connection, goes on with its stream.
"""

import asyncio
import contextlib
import time

import pytest

from tests.conformance.flood_kinds import FLOODS, LIMITS, attack, tiny_window, wide_window
from tests.conformance.floods import Honest, attacked
from tests.conformance.wire import CANCEL, GREETING, connected

MAX_GROWTH_MB = 24.0
WAIT_S = 60.0
FRAMES_PER_S = 300
"""What the budgets get back: 100 resets or others, of up to three frames each."""
PAUSES_S = (0.002, 0.02, 0.2)
"""Between batches: the server is to read one before the next, however busy the machine is."""


@pytest.fixture(scope="module")
def server():
    with attacked() as server:
        yield server


@contextlib.asynccontextmanager
async def unharmed(server):
    """Nothing that happens in the block reaches another client or stays in memory."""
    honest = Honest(server.address)
    talking = asyncio.ensure_future(honest.talk())
    while not honest.waits_s:
        assert not talking.done()
        await asyncio.sleep(0.01)
    before_mb, turns = server.rss_mb, len(honest.waits_s)
    yield
    grown_mb = server.rss_mb - before_mb
    while len(honest.waits_s) < turns + 3:
        assert not talking.done()
        await asyncio.sleep(0.01)
    honest.stop()
    await talking
    assert grown_mb < MAX_GROWTH_MB


@pytest.mark.parametrize("flood", FLOODS, ids=lambda flood: flood.name)
async def test_a_flood_ends(server, flood):
    async with unharmed(server):
        for pause_s in PAUSES_S:
            began_at = time.monotonic()
            code, sent = await attack(flood, server.address, WAIT_S, pause_s)
            if code is not None:
                break
    assert code in flood.codes
    assert sent <= flood.max_frames + FRAMES_PER_S * (time.monotonic() - began_at)


async def test_readers_that_take_one_byte_are_ended_stream_by_stream(server):
    async with unharmed(server), connected(server.address) as hostile:
        hostile.send(tiny_window())
        assert await hostile.until(lambda _: len(hostile.resets) == 100, WAIT_S)
        assert {code for _, code in hostile.resets} == {CANCEL}
        assert sum(len(each.payload) for each in hostile.frames if each.kind == 0) <= 100


async def test_a_client_with_open_windows_that_reads_nothing_costs_no_memory(server):
    async with unharmed(server), connected(server.address) as hostile:
        hostile.transport.pause_reading()
        hostile.send(wide_window())
        await hostile.drain()
        await asyncio.sleep(2 * LIMITS["unread_timeout_s"])


async def test_more_connections_than_allowed(server):
    async with contextlib.AsyncExitStack() as cleanup, unharmed(server):
        wires = []
        for _ in range(LIMITS["max_connections"] + 50):
            with contextlib.suppress(ConnectionError):
                wires.append(await cleanup.enter_async_context(connected(server.address)))
                wires[-1].send(GREETING)
        ends = await asyncio.gather(*(_is_closed(wire) for wire in wires))
        assert ends.count(True) >= 50
        assert ends.count(False) >= LIMITS["max_connections"] - 10


async def _is_closed(wire):
    """Within a moment."""
    with contextlib.suppress(TimeoutError):
        return await wire.until(lambda _: False, 2.0) is None
    return False
