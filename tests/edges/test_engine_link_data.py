"""Batches and losses: whose they are, and that rows come before the loss they precede."""

import asyncio
import itertools
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop
import zmq

from gateway.core.events import BatchReceived, RankHeard, RankLost, SendBlocked
from gateway.edges.engine_link import LinkState, channel, loss
from gateway.edges.engine_link.reader import MAX_MESSAGES_PER_CALLBACK
from tests.support.link_harness import request, running_link
from tests.support.raw_engine import batch, pack, ready_response, unpack, until

FAMILIES = ("tokenspeed", "vllm")
REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_batches_arrive_decoded_and_attributed_to_their_rank(family, transport):
    async with running_link(family=family, transport=transport) as harness:
        engines = [await harness.joined_engine(index) for index in (0, 1)]
        for engine in engines:
            engine.push_rows([(f"r{engine.index}", [10, 11], ""), (f"s{engine.index}", [12], "length")])
        await until(lambda: len(harness.rows) == 4)
        for event in harness.of(BatchReceived):
            assert event.incarnation == 1
            assert list(event.batch.ids) == [f"r{event.rank}", f"s{event.rank}"]
            assert [list(tokens) for tokens in event.batch.token_ids] == [[10, 11], [12]]
            assert list(event.batch.finish) == ["", "length"]
            assert event.batch.engine_index == event.rank
        counters = harness.link.counters
        assert (counters.frames, counters.index_mismatch) == (2, 0)


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_wrong_engine_index_is_counted_and_never_believed(family):
    async with running_link(family=family, start_index=4) as harness:
        engine = await harness.joined_engine(5)
        engine.push_rows([("a", [1], "")], index=4)
        engine.push_rows([("b", [1], "")], index=5)
        await until(lambda: harness.rows == ["a", "b"])
        assert {event.rank for event in harness.of(BatchReceived)} == {1}
        assert harness.link.counters.index_mismatch == 1
        assert harness.logged("engine_index_mismatch")


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"hello", pack({"a": 1}), pack(7)])
async def test_noise_is_counted_and_the_rank_goes_on(frame):
    async with running_link() as harness:
        engine = await harness.joined_engine(0)
        engine.push(frame)
        engine.push_rows([("a", [1], "")])
        await until(lambda: harness.rows == ["a"])
        assert sum(harness.link.counters.noise.values()) == 1
        assert not harness.of(RankHeard), "no sign of life"
        assert not harness.losses


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_broken_batch_is_passed_on_as_a_faulty_one_and_counted(family):
    async with running_link(family=family) as harness:
        engine = await harness.joined_engine(0)
        engine.push(batch(family, [("a", [1], "")])[:-9])
        engine.push_rows([("b", [1], "")])
        await until(lambda: "b" in harness.rows)
        first = harness.of(BatchReceived)[0].batch
        assert first.fault is not None
        assert sum(harness.link.counters.faults.values()) == 1
        assert not harness.losses


async def test_a_vllm_control_message_is_counted_and_is_no_batch():
    async with running_link(family="vllm") as harness:
        engine = await harness.joined_engine(0)
        engine.push(bytes.fromhex("990090c0cb4004000000000000c0c003c0c0"))  # wave_complete 3
        await until(lambda: harness.link.counters.controls == 1)
        assert not harness.of(BatchReceived)


async def test_one_busy_rank_doesnt_starve_the_loop():
    async with running_link() as harness:
        engine = await harness.joined_engine(0)
        total = 20 * MAX_MESSAGES_PER_CALLBACK
        turns_at: list[int] = []

        def note_turn():
            turns_at.append(len(harness.rows))
            if len(harness.rows) < total:
                asyncio.get_running_loop().call_soon(note_turn)

        harness.stop_ticks()
        for number in range(total):
            engine.push_rows([(f"r{number}", [1], "")])
        note_turn()
        await until(lambda: len(harness.rows) == total)
        assert harness.rows == [f"r{number}" for number in range(total)]
        assert max(after - before for before, after in itertools.pairwise(turns_at)) <= (2 * MAX_MESSAGES_PER_CALLBACK)


