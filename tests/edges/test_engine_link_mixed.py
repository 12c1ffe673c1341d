"""Batches that came over different connections of one rank are never passed on as one stream.

A rank has one connection for batches. When it has another, what was under way on the first is lost, and the socket
hands out what is left of both in turns: tokens would be missing, or in the wrong order.
"""

import asyncio
import time

import pytest
import zmq

from gateway.core.events import BatchReceived, RankLost
from gateway.edges.engine_link import LinkState, channel
from tests.chaos import proxy
from tests.support.link_harness import running_link
from tests.support.raw_engine import until


def arrive() -> None:
    """Let libzmq's threads do their work while the gateway's loop stands still, as on a host that is overloaded."""
    time.sleep(0.3)


def rows_of(harness, incarnation: int) -> list[str]:
    batches = [event for event in harness.of(BatchReceived) if event.incarnation == incarnation]
    return [wire_id for event in batches for wire_id in event.batch.ids]


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@pytest.mark.parametrize("family", ["tokenspeed", "vllm"])
async def test_a_connection_that_was_replaced_while_nobody_looked(family, transport):
    async with running_link(family=family, transport=transport) as harness:
        engine = await harness.joined_engine()
        engine.push_rows([("first", [1], "")])
        await until(lambda: harness.rows == ["first"])
        engine.push_rows([("before", [1], "")])
        arrive()
        engine.output.close()
        arrive()
        engine.connect_output()
        for number in range(5):
            engine.push_rows([(f"after-{number}", [number], "")])
        arrive()
        await until(lambda: len(harness.joins) == 2)
        # Which connection a message of the two came over can't be told: neither's is passed on.
        assert rows_of(harness, 1) == ["first"]
        assert [(lost.incarnation, lost.cause) for lost in harness.losses] == [(1, "disconnected")]
        assert harness.joins[1].reattached
        engine.push_rows([("next", [1], "")])
        await until(lambda: "next" in rows_of(harness, 2))
        assert len(harness.losses) == 1


@pytest.mark.parametrize("family", ["tokenspeed", "vllm"])
async def test_a_second_connection_while_the_first_looks_alive(family):
    """Only the rank knows that its connection broke: the gateway's end is half open."""
    async with running_link(family=family, transport="tcp") as harness:
        engine = await harness.joined_engine()
        engine.push_rows([("first", [1], "")])
        await until(lambda: harness.rows == ["first"])
        half_open = engine.output
        engine.connect_output()
        engine.push_rows([("after", [2], "")])
        await until(lambda: len(harness.joins) == 2)
        assert rows_of(harness, 1) == ["first"]
        lost, joined = (harness.events.index(event) for event in (harness.losses[0], harness.joins[1]))
        assert lost < joined
        engine.push_rows([("next", [1], "")])
        await until(lambda: "next" in rows_of(harness, 2))
        half_open.close()
        connections = harness.link._ranks[0]._channel.output.connections
        await until(lambda: connections.live == 1)
        engine.push_rows([("last", [1], "")])
        await until(lambda: "last" in rows_of(harness, 2))
        assert harness.link.state_of(0) is LinkState.JOINED
        assert len(harness.losses) == 1


async def test_a_rank_without_a_connection_for_batches_yet_is_not_lost_by_its_first():
    """A rank joins by its requests' connection; the batches' may come later."""
    async with running_link(family="tokenspeed", transport="tcp") as harness:
        engine = harness.engine()
        engine.hello()
        await engine.init()
        engine.ready()
        engine.register()
        await until(lambda: len(harness.joins) == 1)
        engine.connect_output()
        engine.push_rows([("first", [1], "")])
        await until(lambda: harness.rows == ["first"])
        await asyncio.sleep(0)
        assert not harness.of(RankLost)


async def test_a_rank_whose_connection_broke_at_the_gateways_end_only_dials_again(monkeypatch):
    """It has no heartbeats of its own: the gateway's tell it to expect more, and to dial again when none come."""
    heartbeats = {zmq.HEARTBEAT_IVL: 50, zmq.HEARTBEAT_TIMEOUT: 2000, zmq.HEARTBEAT_TTL: 400}
    for options in ("_INPUT", "_OUTPUT"):
        monkeypatch.setattr(channel, options, getattr(channel, options) | heartbeats)
    monkeypatch.setattr(proxy, "TOLD_AFTER_S", 60.0)  # not by TCP
    async with running_link(transport="tcp", checks_leaks=False) as harness:
        path = proxy.Path()
        await path.start()
        engine = await harness.joined_engine(proxy=path.address)
        engine.push_rows([("first", [1], "")])
        await until(lambda: harness.rows == ["first"])
        await asyncio.sleep(0.2)  # for the first heartbeat
        path.cut(side=proxy.Side.GATEWAY)
        await until(lambda: len(harness.losses) == 1)
        await until(lambda: len(harness.joins) == 2, "the rank to dial again")
        engine.push_rows([("next", [1], "")])
        await until(lambda: "next" in rows_of(harness, 2))
        await path.close()


def test_the_time_to_live_of_heartbeats_is_longer_than_the_time_between_them():
    for options in (channel._INPUT, channel._OUTPUT):
        assert options[zmq.HEARTBEAT_TTL] > 2 * options[zmq.HEARTBEAT_IVL]
