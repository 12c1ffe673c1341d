"""The link's small pure parts."""

import asyncio

import pytest
import structlog
import zmq

from gateway.core.events import SendBlocked, SendFailed, SendUnblocked
from gateway.edges.engine_link.connections import Change, Connections
from gateway.edges.engine_link.counters import OTHER, BoundedCounts, LimitedLog, LinkCounters
from gateway.edges.engine_link.env import EventQueue
from gateway.edges.engine_link.loss import DRAIN_LIMIT_S, OUTPUT_GRACE_S, PendingLoss
from gateway.edges.engine_link.send_queue import MAX_ABORT_IDS, MAX_BYTES, SendQueue
from gateway.edges.engine_link.sender import REFUSAL_PAUSE_S, Sender
from gateway.wire.tokenspeed import TokenSpeedProtocol
from tests.support.link_harness import request
from tests.support.raw_engine import unpack


class FakeChannel:
    """Takes `room` messages, then is full; `room` None: the peer is unknown."""

    def __init__(self, room):
        self.room = room
        self.sent = []
        self.wants_write = False

    def send(self, frames):
        if self.room is None:
            raise zmq.ZMQError(113)
        if self.room == 0:
            raise zmq.Again
        self.room -= 1
        self.sent.append(unpack(frames[1])[1] if frames[0] == b"\x00" else unpack(frames[1]))

    def set_wants_write(self, *, wants_write):
        self.wants_write = wants_write


class FakeEnv:
    def __init__(self):
        self.counters = LinkCounters()
        self.events = self
        self.deferred = []
        self.limited_log = LimitedLog(structlog.get_logger(), lambda: 0.0)
        self.loop = self
        self.now = 0.0
        self.unreachable = 0

    def time(self):
        return self.now

    def on_unreachable(self):
        self.unreachable += 1

    def defer(self, event):
        self.deferred.append(event)

    emit = defer


def make_sender(room):
    env, channel = FakeEnv(), FakeChannel(room)
    return Sender(env, TokenSpeedProtocol(), channel, 3, 7, on_unreachable=env.on_unreachable), channel, env


def test_an_add_never_overtakes_a_queued_one_though_the_socket_has_room_again():
    sender, channel, env = make_sender(0)
    sender.send(request("first"))
    assert env.deferred == [SendBlocked(3, 7)]
    assert channel.wants_write
    channel.room = 1
    sender.send(request("second"))
    assert channel.sent == []
    sender.flush()
    assert channel.sent == ["first"]
    channel.room = 9
    sender.flush()
    assert channel.sent == ["first", "second"]
    assert env.deferred == [SendBlocked(3, 7), SendUnblocked(3, 7)]
    assert not channel.wants_write


def test_an_abort_that_the_socket_refuses_waits_and_leaves_before_queued_adds():
    sender, channel, env = make_sender(0)
    sender.abort(["sent-earlier"])
    sender.send(request("queued"))
    assert env.deferred == [SendBlocked(3, 7)]
    channel.room = 9
    sender.flush()
    assert channel.sent == [["sent-earlier"], "queued"]


def test_queued_adds_of_a_rank_that_cant_be_reached_any_more_fail():
    sender, channel, env = make_sender(0)
    sender.send(request("a"))
    sender.abort(["z"])
    channel.room = None
    sender.flush()
    assert env.deferred == [SendBlocked(3, 7), SendFailed(3, 7, "a", "unreachable")]
    env.now = REFUSAL_PAUSE_S
    sender.poke()
    assert env.deferred[2:] == [SendUnblocked(3, 7)]
    assert env.counters.aborts_dropped == 1
    assert env.counters.adds == 0


def test_a_rank_that_refuses_a_send_counts_as_blocked_for_a_moment():
    sender, channel, env = make_sender(None)
    sender.send(request("a"))
    sender.send(request("b"))
    assert env.deferred == [
        SendBlocked(3, 7),
        SendFailed(3, 7, "a", "unreachable"),
        SendFailed(3, 7, "b", "unreachable"),
    ]
    sender.poke()
    channel.room = 0
    sender.send(request("c"))
    env.now = REFUSAL_PAUSE_S
    sender.poke()
    assert len(env.deferred) == 3, "now its socket is full"
    channel.room = 1
    sender.flush()
    assert env.deferred[3:] == [SendUnblocked(3, 7)]
    sender.poke()
    assert len(env.deferred) == 4


@pytest.mark.parametrize("room", [0, None])
def test_a_blocked_sender_says_so_in_the_name_of_its_next_incarnation(room):
    sender, channel, env = make_sender(room)
    sender.abort(["a"])
    sender.renew(8)
    assert env.deferred[-1] == SendBlocked(3, 8)
    channel.room = 9
    sender.flush()
    env.now = REFUSAL_PAUSE_S
    sender.poke()
    assert env.deferred[-1] == SendUnblocked(3, 8)


def test_a_sender_with_room_has_nothing_to_say_of_its_next_incarnation():
    sender, channel, env = make_sender(9)
    sender.renew(8)
    assert not env.deferred
    channel.room = None
    sender.send(request("a"))
    assert env.deferred == [SendBlocked(3, 8), SendFailed(3, 8, "a", "unreachable")]