async def test_a_handlers_exception_loses_no_later_message():
    async with running_link() as harness:
        engine = await harness.joined_engine(0)
        seen = []

        def fails_once(event):
            harness.events.append(event)
            if not seen:
                seen.append(event)
                raise LookupError("a bug in the core")

        harness.stop_ticks()
        harness.link._env.events._emit = fails_once
        for number in range(3):
            engine.push_rows([(f"r{number}", [1], "")])
        await until(lambda: harness.rows == ["r0", "r1", "r2"])
        assert [type(error) for error in harness.loop_errors] == [LookupError]
        harness.loop_errors.clear()


def held_reader(harness):
    """The reader of rank 0's batches, which reads only when it is told to: what was sent until then is read together."""
    harness.stop_ticks()
    reader = harness.link._ranks[0]._channel.output.reader
    asyncio.get_running_loop().remove_reader(reader._fd)
    return reader


async def test_queued_batches_are_joined_and_all_of_them_come_before_the_end():
    async with running_link(family="vllm") as harness:
        engine = await harness.joined_engine(0)
        reader = held_reader(harness)
        for number in range(5):
            engine.push_rows([(f"r{number}", [number], "")])
        engine.push(b"\xc1")
        engine.push_rows([("r5", [5], "")])
        engine.push_rows([("r6", [6], "stop")])
        engine.push_rows([("r7", [7], "")])
        engine.push(b"ENGINE_CORE_DEAD")
        engine.push_rows([("late", [8], "")])
        await asyncio.sleep(0.1)
        reader.drain()
        await until(lambda: harness.losses)
        batches = [event.batch for event in harness.of(BatchReceived)]
        assert [(list(batch.ids), batch.messages) for batch in batches][:3] == [
            ([f"r{number}" for number in range(5)], 5),
            (["r5", "r6"], 2),
            (["r7"], 1),
        ]
        kinds = [type(event) for event in harness.events if type(event) in (BatchReceived, RankLost)]
        assert kinds[-1] is RankLost
        assert sum(harness.link.counters.noise.values()) == 1


async def test_a_handlers_exception_over_joined_batches_loses_no_later_message():
    async with running_link(family="vllm") as harness:
        engine = await harness.joined_engine(0)
        reader = held_reader(harness)

        def fails_once(event):
            harness.events.append(event)
            if len(harness.of(BatchReceived)) == 1:
                raise LookupError("a bug in the core")

        harness.link._env.events._emit = fails_once
        for finish in ("", "stop", "", ""):
            engine.push_rows([("r", [1], finish)])
        await asyncio.sleep(0.1)
        with pytest.raises(LookupError):
            reader.drain()
        assert [event.batch.messages for event in harness.of(BatchReceived)] == [2]
        reader.drain()
        assert [event.batch.messages for event in harness.of(BatchReceived)] == [2, 2]


async def test_messages_whose_edge_was_lost_are_found_by_the_tick():
    async with running_link() as harness:
        engine = await harness.joined_engine(0)
        reader = harness.link._ranks[0]._channel.output.reader
        asyncio.get_running_loop().remove_reader(reader._fd)
        engine.push_rows([("found", [1], "")])
        await until(lambda: harness.rows == ["found"])


async def test_the_sockets_are_set_up_for_engines_that_block_on_a_full_peer_and_connections_that_die_silently():
    async with running_link() as harness:
        await harness.joined_engine(0)
        sockets = harness.link._ranks[0]._channel
        assert sockets.output.socket.getsockopt(zmq.RCVHWM) == 0
        assert sockets.input.socket.getsockopt(zmq.SNDHWM) == 1000
        for side in (sockets.input, sockets.output):
            assert side._monitor.getsockopt(zmq.RCVHWM) == 0, "a full monitor would block libzmq's thread"
        for side in (sockets.input.socket, sockets.output.socket):
            assert side.getsockopt(zmq.HEARTBEAT_IVL) == 1000
            assert side.getsockopt(zmq.HEARTBEAT_TIMEOUT) == 5000
            assert side.getsockopt(zmq.LINGER) == 0


