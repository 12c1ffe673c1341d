"""What stands still is ended, at the moment that the limits say; what moves is left alone."""

import asyncio

import pytest

from gateway.config.limits import Limits
from gateway.edges.grpc_gate import CallGate
from gateway.edges.grpc_methods import Method
from gateway.edges.grpc_watch import StreamWatch
from tests.support.grpc_edge import make_config

STALL_S, IDLE_S = 10.0, 30.0


class Stream:
    def __init__(self, *, writes=0, idle_since=None):
        self.writes = writes
        self.idle_since = idle_since
        self.ended = []

    def end_stalled(self):
        self.ended.append("stalled")

    def end_idle(self):
        self.ended.append("idle")


class World:
    def __init__(self, **limits):
        self.now = 100.0
        self.hits = {"reader_stall_timeout_s": 0, "idle_stream_timeout_s": 0}
        values = {"reader_stall_timeout_s": STALL_S, "idle_stream_timeout_s": IDLE_S} | limits
        self.watch = StreamWatch(Limits(**values), self.hits, lambda: self.now)

    def add(self, **values):
        stream = Stream(**values)
        self.watch.add(stream)
        return stream

    def after(self, seconds):
        self.now += seconds
        self.watch.look(self.now)


def test_a_write_that_is_not_taken_ends_the_stream_once():
    world = World()
    stream = world.add(writes=3)
    world.after(STALL_S - 0.1)
    assert stream.ended == []
    world.after(0.1)
    assert stream.ended == ["stalled"]
    world.after(STALL_S)
    assert stream.ended == ["stalled"]
    assert world.hits == {"reader_stall_timeout_s": 1, "idle_stream_timeout_s": 0}
    assert len(world.watch) == 0


def test_each_write_that_is_taken_gives_the_next_one_its_time():
    world = World()
    stream = world.add(writes=1)
    for _ in range(10):
        world.after(STALL_S - 0.1)
        stream.writes += 2
    assert stream.ended == []


def test_a_stream_that_has_nothing_to_write_is_not_stalled():
    world = World()
    stream = world.add(writes=4)
    world.after(100 * STALL_S)
    assert stream.ended == []


def test_an_idle_stream_ends_counted_from_when_it_became_idle():
    world = World()
    stream = world.add()
    world.after(100 * IDLE_S)
    assert stream.ended == []
    stream.idle_since = world.now
    world.after(IDLE_S - 0.1)
    assert stream.ended == []
    world.after(0.1)
    assert stream.ended == ["idle"]
    assert world.hits == {"reader_stall_timeout_s": 0, "idle_stream_timeout_s": 1}


@pytest.mark.parametrize("limit", ["reader_stall_timeout_s", "idle_stream_timeout_s"])
def test_null_is_no_limit(limit):
    world = World(**{limit: None})
    stream = world.add(
        writes=1 if limit.startswith("reader") else 0, idle_since=None if limit.startswith("reader") else 0
    )
    world.after(1e9)
    assert stream.ended == []


def test_what_was_discarded_is_left_alone():
    world = World()
    stream = world.add(writes=1)
    world.watch.discard(stream)
    world.watch.discard(stream)
    world.after(1e6)
    assert stream.ended == []


def test_one_that_ends_others_does_not_disturb_the_look():
    world = World()
    streams = [world.add(writes=1) for _ in range(5)]
    streams[0].end_stalled = lambda: [world.watch.discard(stream) for stream in streams]
    world.after(STALL_S)
    assert all(len(stream.ended) <= 1 for stream in streams)
    assert len(world.watch) == 0


@pytest.mark.parametrize(
    ("stall_s", "idle_s", "interval_s"),
    [(60.0, 600.0, 1.0), (2.0, 600.0, 0.5), (60.0, 0.4, 0.1), (None, None, 1.0)],
)
def test_time_outs_are_kept_to_within_a_quarter(stall_s, idle_s, interval_s):
    world = World(reader_stall_timeout_s=stall_s, idle_stream_timeout_s=idle_s)
    assert world.watch.interval_s == pytest.approx(interval_s)


class Transport:
    """As much of a call as the gate looks at."""

    def __init__(self, peer):
        self._peer = peer
        for name in (
            "write",
            "send_initial_metadata",
            "set_trailing_metadata",
            "invocation_metadata",
            "time_remaining",
        ):
            setattr(self, name, None)

    def peer(self):
        return self._peer


async def test_connections_are_counted_by_their_peers():
    gate, go_on = CallGate(make_config()), asyncio.Event()

    async def stay(data, context):
        await go_on.wait()

    call = gate.open(Method("M", "unary", stay))
    calls = [asyncio.create_task(call(b"", Transport(peer))) for peer in ("a:1", "a:1", "a:2", "b:1")]
    await asyncio.sleep(0)
    assert (gate.streams, gate.connections) == (4, 3)
    calls[0].cancel()
    await asyncio.gather(calls[0], return_exceptions=True)
    assert (gate.streams, gate.connections) == (3, 3)
    go_on.set()
    await asyncio.gather(*calls[1:])
    assert (gate.streams, gate.connections) == (0, 0)
