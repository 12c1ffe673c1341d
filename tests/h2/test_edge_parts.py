"""Small parts of the asyncio edge: deadlines by interval, faults that are counted, addresses that are bound."""

import socket

import pytest
import structlog

from gateway.h2.protocol.errors import ErrorCode
from gateway.h2.server.deadlines import INTERVAL_S, Deadlines
from gateway.h2.server.faults import LOG_INTERVAL_S, Faults
from gateway.h2.server.listener import bind


class Timed:
    def __init__(self):
        self.expired = 0

    def expire(self):
        self.expired += 1


def test_deadlines_are_kept_to_an_interval_and_never_early():
    deadlines = Deadlines()
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
    assert not deadlines._slots


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