# --- losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_a_closed_connection_is_a_loss_after_its_rows(transport):
    async with running_link(transport=transport) as harness:
        engine = await harness.joined_engine(0)
        other = await harness.joined_engine(1)
        for number in range(300):
            engine.push_rows([(f"r{number}", [1], "")])
        engine.close(linger_ms=1000)
        await until(lambda: bool(harness.losses))
        assert harness.losses == [RankLost(0, 1, "disconnected")]
        assert harness.rows == [f"r{number}" for number in range(300)]
        assert isinstance(harness.events[-1], RankLost)
        other.push_rows([("other", [1], "")])
        await until(lambda: harness.rows[-1] == "other")
        assert harness.link.counters.lost == {"disconnected": 1}


@pytest.mark.parametrize("first", ["input", "output"])
async def test_either_connection_alone_is_the_ranks(first):
    """A vLLM rank whose input thread died keeps its batch socket, and is deaf."""
    async with running_link() as harness:
        engine = await harness.joined_engine(0)
        engine.push_rows([("a", [1], "")])
        await until(lambda: harness.rows == ["a"])
        getattr(engine, first).close()
        await until(lambda: harness.losses == [RankLost(0, 1, "disconnected")])
        if first == "input":
            engine.push_rows([("orphan", [1], "")])
            await until(lambda: harness.link.counters.early_frames == 1)
            assert harness.rows == ["a"]


