"""Small parts of the asyncio edge: deadlines by interval, faults that are counted, addresses that are bound."""

import asyncio
import socket

import pytest
import structlog

from gateway.h2.protocol.errors import ErrorCode
from gateway.h2.server.deadlines import INTERVAL_S, Deadlines
from gateway.h2.server.faults import LOG_INTERVAL_S, Faults
from gateway.h2.server.listener import bind
from gateway.h2.server.writes import Writes


class Timed:
    def __init__(self):
        self.expired = 0

    def expire(self):
        self.expired += 1


async def test_deadlines_are_kept_to_an_interval_and_never_early():
    deadlines = Deadlines(asyncio.get_running_loop())
    calls = {at: Timed() for at in (5.0, 5.01, 5.099, 5.1, 7.3, 1e12)}
    slots = {at: deadlines.add(call, at) for at, call in calls.items()}
    now = 4.9
    while now < 8.0:
        deadlines.expire(now)
        for at, call in calls.items():
            assert not call.expired or at <= now
            assert call.expired or now < at + 2 * INTERVAL_S
        now += 0.01
    assert [call.expired for call in calls.values()] == [1, 1, 1, 1, 1, 0]
    deadlines.remove(calls[1e12], slots[1e12])
    deadlines.remove(calls[5.0], slots[5.0])
    assert not deadlines._intervals
    deadlines.close()


async def test_a_timer_runs_while_there_are_deadlines():
    loop = asyncio.get_running_loop()
    deadlines, call, other = Deadlines(loop), Timed(), Timed()
    assert deadlines._timer is None
    slot = deadlines.add(call, loop.time() + 3600)
    deadlines.add(other, loop.time() + 0.01)
    async with asyncio.timeout(5):
        while not other.expired:  # noqa: ASYNC110 - a deadline sends no event
            await asyncio.sleep(0.01)
    assert not call.expired
    assert deadlines._timer is not None
    deadlines.remove(call, slot)
    async with asyncio.timeout(5):
        while deadlines._timer is not None:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)


async def test_a_call_that_fails_to_end_leaves_the_others_their_time(monkeypatch):
    loop, told = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    deadlines, calls = Deadlines(loop), [Timed() for _ in range(8)]
    broken = Timed()
    broken.expire = lambda: 1 / 0
    now = loop.time()
    for call in (*calls[:4], broken, *calls[4:]):
        deadlines.add(call, now)
    deadlines.add(late := Timed(), now + 0.1)
    async with asyncio.timeout(5):
        while not late.expired:  # noqa: ASYNC110 - a deadline sends no event
            await asyncio.sleep(0.01)
    assert [call.expired for call in calls] == [1] * 8
    assert [type(error) for error in told] == [ZeroDivisionError]
    assert not deadlines._intervals
    deadlines.close()


class Connection:
    def __init__(self, writes, *, again=0, fails=False):
        self.writes, self.again, self.fails = writes, again, fails
        self.count, self.is_aborted = 0, False

    def write_out(self):
        self.count += 1
        if self.fails:
            raise ValueError("a defect")
        if self.again:
            self.again -= 1
            self.writes.soon(self)

    def abort(self):
        self.is_aborted = True


async def test_connections_write_at_the_end_of_the_turn_or_when_who_holds_them_says_so():
    writes = Writes(asyncio.get_running_loop())
    at_once, later = Connection(writes), Connection(writes, again=1)
    writes.soon(later)
    writes.hold()
    writes.soon(at_once)
    assert (at_once.count, later.count) == (0, 0)
    writes.write_all()
    assert (at_once.count, later.count) == (1, 1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (at_once.count, later.count) == (1, 2)
    writes.soon(at_once)
    await asyncio.sleep(0)
    assert at_once.count == 2


async def test_a_connection_that_can_not_be_written_to_is_given_up_and_the_others_write():
    loop, told = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: told.append(str(context["exception"])))
    writes = Writes(loop)
    connections = [Connection(writes, fails=number == 1) for number in range(3)]
    for each in connections:
        writes.soon(each)
    await asyncio.sleep(0)
    assert [(each.count, each.is_aborted) for each in connections] == [(1, False), (1, True), (1, False)]
    assert told == ["a defect"]


def test_faults_are_counted_and_logged_now_and_then():
    now = 100.0
    with structlog.testing.capture_logs() as logs:
        faults = Faults(clock=lambda: now)
        for _ in range(5):
            faults.note(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings", "ipv4:1.2.3.4:5")
        faults.note(ErrorCode.PROTOCOL_ERROR, "x", "y")
        now += LOG_INTERVAL_S
        faults.note(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings", "ipv4:1.2.3.4:5")
    assert faults.counts == {"ENHANCE_YOUR_CALM": 6, "PROTOCOL_ERROR": 1}
    assert [(entry["code"], entry["more_before"]) for entry in logs] == [
        ("ENHANCE_YOUR_CALM", 0),
        ("PROTOCOL_ERROR", 0),
        ("ENHANCE_YOUR_CALM", 4),
    ]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_every_address_of_a_name_gets_the_same_port(host):
    sockets = bind(host, 0)
    try:
        port = sockets[0].getsockname()[1]
        assert {each.getsockname()[1] for each in sockets} == {port}
        with pytest.raises(OSError, match="in use"):
            bind(host, port)
        with socket.create_connection((host, port), timeout=5):
            pass
    finally:
        for each in sockets:
            each.close()
