"""Incarnations that the core gives up while the rank's sockets stay: the numbers of both agree, in any order."""

import pytest

from gateway.core.events import BatchReceived, RankHeard, RankJoined, RankLost, RankRenewed, SendFailed
from gateway.edges.engine_link import LinkState, loss
from tests.support.link_harness import request, running_link
from tests.support.raw_engine import pack, unpack, until

FAMILIES = ["tokenspeed", "vllm"]


@pytest.mark.parametrize("family", FAMILIES)
async def test_what_comes_after_it_is_the_next_incarnations_and_so_is_what_is_sent(family):
    async with running_link(family=family) as harness:
        engine = await harness.joined_engine(0)
        engine.push_rows([("a", [1], "")])
        await until(lambda: harness.rows == ["a"])
        harness.link.renew(0, 1)
        assert not harness.of(RankRenewed), "the driver is still running effects"
        engine.push_rows([("a", [2], "")])
        await until(lambda: harness.rows == ["a", "a"])
        kinds = [event for event in harness.events if isinstance(event, RankRenewed | BatchReceived)]
        assert isinstance(kinds[1], RankRenewed), "before any message of it"
        assert [event.incarnation for event in kinds] == [1, 2, 2]
        assert not harness.losses
        assert harness.link.state_of(0) is LinkState.JOINED

        harness.link.send(0, 1, request("old"))
        await until(lambda: harness.of(SendFailed) == [SendFailed(0, 1, "old", "unreachable")])
        harness.link.send(0, 2, request("new"))
        frames = await engine.receive()
        assert unpack(frames[1])[1 if family == "tokenspeed" else 0] == "new"
        harness.link.abort(0, 2, ["a"])
        assert await engine.receive() == [b"\x01", pack(["a"])]


async def test_only_the_incarnation_that_the_link_has_is_renewed():
    async with running_link() as harness:
        harness.link.renew(0, 0)
        harness.link.renew(0, 1)
        await harness.joined_engine(0)
        for incarnation in (0, 2, 7):
            harness.link.renew(0, incarnation)
        harness.link.renew(0, 1)
        harness.link.renew(0, 1)
        await until(lambda: bool(harness.of(RankRenewed)))
        assert harness.of(RankRenewed) == [RankRenewed(0, 2)]
        assert harness.link.counters.handshakes["renewed"] == 1


async def test_a_loss_that_is_under_way_wins(monkeypatch):
    monkeypatch.setattr(loss, "SETTLE_S", 0.05)
    async with running_link() as harness:
        engine = await harness.joined_engine(0)
        engine.close()
        await until(lambda: harness.link._ranks[0]._loss is not None)
        harness.link.renew(0, 1)
        await until(lambda: bool(harness.losses))
        assert harness.losses == [RankLost(0, 1, "disconnected")]
        assert not harness.of(RankRenewed)
        await harness.joined_engine(0)
        assert harness.joins[-1].incarnation == 2


@pytest.mark.parametrize("is_new", [True, False], ids=["new process", "same process"])
async def test_it_is_lost_and_joins_with_numbers_of_its_own_afterwards(is_new):
    async with running_link() as harness:
        engine = await harness.joined_engine(0)
        harness.link.renew(0, 1)
        await until(lambda: bool(harness.of(RankRenewed)))
        if is_new:
            engine.close()
            await until(lambda: bool(harness.losses))
            await harness.joined_engine(0)
        else:
            engine.input.close()
            await until(lambda: bool(harness.losses))
            engine.connect_input()
            await until(lambda: len(harness.joins) == 2)
        assert harness.losses == [RankLost(0, 2, "disconnected")]
        last = harness.of(RankJoined)[-1]
        assert (last.incarnation, last.reattached) == (3, not is_new)


async def test_a_message_that_is_no_batch_is_a_sign_of_life_of_who_has_joined():
    async with running_link() as harness:
        engine = await harness.joined_engine(0)
        engine.output.send(b"\xc1")
        await until(lambda: bool(harness.of(RankHeard)))
        assert harness.of(RankHeard) == [RankHeard(0, 1)]
        harness.link.renew(0, 1)
        engine.output.send(b"")
        await until(lambda: len(harness.of(RankHeard)) == 2)
        assert harness.of(RankHeard)[1] == RankHeard(0, 2)