def start_engine_process(handshake: str, family: str, *, rows: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.support.raw_engine", handshake, family, str(rows)]
    return subprocess.Popen(command, cwd=REPOSITORY)


@pytest.mark.parametrize("family", FAMILIES)
async def test_rows_of_a_killed_engine_are_delivered_before_its_loss(family):
    """The loop stands still while the engine sends and dies, so that rows and disconnects are all there at once."""
    async with running_link(family=family, ranks=1, checks_leaks=False) as harness:
        process = start_engine_process(harness.link.handshake_addresses[0], family, rows=500)
        try:
            await until(lambda: bool(harness.joins), "the join", timeout_s=30)
            harness.link.send(0, 1, request("go"))
            process.wait(30)
        finally:
            process.kill()
            process.wait()
        await until(lambda: bool(harness.losses))
        assert harness.rows == [f"row-{number}" for number in range(500)]
        assert harness.events[-1] == RankLost(0, 1, "disconnected")


async def test_the_heartbeat_frees_a_held_hello_from_a_frozen_engine(monkeypatch):
    quick = {zmq.HEARTBEAT_IVL: 50, zmq.HEARTBEAT_TIMEOUT: 300}
    monkeypatch.setattr(channel, "_INPUT", channel._INPUT | quick)
    monkeypatch.setattr(channel, "_OUTPUT", channel._OUTPUT | quick)
    async with running_link(ranks=1, transport="tcp", checks_leaks=False) as harness:
        process = start_engine_process(harness.link.handshake_addresses[0], "tokenspeed", rows=1)
        try:
            await until(lambda: bool(harness.joins), "the join", timeout_s=30)
            process.send_signal(signal.SIGSTOP)
            successor = harness.engine(0)
            successor.hello()
            await until(lambda: harness.link.counters.handshakes.get("held") == 1)
            await successor.init()
            assert harness.losses == [RankLost(0, 1, "disconnected")]
        finally:
            process.kill()
            process.wait()


async def test_an_engine_that_was_frozen_is_re_attached_when_it_thaws(monkeypatch):
    quick = {zmq.HEARTBEAT_IVL: 50, zmq.HEARTBEAT_TIMEOUT: 300}
    monkeypatch.setattr(channel, "_INPUT", channel._INPUT | quick)
    monkeypatch.setattr(channel, "_OUTPUT", channel._OUTPUT | quick)
    async with running_link(ranks=1, transport="tcp", checks_leaks=False) as harness:
        process = start_engine_process(harness.link.handshake_addresses[0], "tokenspeed", rows=1)
        try:
            await until(lambda: bool(harness.joins), "the join", timeout_s=30)
            process.send_signal(signal.SIGSTOP)
            await until(lambda: bool(harness.losses))
            process.send_signal(signal.SIGCONT)
            await until(lambda: len(harness.joins) == 2)
            assert harness.joins[1].reattached
            harness.link.send(0, 2, request("go"))
            await until(lambda: harness.rows == ["row-0"])
        finally:
            process.kill()
            process.wait()


async def test_rows_still_in_the_batch_connection_are_awaited_when_the_request_connection_goes_first():
    async with running_link() as harness:
        engine = await harness.joined_engine(0)
        await until(lambda: harness.link._ranks[0]._channel.output.connections.is_up)
        engine.input.close()
        await until(lambda: harness.link._ranks[0]._loss is not None)
        engine.push_rows([("late", [1], "")])
        await until(lambda: bool(harness.losses))
        assert harness.rows == ["late"]
        assert isinstance(harness.events[-1], RankLost)


async def test_the_sentinel_ends_the_rank_after_the_rows_around_it():
    async with running_link() as harness:
        engine = await harness.joined_engine(0)
        engine.push_rows([("before", [1], "")])
        engine.push(b"ENGINE_CORE_DEAD")
        engine.push_rows([("after", [1], "abort")])
        await until(lambda: bool(harness.losses))
        assert harness.rows == ["before", "after"]
        assert harness.losses == [RankLost(0, 1, "sentinel")]
        assert harness.link.state_of(0) is LinkState.EMPTY
        engine.close()
        await harness.joined_engine(0)
        assert [join.incarnation for join in harness.joins] == [1, 2]
        assert len(harness.losses) == 1


async def test_a_sentinel_before_the_join_breaks_it_off():
    async with running_link() as harness:
        engine = harness.engine(0)
        engine.hello()
        await engine.init()
        engine.connect_output()
        engine.push(b"ENGINE_CORE_DEAD")
        await until(lambda: harness.link.state_of(0) is LinkState.EMPTY)
        engine.close()
        await harness.joined_engine(0)
        assert not harness.losses


async def test_a_broken_connection_of_a_living_engine_re_attaches_as_a_new_incarnation():
    async with running_link(transport="tcp") as harness:
        engine = await harness.joined_engine(0)
        engine.input.close()
        engine.output.close()
        await until(lambda: harness.link.state_of(0) is LinkState.DETACHED)
        engine.connect_input()
        engine.connect_output()
        await until(lambda: len(harness.joins) == 2)
        again = harness.joins[1]
        assert (again.incarnation, again.reattached, again.info) == (2, True, harness.joins[0].info)
        harness.link.send(0, 2, request("next"))
        assert (await engine.receive())[0] == b"\x00"
        engine.push_rows([("old-or-new", [1], "")])
        await until(lambda: harness.rows == ["old-or-new"])
        assert harness.of(BatchReceived)[0].incarnation == 2
        assert harness.send_events == [SendBlocked(0, 1)], "of the loss, nothing since"


@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "at work"])
@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_the_late_end_of_an_earlier_batch_connection_is_no_loss(family, transport, is_idle):
    async with running_link(family=family, transport=transport) as harness:
        engine = await harness.joined_engine(0)
        engine.push_rows([("a", [1], "")])
        await until(lambda: harness.rows == ["a"])
        first = engine.output
        engine.connect_output()
        await until(lambda: len(harness.joins) == 2)
        if not is_idle:
            engine.push_rows([("b", [2], "")])
            await until(lambda: "b" in harness.rows)
        first.close()
        connections = harness.link._ranks[0]._channel.output.connections
        await until(lambda: connections.live == 1)
        engine.push_rows([("c", [3], "")])
        await until(lambda: "c" in harness.rows)
        assert harness.losses == [RankLost(0, 1, "disconnected")]
        assert harness.of(BatchReceived)[-1].incarnation == 2
        engine.output.close()
        await until(lambda: harness.losses[1:] == [RankLost(0, 2, "disconnected")])


