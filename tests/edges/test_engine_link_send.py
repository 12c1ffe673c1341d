"""Requests and aborts to a rank, and what happens when it doesn't take them."""

import asyncio

import pytest

from gateway.core.events import SendBlocked, SendFailed, SendUnblocked
from gateway.edges.engine_link import link, loss, sender
from gateway.edges.engine_link.send_queue import SendQueue
from tests.support.link_harness import request, running_link
from tests.support.raw_engine import pack, unpack, until

BIG = 60_000
"""Prompt tokens of a request that fills socket buffers quickly (about 180 kB)."""


def id_in(frames: list[bytes], family: str) -> str:
    assert frames[0] == b"\x00"
    payload = unpack(frames[1])
    return payload[1] if family == "tokenspeed" else payload[0]


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@pytest.mark.parametrize("family", ["tokenspeed", "vllm"])
async def test_adds_and_aborts_reach_the_rank_in_order(family, transport):
    async with running_link(family=family, transport=transport) as harness:
        engine = await harness.joined_engine(0)
        other = await harness.joined_engine(1)
        harness.link.send(0, 1, request("a"))
        harness.link.abort(0, 1, ["a", "unknown"])
        harness.link.send(0, 1, request("b"))
        first, second, third = [await engine.receive() for _ in range(3)]
        assert id_in(first, family) == "a"
        assert second == [b"\x01", pack(["a", "unknown"])]
        assert id_in(third, family) == "b"
        assert not other.received()
        assert not harness.send_events
        assert (harness.link.counters.adds, harness.link.counters.aborted_ids) == (2, 2)


def fill(harness, prefix="f", limit=3000) -> list[str]:
    """Send until the rank's FIFO is in use; the ids that were sent, the last of which is queued."""
    sent = []
    while not harness.link._ranks[0]._sender._queue:
        sent.append(f"{prefix}{len(sent)}")
        harness.link.send(0, 1, request(sent[-1], BIG))
        assert len(sent) < limit
    return sent


async def blocked_engine(harness):
    engine = await harness.joined_engine(0, receive_hwm=1)
    sent = fill(harness)
    await until(lambda: harness.of(SendBlocked) != [])
    # libzmq's thread is still moving messages to the kernel: go on until it stays full.
    queue = harness.link._ranks[0]._sender._queue
    while True:
        before = len(harness.send_events)
        await asyncio.sleep(0.3)
        if not queue:
            sent += fill(harness, prefix=f"g{before}-")
        elif len(harness.send_events) == before:
            return engine, sent


async def test_a_rank_that_doesnt_read_blocks_and_unblocks_without_losing_or_reordering(monkeypatch):
    monkeypatch.setattr("gateway.edges.engine_link.channel._INPUT", small_hwm())
    async with running_link() as harness:
        engine, sent = await blocked_engine(harness)
        assert isinstance(harness.send_events[-1], SendBlocked)
        for number in range(20):
            sent.append(f"queued-{number}")
            harness.link.send(0, 1, request(sent[-1]))
        blocks = harness.link.counters.send_blocked
        received = [id_in(await engine.receive(), "tokenspeed") for _ in sent]
        assert received == sent
        await until(lambda: isinstance(harness.send_events[-1], SendUnblocked))
        assert [type(event) for event in harness.send_events] == [SendBlocked, SendUnblocked] * blocks
        assert harness.link.counters.adds == len(sent)


async def test_the_abort_of_a_queued_add_takes_both_back(monkeypatch):
    monkeypatch.setattr("gateway.edges.engine_link.channel._INPUT", small_hwm())
    async with running_link() as harness:
        engine, sent = await blocked_engine(harness)
        harness.link.send(0, 1, request("never-seen"))
        harness.link.send(0, 1, request("kept"))
        harness.link.abort(0, 1, ["never-seen", sent[0]])
        messages = [await engine.receive() for _ in range(len(sent) + 2)]
        aborts = [unpack(frames[1]) for frames in messages if frames[0] == b"\x01"]
        adds = [id_in(frames, "tokenspeed") for frames in messages if frames[0] == b"\x00"]
        assert adds == [*sent, "kept"]
        assert aborts == [[sent[0]]]
        await until(lambda: isinstance(harness.send_events[-1], SendUnblocked))
        assert not engine.received()


async def test_taking_back_all_that_was_queued_unblocks_the_rank(monkeypatch):
    monkeypatch.setattr("gateway.edges.engine_link.channel._INPUT", small_hwm())
    async with running_link() as harness:
        _, sent = await blocked_engine(harness)
        queued = list(harness.link._ranks[0]._sender._queue._adds)
        assert queued == [sent[-1]]
        harness.link.abort(0, 1, queued)
        await until(lambda: isinstance(harness.send_events[-1], SendUnblocked))


async def test_more_than_the_fifo_holds_fails_with_overflow(monkeypatch):
    monkeypatch.setattr("gateway.edges.engine_link.channel._INPUT", small_hwm())
    monkeypatch.setattr(sender, "SendQueue", lambda: SendQueue(max_messages=2))
    async with running_link() as harness:
        await blocked_engine(harness)
        harness.link.send(0, 1, request("second"))
        harness.link.send(0, 1, request("third"))
        harness.link.send(0, 1, request("fourth"))
        await until(lambda: len(harness.of(SendFailed)) == 2)
        assert harness.of(SendFailed) == [SendFailed(0, 1, name, "overflow") for name in ("third", "fourth")]
        assert harness.link.counters.send_failed == {"overflow": 2}