def test_a_rank_that_refuses_everything_for_a_second_is_unreachable():
    sender, channel, env = make_sender(None)
    sender.send(request("a"))
    env.now = 0.9
    sender.send(request("b"))
    channel.room = 1
    sender.send(request("c"))
    channel.room = None
    env.now = 1.5
    sender.send(request("d"))
    assert env.unreachable == 0
    env.now = 2.5
    sender.send(request("e"))
    assert env.unreachable == 1


UP, DOWN, FAILED = zmq.Event.HANDSHAKE_SUCCEEDED, zmq.Event.DISCONNECTED, zmq.Event.HANDSHAKE_FAILED_NO_DETAIL


def feed(connections, *events):
    return [connections.feed(int(event), value) for event, value in events]


def test_a_connection_goes_up_and_down():
    connections = Connections()
    assert feed(connections, (UP, 0)) == [Change.UP]
    assert connections.is_up
    assert feed(connections, (DOWN, 20)) == [Change.DOWN]
    assert not connections.is_up


def test_a_failed_greeting_is_no_connection_and_no_loss():
    connections = Connections()
    assert feed(connections, (UP, 0), (FAILED, 104), (DOWN, 21), (DOWN, 20)) == [
        Change.UP,
        Change.NONE,
        Change.NONE,
        Change.DOWN,
    ]
    assert connections.live == 0


def test_only_the_known_connection_counts_as_the_ranks():
    connections = Connections()
    feed(connections, (UP, 0), (UP, 0))
    connections.source_fd = 20
    assert feed(connections, (DOWN, 21)) == [Change.NONE]
    assert feed(connections, (DOWN, 20)) == [Change.DOWN]
    feed(connections, (UP, 0))
    assert feed(connections, (DOWN, 33)) == [Change.DOWN], "the descriptor was forgotten with its connection"


def test_as_many_may_end_as_there_were_besides_the_ranks_when_it_joined():
    connections = Connections()
    feed(connections, (UP, 0), (UP, 0), (UP, 0))
    connections.begin()
    assert feed(connections, (DOWN, 20), (DOWN, 21), (DOWN, 22)) == [Change.NONE, Change.NONE, Change.DOWN]
    connections.begin()
    assert feed(connections, (UP, 0), (DOWN, 20)) == [Change.UP, Change.DOWN], "none was there"


def test_of_several_the_one_that_the_rank_talks_over_is_not_let_go():
    connections = Connections()
    feed(connections, (UP, 0), (UP, 0))
    connections.begin()
    connections.source_fd = 21
    assert feed(connections, (DOWN, 21)) == [Change.DOWN]


def test_a_disconnect_of_what_was_never_established_is_no_loss():
    connections = Connections()
    assert feed(connections, (DOWN, 20), (UP, 0)) == [Change.NONE, Change.UP]
    assert connections.live == 1


def test_other_events_mean_nothing():
    assert feed(Connections(), (zmq.Event.LISTENING, 9), (zmq.Event.ACCEPTED, 20)) == [Change.NONE, Change.NONE]


def test_queue_keeps_order_and_puts_aborts_first():
    queue = SendQueue()
    for name in "abc":
        assert queue.offer(name, [b"\x00", name.encode()])
    queue.abort(["sent-earlier", "b"])
    assert queue.next_aborts() == ["sent-earlier"]
    queue.aborts_sent(["sent-earlier"])
    seen = []
    while add := queue.next_add():
        seen.append(add[0])
        queue.add_sent(add[0])
    assert seen == ["a", "c"]
    assert not queue
    assert queue.offer("d", [b"x" * MAX_BYTES]), "what left makes room"
    assert not queue.offer("e", [b"x"])


def test_queue_is_bounded_in_messages_and_bytes_but_takes_one_of_any_size():
    queue = SendQueue(max_messages=2, max_bytes=10)
    assert queue.offer("big", [b"x" * 100])
    assert not queue.offer("next", [b"y"])
    queue.add_sent("big")
    assert queue.offer("a", [b"x" * 6])
    assert not queue.offer("b", [b"x" * 5])
    assert queue.offer("c", [b"x" * 4])
    assert not queue.offer("d", [b""])
    queue.abort(["a"])
    assert not queue.offer("e", [b"x" * 7])
    assert queue.offer("e", [b"x" * 6])


def test_aborts_leave_in_bounded_messages():
    queue = SendQueue()
    names = [f"r{number}" for number in range(MAX_ABORT_IDS + 5)]
    queue.abort(names)
    first = queue.next_aborts()
    assert first == names[:MAX_ABORT_IDS]
    queue.aborts_sent(first)
    assert queue.next_aborts() == names[MAX_ABORT_IDS:]
    assert len(queue) == 5


def test_counts_have_a_bounded_number_of_keys():
    counts = BoundedCounts("known", "never")
    for number in range(1000):
        counts.add(f"reason-{number}")
    counts.add("known")
    assert counts == {"known": 1, OTHER: 1000}


