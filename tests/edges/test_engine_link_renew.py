"""Incarnations that the core gives up while the rank's sockets stay: the numbers of both agree, in any order."""

import errno

import pytest

from gateway.core.events import (
    BatchReceived,
    LoadReported,
    RankHeard,
    RankJoined,
    RankLost,
    RankRenewed,
    SendFailed,
)
from gateway.edges.engine_link import LinkState, loss
from gateway.edges.engine_link.opener import ChannelOpener
from tests.support.link_harness import request, running_link
from tests.support.raw_engine import pack, unpack, until

FAMILIES = ["tokenspeed", "vllm"]
CONTROL = bytes.fromhex("990090c0cb4004000000000000c0c003c0c0")
"""A vLLM rank's word that wave 3 is complete: no batch."""


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
    async with running_link(family="vllm") as harness:
        engine = await harness.joined_engine(0)
        engine.push(CONTROL)
        await until(lambda: bool(harness.of(RankHeard)))
        assert harness.of(RankHeard) == [RankHeard(0, 1)]
        harness.link.renew(0, 1)
        engine.push(CONTROL)
        await until(lambda: len(harness.of(RankHeard)) == 2)
        assert harness.of(RankHeard)[1] == RankHeard(0, 2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_held", [True, False], ids=["dialled before", "dials afterwards"])
async def test_a_new_process_is_answered_while_the_old_one_says_nothing(family, is_held):
    """The sockets of a process that hangs live for ever."""
    async with running_link(family=family) as harness:
        await harness.joined_engine(0)
        successor = harness.engine(0)
        if is_held:
            successor.hello()
            await until(lambda: harness.link.counters.handshakes.get("held") == 1)
            harness.stop_ticks()
        harness.link.renew(0, 1)
        assert not harness.losses, "the driver is still running effects"
        if is_held:
            await successor.init()
            successor.ready()
            successor.register()
            successor.connect_output()
        else:
            await successor.join()
        await until(lambda: len(harness.joins) == 2)
        kinds = RankJoined | RankRenewed | RankLost
        order = [(type(event), event.incarnation) for event in harness.events if isinstance(event, kinds)]
        assert order == [(RankJoined, 1), (RankRenewed, 2), (RankLost, 2), (RankJoined, 3)]
        assert harness.losses[0].cause == "replaced"
        assert harness.link.counters.lost == {"replaced": 1}
        harness.link.send(0, 2, request("old"))
        harness.link.send(0, 3, request("new"))
        frames = await successor.receive()
        assert unpack(frames[1])[1 if family == "tokenspeed" else 0] == "new"
        await until(lambda: [event.wire_id for event in harness.of(SendFailed)] == ["old"])


@pytest.mark.parametrize("sign", ["batch", "control", "report"])
async def test_once_it_is_heard_again_a_new_process_waits(sign):
    async with running_link(family="vllm") as harness:
        engine = await harness.joined_engine(0)
        harness.link.renew(0, 1)
        match sign:
            case "batch":
                engine.push_rows([("a", [1], "")])
            case "control":
                engine.push(CONTROL)
            case "report":
                engine.report(1, 0)
        await until(lambda: bool(harness.of(BatchReceived) or harness.of(RankHeard) or harness.of(LoadReported)))
        successor = harness.engine(0)
        successor.hello()
        await until(lambda: harness.link.counters.handshakes.get("held") == 1)
        engine.push_rows([("b", [2], "")])
        await until(lambda: "b" in harness.rows)
        assert not harness.losses
        engine.close()
        await successor.init()
        assert harness.losses == [RankLost(0, 2, "disconnected")]


@pytest.mark.parametrize("family", FAMILIES)
async def test_what_can_not_be_read_is_no_sign_of_life(family):
    async with running_link(family=family) as harness:
        engine = await harness.joined_engine(0)
        harness.link.renew(0, 1)
        engine.push(b"")
        await until(lambda: sum(harness.link.counters.noise.values()) == 1)
        await harness.joined_engine(0)
        assert harness.losses == [RankLost(0, 2, "replaced")]


async def test_a_new_process_that_is_gone_already_costs_the_silent_one_nothing():
    async with running_link() as harness:
        engine = await harness.joined_engine(0)
        successor = harness.engine(0)
        successor.hello()
        await until(lambda: harness.link.counters.handshakes.get("held") == 1)
        successor.close()
        port = harness.link._ports[0]
        await until(lambda: not port.send_init(successor.identity, b""), "the end of its connection")
        harness.link.renew(0, 1)
        await until(lambda: harness.link.counters.handshakes.get("init_undeliverable") == 1)
        assert harness.link.state_of(0) is LinkState.JOINED
        engine.push_rows([("a", [1], "")])
        await until(lambda: harness.rows == ["a"])
        assert not harness.losses


async def test_without_sockets_for_the_new_process_it_is_answered_later(monkeypatch):
    async with running_link() as harness:
        await harness.joined_engine(0)
        harness.link.renew(0, 1)

        def exhausted(self, owner):
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(ChannelOpener, "fresh", exhausted)
        successor = harness.engine(0)
        successor.hello()
        await until(lambda: harness.link.counters.handshakes.get("no_sockets", 0) >= 1)
        assert not harness.losses
        monkeypatch.undo()
        await successor.init()
        await until(lambda: harness.losses == [RankLost(0, 2, "replaced")])
