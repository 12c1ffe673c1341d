"""How messages are taken from a socket: bounded, none twice, none lost, and no look more than needed."""

import asyncio
import os

import pytest
import zmq

from gateway.edges.engine_link import io_thread, reader
from gateway.edges.engine_link.reader import MAX_MESSAGES_PER_CALLBACK, SocketReader


class Pair:
    """A socket with its reader, and what it read."""

    def __init__(self, on_message=None):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.bind("inproc://here")
        self.other = self.context.socket(zmq.PUSH)
        self.other.setsockopt(zmq.SNDHWM, 0)
        self.other.connect("inproc://here")
        self.steps = []
        self.reader = SocketReader(asyncio.get_running_loop(), self.socket, on_message or self.note)
        self.reader.on_read = lambda: self.steps.append("read")

    def note(self, frames):
        self.steps.append(b"".join(frame.bytes for frame in frames))

    def send(self, *names):
        for name in names:
            self.other.send(name)

    def close(self):
        self.reader.close()
        self.socket.close(0)
        self.other.close(0)
        self.context.term()


@pytest.fixture
async def pair():
    pair = Pair()
    yield pair
    pair.close()


async def test_what_was_read_is_announced_once_and_before_it_is_handled(pair):
    pair.send(b"a", b"b")
    assert pair.reader.drain()
    assert pair.steps == ["read", b"a", b"b"]
    assert pair.reader.drain()
    assert pair.steps == ["read", b"a", b"b"], "nothing was read"


async def test_all_frames_of_a_message_come_together(pair):
    pair.other.send_multipart([b"a", b"b", b"c"])
    pair.send(b"d")
    assert pair.reader.drain()
    assert pair.steps == ["read", b"abc", b"d"]


@pytest.mark.parametrize("count", [1, 2, MAX_MESSAGES_PER_CALLBACK, MAX_MESSAGES_PER_CALLBACK + 1])
async def test_one_call_handles_a_bounded_number(pair, count):
    pair.send(*[b"x"] * count)
    assert pair.reader.drain() == (count < MAX_MESSAGES_PER_CALLBACK)
    assert pair.steps.count(b"x") == min(count, MAX_MESSAGES_PER_CALLBACK)
    pair.reader.drain()
    assert pair.steps.count(b"x") == count


async def test_a_single_message_costs_no_exception(pair, monkeypatch):
    """Which would be dearer than the message."""
    calls = []
    receive = reader._recv
    monkeypatch.setattr(reader, "_recv", lambda *arguments: calls.append(None) or receive(*arguments))
    pair.send(b"a")
    assert pair.reader.drain()
    assert len(calls) == 1


async def test_no_more_is_read_ahead_than_the_bound(pair, monkeypatch):
    monkeypatch.setattr(reader, "MAX_HELD_BYTES", 100)
    pair.send(b"x" * 60, b"y" * 60, b"z" * 60)
    assert not pair.reader.drain()
    assert pair.steps == ["read", b"x" * 60, b"y" * 60]
    pair.reader.drain()
    assert pair.steps[3:] == ["read", b"z" * 60]


async def test_what_was_read_before_a_handlers_exception_is_handled_by_the_next_call():
    def handle(frames):
        if frames[0].bytes == b"bad":
            raise LookupError
        pair.note(frames)

    pair = Pair(handle)
    pair.send(b"a", b"bad", b"b", b"c")
    with pytest.raises(LookupError):
        pair.reader.drain()
    pair.send(b"d")
    assert pair.reader.drain()
    assert [step for step in pair.steps if step != "read"] == [b"a", b"b", b"c", b"d"]
    pair.close()


async def test_a_handler_that_closes_the_reader_gets_no_more():
    def handle(frames):
        pair.note(frames)
        pair.reader.close()

    pair = Pair(handle)
    pair.send(b"a", b"b")
    pair.reader.drain()
    assert pair.reader.drain()
    assert pair.steps == ["read", b"a"]
    pair.close()


def test_a_batch_thread_is_asked_for_where_it_may_be_and_only_for_that_thread():
    before = os.sched_getscheduler(0)
    assert io_thread.may_batch_io_thread() == (before == os.SCHED_OTHER)
    assert os.sched_getscheduler(0) == before


@pytest.mark.parametrize("case", ["forbidden", "another policy", "another system"])
def test_libzmq_is_left_alone_where_a_batch_thread_may_not_be(monkeypatch, case):
    if case == "forbidden":

        def refuse(*_):
            raise PermissionError

        monkeypatch.setattr(os, "sched_setscheduler", refuse)
    elif case == "another policy":
        monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_FIFO)
    else:
        monkeypatch.delattr(os, "SCHED_BATCH")
    assert not io_thread.may_batch_io_thread()