def test_limited_log_says_how_many_lines_it_left_out():
    lines, now = [], [100.0]

    class Log:
        def warning(self, event, **facts):
            lines.append((event, facts))

    limited = LimitedLog(Log(), lambda: now[0], interval_s=5)
    for _ in range(4):
        limited.warning("noise", rank=1)
    limited.warning("other")
    limited.warning("noise", rank=2)
    now[0] += 5
    limited.warning("noise", rank=1)
    limited.warning("noise", rank=2)
    assert lines == [
        ("noise", {"rank": 1}),
        ("other", {}),
        ("noise", {"rank": 2}),
        ("noise", {"rank": 1, "suppressed": 3}),
        ("noise", {"rank": 2}),
    ]


class FakeLoop:
    """Time moves only when the test says so."""

    def __init__(self):
        self.now = 0.0
        self.timers = []

    def time(self):
        return self.now

    def call_later(self, delay_s, callback):
        handle = FakeHandle(self.now + delay_s, callback)
        self.timers.append(handle)
        return handle

    def call_soon(self, callback):
        return self.call_later(0, callback)

    def run_until(self, end):
        while live := [timer for timer in self.timers if not timer.cancelled and timer.at <= end]:
            timer = min(live, key=lambda timer: timer.at)
            self.timers.remove(timer)
            self.now = max(self.now, timer.at)
            timer.callback()
        self.now = end


class FakeHandle:
    def __init__(self, at, callback):
        self.at, self.callback, self.cancelled = at, callback, False

    def cancel(self):
        self.cancelled = True


def pending_loss(loop, *, drain, is_output_up):
    finished = []
    loss = PendingLoss(loop, "x", drain=drain, is_output_up=is_output_up, finish=lambda: finished.append(loop.time()))
    return loss, finished


def test_a_loss_waits_for_the_batch_socket_to_be_empty():
    loop = FakeLoop()
    left = [3]

    def drain():
        left[0] -= 1
        return left[0] <= 0

    _, finished = pending_loss(loop, drain=drain, is_output_up=lambda: False)
    assert not finished
    loop.run_until(1)
    assert len(finished) == 1
    assert left == [0]


def test_a_loss_waits_for_the_batch_connection_but_not_for_ever():
    loop = FakeLoop()
    up = [True]
    _, finished = pending_loss(loop, drain=lambda: True, is_output_up=lambda: up[0])
    loop.run_until(OUTPUT_GRACE_S / 2)
    assert not finished
    up[0] = False
    loop.run_until(OUTPUT_GRACE_S * 0.7)
    assert len(finished) == 1
    loop = FakeLoop()
    _, finished = pending_loss(loop, drain=lambda: True, is_output_up=lambda: True)
    loop.run_until(10)
    assert len(finished) == 1
    assert finished[0] == pytest.approx(OUTPUT_GRACE_S, abs=0.01)


def test_a_peer_that_never_stops_sending_doesnt_delay_the_loss_for_ever():
    loop = FakeLoop()

    def drain():
        loop.now += 0.01
        return False

    _, finished = pending_loss(loop, drain=drain, is_output_up=lambda: True)
    loop.run_until(10)
    assert len(finished) == 1
    assert finished[0] == pytest.approx(DRAIN_LIMIT_S, abs=0.05)


def test_a_handlers_exception_doesnt_swallow_the_loss():
    loop = FakeLoop()
    calls = []

    def drain():
        calls.append(None)
        if len(calls) == 1:
            raise LookupError("a bug in the core")
        return True

    _, finished = pending_loss(loop, drain=drain, is_output_up=lambda: False)
    with pytest.raises(LookupError):
        loop.run_until(1)
    loop.run_until(2)
    assert len(finished) == 1


def test_a_cancelled_loss_is_not_announced():
    loop = FakeLoop()
    loss, finished = pending_loss(loop, drain=lambda: True, is_output_up=lambda: False)
    loss.cancel()
    loop.run_until(10)
    assert not finished


async def test_deferred_events_leave_in_order_before_a_direct_one_and_not_at_once():
    seen = []
    queue = EventQueue(asyncio.get_running_loop(), seen.append)
    queue.defer("a")
    queue.defer("b")
    assert not seen
    queue.emit("c")
    assert seen == ["a", "b", "c"]
    queue.defer("d")
    await asyncio.sleep(0)
    assert seen == ["a", "b", "c", "d"]
    queue.defer("e")
    queue.close()
    queue.emit("f")
    queue.defer("g")
    await asyncio.sleep(0)
    assert seen == ["a", "b", "c", "d"]


async def test_events_that_defer_events_let_the_loop_turn():
    seen = []
    queue = EventQueue(asyncio.get_running_loop(), lambda number: (seen.append(number), queue.defer(number + 1)))
    queue.defer(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert 0 < len(seen) < 5
    queue.close()


async def test_an_exception_in_one_event_doesnt_lose_the_next():
    seen, errors = [], []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))

    def emit(event):
        if event == "bad":
            raise LookupError(event)
        seen.append(event)

    queue = EventQueue(loop, emit)
    queue.defer("bad")
    queue.defer("good")
    for _ in range(3):
        await asyncio.sleep(0)
    assert seen == ["good"]
    assert len(errors) == 1