def small_hwm() -> dict[int, int]:
    import zmq

    from gateway.edges.engine_link.channel import _INPUT

    return _INPUT | {zmq.SNDHWM: 4, zmq.SNDBUF: 65536}


@pytest.mark.parametrize("cause", ["encode", "unreachable"])
async def test_failures_come_back_as_events_in_a_later_turn(cause):
    async with running_link() as harness:
        await harness.joined_engine(0)
        bad = request("a")
        if cause == "encode":
            bad = type(bad)(wire_id="a", prompt_token_ids=[object()], sampling=bad.sampling)
            harness.link.send(0, 1, bad)
        else:
            harness.link.send(1, 1, bad)
        assert not harness.send_events, "the driver is still running effects"
        await until(lambda: bool(harness.send_events))
        rank = 0 if cause == "encode" else 1
        assert harness.send_events == [SendFailed(rank, 1, "a", cause)]
        assert harness.link.counters.send_failed == {cause: 1}


async def test_a_send_to_an_older_incarnation_fails_and_an_abort_is_dropped():
    async with running_link() as harness:
        engine = await harness.joined_engine(0)
        engine.close()
        await until(lambda: bool(harness.losses))
        successor = await harness.joined_engine(0)
        harness.link.send(0, 1, request("a"))
        harness.link.abort(0, 1, ["b", "c"])
        await until(lambda: harness.send_events == [SendBlocked(0, 1), SendFailed(0, 1, "a", "unreachable")])
        harness.link.send(0, 2, request("d"))
        assert id_in(await successor.receive(), "tokenspeed") == "d"
        assert harness.link.counters.aborts_dropped == 2


async def test_a_refused_send_is_a_hint_and_the_monitor_decides():
    async with running_link() as harness:
        engine = await harness.joined_engine(0)
        channel = harness.link._ranks[0]._channel
        channel._identity = b"\x99\x99"  # nobody: what libzmq answers for a peer that is gone
        harness.link.send(0, 1, request("a"))
        harness.link.abort(0, 1, ["z"])
        await until(lambda: harness.send_events[:2] == [SendBlocked(0, 1), SendFailed(0, 1, "a", "unreachable")])
        assert not harness.losses
        assert harness.link.counters.aborts_dropped == 1
        await until(lambda: harness.send_events[2:] == [SendUnblocked(0, 1)], "the end of the pause")
        engine.close()
        await until(lambda: len(harness.losses) == 1)


async def test_a_send_between_a_disconnect_and_its_announcement_fails(monkeypatch):
    monkeypatch.setattr(loss, "SETTLE_S", 0.05)
    async with running_link() as harness:
        engine = await harness.joined_engine(0)
        await until(lambda: harness.link._ranks[0]._channel.output.connections.is_up)
        engine.output.close()  # requests would still be taken
        await until(lambda: harness.link._ranks[0]._loss is not None)
        harness.link.send(0, 1, request("a"))
        await until(lambda: bool(harness.losses))
        assert harness.send_events == [SendBlocked(0, 1), SendFailed(0, 1, "a", "unreachable")]


async def test_an_event_that_leads_to_another_failure_doesnt_hold_the_loop():
    """A core that re-routes at once from within `SendFailed` must not recurse or spin."""
    async with running_link() as harness:
        attempts = []

        def reroute(event):
            harness.events.append(event)
            if isinstance(event, SendFailed) and len(attempts) < 50:
                attempts.append(event)
                harness.link.send(1, 1, request(f"again-{len(attempts)}"))

        harness.link._env.events._emit = reroute
        harness.link.send(0, 1, request("first"))
        await until(lambda: len(harness.send_events) == 51)


@pytest.mark.parametrize("is_waiting", [True, False])
async def test_the_socket_is_looked_at_after_a_send_while_one_waits_for_room(is_waiting):
    """The send may have consumed the edge that says that there is room; nothing else matters of this socket."""
    async with running_link() as harness:
        await harness.joined_engine(0)
        looks = []
        reader = harness.link._ranks[0]._channel.input.reader
        reader.wants_write, reader.poke = is_waiting, lambda: looks.append(None)
        harness.link.send(0, 1, request("a"))
        assert bool(looks) == is_waiting
        reader.wants_write = False
        del reader.poke


async def test_what_was_sent_just_before_close_still_leaves(monkeypatch):
    monkeypatch.setattr(link, "CLOSE_LINGER_MS", 5000)  # its length is no subject here
    async with running_link() as harness:
        engine = await harness.joined_engine(0, receive_hwm=1)
        for number in range(30):
            harness.link.send(0, 1, request(f"r{number}", BIG))
        harness.link.abort(0, 1, ["last"])
        assert not harness.link._ranks[0]._sender._queue, "all is with libzmq"
        closing = asyncio.ensure_future(harness.link.close())
        messages = [await engine.receive() for _ in range(31)]
        assert messages[-1] == [b"\x01", pack(["last"])]
        await closing


async def test_close_is_idempotent_and_quiet():
    async with running_link() as harness:
        await harness.joined_engine(0)
        harness.link.send(1, 1, request("deferred"))
        await harness.link.close()
        await harness.link.close()
        assert not harness.send_events
        assert not harness.losses


async def test_close_before_start_does_nothing():
    async with running_link() as harness:
        pass
    await harness.link.close()