async def test_the_end_of_the_batch_connection_that_the_rank_talks_over_is_a_loss_whatever_else_is_open():
    async with running_link() as harness:
        engine = await harness.joined_engine(0)
        engine.push_rows([("a", [1], "")])
        await until(lambda: harness.rows == ["a"])
        first = engine.output
        engine.connect_output()
        await until(lambda: len(harness.joins) == 2)
        engine.push_rows([("b", [2], "")])
        await until(lambda: "b" in harness.rows)
        engine.output.close()
        await until(lambda: len(harness.losses) == 2)
        assert harness.losses[1] == RankLost(0, 2, "disconnected")
        assert not first.closed


async def test_what_arrives_while_nobody_has_joined_is_dropped_and_counted():
    async with running_link() as harness:
        engine = harness.engine(0)
        engine.hello()
        await engine.init()
        engine.connect_output()
        engine.push_rows([("nobody's", [1], "")])
        await until(lambda: harness.link.counters.early_frames == 1)
        engine.ready()
        engine.register()
        await until(lambda: len(harness.joins) == 1)
        assert not harness.rows


async def test_a_second_request_connection_of_another_peer_neither_replaces_nor_ends_the_rank():
    async with running_link(transport="tcp") as harness:
        engine = await harness.joined_engine(0)
        stray = engine.dial(engine.addresses[0], zmq.DEALER, b"\xaa\xaa")
        stray.send(b"hi")
        await until(lambda: harness.link.counters.noise.get("foreign_identity") == 1)
        stray.close()
        connections = harness.link._ranks[0]._channel.input.connections
        await until(lambda: connections.live == 1)
        harness.link.send(0, 1, request("a"))
        await engine.receive()
        assert not harness.losses


def test_the_link_runs_on_uvloop():
    async def scenario():
        async with running_link(checks_leaks=False) as harness:
            engine = await harness.joined_engine(0)
            harness.link.send(0, 1, request("a"))
            assert (await engine.receive())[0] == b"\x00"
            for number in range(500):
                engine.push_rows([(f"r{number}", [1], "")])
            engine.close(linger_ms=1000)
            await until(lambda: bool(harness.losses))
            assert harness.rows == [f"r{number}" for number in range(500)]

    uvloop.run(scenario())


async def test_closing_while_a_loss_is_pending_announces_nothing(monkeypatch):
    monkeypatch.setattr(loss, "SETTLE_S", 0.05)
    async with running_link() as harness:
        engine = await harness.joined_engine(0)
        engine.push_rows([("a", [1], "")])
        await until(lambda: harness.rows == ["a"])
        engine.output.close()
        await until(lambda: harness.link._ranks[0]._loss is not None)
        await harness.link.close()
        await asyncio.sleep(0.1)
        assert not harness.losses


async def test_a_joined_rank_that_registers_again_is_not_listened_to():
    async with running_link() as harness:
        engine = await harness.joined_engine(0)
        engine.register(ready_response("tokenspeed", max_model_len=1))
        await until(lambda: harness.link.counters.noise.get("unexpected_input") == 1)
        assert len(harness.joins) == 1


async def test_a_bad_load_report_is_counted_and_its_tokens_arrive():
    async with running_link() as harness:
        engine = await harness.joined_engine(0)
        fields = unpack(batch("tokenspeed", [("a", [1], "")]))
        engine.push(pack([*fields[:10], -5, *fields[11:]]))
        await until(lambda: harness.rows == ["a"])
        event = harness.of(BatchReceived)[0]
        assert event.batch.load is None
        assert sum(harness.link.counters.load_faults.values()) == 1


async def test_a_rank_takes_no_more_from_the_moment_its_loss_begins(monkeypatch):
    """Rows that are read before the loss is announced free slots, and the core must not fill them."""
    monkeypatch.setattr(loss, "SETTLE_S", 0.02)
    async with running_link() as harness:
        engine = await harness.joined_engine(0)
        await until(lambda: harness.link._ranks[0]._channel.output.connections.is_up)
        engine.push_rows([("last", [1], "stop")])
        engine.close()
        await until(lambda: bool(harness.losses))
        kinds = [type(event) for event in harness.events]
        assert kinds.index(SendBlocked) < kinds.index(RankLost)
        assert kinds.count(SendBlocked) == 1
