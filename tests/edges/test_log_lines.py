"""Terminal lines leave together a moment later, in their order, and none is lost or torn."""

import asyncio
import io
import json
import os
import select
import subprocess
import sys
from types import SimpleNamespace

import pytest
import structlog

from gateway.core.errors import GatewayError, Reason
from gateway.edges import log_outlet, logs
from tests.edges.test_logs import LoggedBench, configured, lines, restore  # noqa: F401 - an autouse fixture
from tests.support.core import Bench


class Counted(io.BytesIO):
    """Counts the writes."""

    def __init__(self):
        super().__init__()
        self.writes = 0

    def write(self, data):
        self.writes += 1
        return super().write(data)


def ended(count, **more):
    """Requests of a bench of its own, which have ended."""
    bench = Bench(1)
    requests = [bench.request(request_id=f"client-{number}", **more) for number in range(count)]
    for request in requests:
        bench.cancel(request, Reason.CANCELLED)
        request.error = None
    return bench, requests


async def due():
    """Until lines that wait have left."""
    await asyncio.sleep(1.2 * log_outlet.MAX_DELAY_S)


def ids(stream):
    return [line.get("request_id", line["event"]) for line in lines(stream)]


async def test_lines_leave_in_one_write_a_moment_later():
    stream = Counted()
    logs.configure("info", "json", stream)
    bench, requests = ended(3)
    for request in requests:
        logs.terminal_line(structlog.get_logger("gateway"), request, bench.now)
    assert stream.writes == 0
    await due()
    assert stream.writes == 1
    assert ids(stream) == ["client-0", "client-1", "client-2"]


async def test_one_timer_serves_all_lines_also_those_that_left_earlier(monkeypatch):
    stream = configured()
    loop, timers = asyncio.get_running_loop(), []
    call_later = loop.call_later
    monkeypatch.setattr(loop, "call_later", lambda *args: timers.append(args) or call_later(*args))
    log = structlog.get_logger("gateway")
    bench, requests = ended(3)
    for request in requests:
        logs.terminal_line(log, request, bench.now)
        log.info("other")
    assert len(timers) == 1
    await asyncio.sleep(1.2 * log_outlet.MAX_DELAY_S)
    logs.terminal_line(log, requests[0], bench.now)
    await asyncio.sleep(1.2 * log_outlet.MAX_DELAY_S)
    assert ids(stream)[-1] == "client-0"


def test_a_loop_that_ended_with_lines_waiting_keeps_none_from_the_next():
    stream = configured()
    bench, requests = ended(2)

    async def log(request, wait_s):
        logs.terminal_line(structlog.get_logger("gateway"), request, bench.now)
        await asyncio.sleep(wait_s)

    asyncio.run(log(requests[0], 0))
    assert not lines(stream)
    asyncio.run(log(requests[1], 1.2 * log_outlet.MAX_DELAY_S))
    assert ids(stream) == ["client-0", "client-1"]


async def test_any_other_line_leaves_at_once_and_behind_them():
    stream = configured()
    log = structlog.get_logger("gateway")
    bench, requests = ended(2)
    logs.terminal_line(log, requests[0], bench.now)
    log.info("other")
    assert ids(stream) == ["client-0", "other"]
    logs.terminal_line(log, requests[1], bench.now)
    await due()
    assert ids(stream) == ["client-0", "other", "client-1"]


async def test_a_warning_does_not_wait():
    stream = configured()
    bench, requests = ended(2)
    requests[1].error = GatewayError(Reason.RANK_LOST, "x")
    for request in requests:
        logs.terminal_line(structlog.get_logger("gateway"), request, bench.now)
    assert ids(stream) == ["client-0", "client-1"]


async def test_what_waits_is_bounded(monkeypatch):
    monkeypatch.setattr(log_outlet, "MAX_WAITING_BYTES", 1000)
    stream = configured()
    bench, requests = ended(10)
    for request in requests:
        logs.terminal_line(structlog.get_logger("gateway"), request, bench.now)
    assert 2 <= len(lines(stream)) < 10
    await due()
    assert ids(stream) == [f"client-{number}" for number in range(10)]


async def test_another_configuration_loses_none():
    first = configured()
    bench, requests = ended(1)
    logs.terminal_line(structlog.get_logger("gateway"), requests[0], bench.now)
    second = configured("error")
    assert ids(first) == ["client-0"]
    logs.terminal_line(structlog.get_logger("gateway"), requests[0], bench.now)
    await due()
    assert not lines(second)


def test_a_process_that_dies_of_an_exception_has_written_its_lines():
    program = (
        "import asyncio, structlog\n"
        "from gateway.edges import logs\n"
        "from tests.edges.test_log_lines import ended\n"
        "async def main():\n"
        "    logs.configure('info', 'json')\n"
        "    bench, (request,) = ended(1)\n"
        "    logs.terminal_line(structlog.get_logger('gateway'), request, bench.now)\n"
        "    raise SystemExit(3)\n"
        "asyncio.run(main())\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 3
    assert [json.loads(line)["request_id"] for line in run.stderr.splitlines()] == ["client-0"]


async def test_in_a_pipe_no_line_is_torn_that_fits_into_one_piece_and_each_lost_one_counts():
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as stream, os.fdopen(reader, "rb", buffering=0) as other_end:
        outlet = logs.Outlet(stream)
        pieces = []
        outlet._put = pieces.append
        for number in range(12):
            outlet.write_soon(b"%03d" % number + b"x" * 1000 + b"\n")
        await due()
        assert b"".join(pieces).count(b"\n") == 12
        assert all(piece.endswith(b"\n") and len(piece) <= select.PIPE_BUF for piece in pieces)
        assert len(pieces) == 3
        del outlet._put
        os.set_blocking(writer, False)
        while outlet.write(b"y" * (select.PIPE_BUF - 1) + b"\n"):  # until it is full
            pass
        before = logs.LineLogger.lost
        for _ in range(7):
            outlet.write_soon(b"z" * 1000 + b"\n")
        await due()
        assert logs.LineLogger.lost == before + 7
        other_end.read(1)


@pytest.mark.parametrize("features", [{}, {"tenant": "team-a"}, {"n": 2}, {"pinned_rank": 0}])
def test_both_ways_to_the_stream_say_the_same(features):
    log = structlog.get_logger("gateway")
    short = configured()
    bench = LoggedBench(1)
    bench.log = log
    bench.finish(bench.request(**features))
    request = bench.request(**features)
    bench.cancel(request, Reason.CANCELLED)
    long = configured()
    logs._terminal.write = lambda *_: False
    try:
        logs.terminal_line(log, request, bench.now)
    finally:
        del logs._terminal.write
    one, other = lines(short)[-1], lines(long)[-1]
    assert list(one) == list(other), "the same fields in the same order"
    del one["timestamp"], other["timestamp"]
    assert one == other


def test_what_a_logger_was_bound_to_is_not_left_out():
    stream = configured()
    bench, requests = ended(1)
    logs.terminal_line(structlog.get_logger("gateway").bind(site="here"), requests[0], bench.now)
    (line,) = lines(stream)
    assert (line["site"], line["logger"], line["request_id"]) == ("here", "gateway", "client-0")


async def test_a_text_that_utf8_cannot_carry_has_its_line_too_in_its_place():
    stream = configured()
    bench, requests = ended(2)
    requests[1].error = GatewayError(Reason.CANCELLED, "\ud800")
    for request in requests:
        logs.terminal_line(structlog.get_logger("gateway"), request, bench.now)
    assert [line["error"] for line in lines(stream)] == [None, "\\ud800"]


def test_who_listens_to_the_lines_hears_terminal_lines_as_well():
    configured()
    bench, requests = ended(1)
    with structlog.testing.capture_logs() as heard:
        logs.terminal_line(structlog.get_logger("gateway"), requests[0], bench.now)
    assert [line["event"] for line in heard] == ["request_ended"]


async def test_lines_that_wait_are_encoded_together_each_as_alone(monkeypatch):
    stream = configured()
    encoded = []
    outlet = logs._terminal.outlet
    monkeypatch.setattr(outlet, "_encode", lambda lines: encoded.append(len(lines)) or logs._encode_lines(lines))
    bench, requests = ended(3)
    requests[1].error = GatewayError(Reason.CANCELLED, "in its place")
    for request in requests:
        logs.terminal_line(structlog.get_logger("gateway"), request, bench.now)
    assert not lines(stream)
    await due()
    assert ids(stream) == ["client-0", "client-1", "client-2"]
    assert encoded == [1, 1]
    for request in (requests[0], requests[2]):
        logs.terminal_line(structlog.get_logger("gateway"), request, bench.now)
    await due()
    assert encoded == [1, 1, 2]
    *_, one, other = lines(stream)
    assert other["timestamp"] >= one["timestamp"] > lines(stream)[0]["timestamp"]
    assert (one["request_id"], other["request_id"]) == ("client-0", "client-2")


async def test_one_line_that_utf8_cannot_carry_costs_the_others_nothing():
    stream = configured()
    bench, requests = ended(3)
    requests[1].sink = SimpleNamespace(rpc="\ud800")
    for request in requests:
        logs.terminal_line(structlog.get_logger("gateway"), request, bench.now)
    await due()
    first, second, third = lines(stream)
    assert (second["rpc"], second["request_id"]) == ("\\ud800", "client-1")
    assert (first["request_id"], first["n"], third["request_id"], third["n"]) == ("client-0", 1, "client-2", 1)


async def test_lines_that_wait_unencoded_are_not_torn_in_a_pipe():
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as stream, os.fdopen(reader, "rb"):
        logs.configure("info", "json", stream)
        pieces = []
        logs._terminal.outlet._put = pieces.append
        bench, requests = ended(30)
        for request in requests:
            logs.terminal_line(structlog.get_logger("gateway"), request, bench.now)
        await due()
        assert len(pieces) > 1
        assert all(piece.endswith(b"\n") and len(piece) <= select.PIPE_BUF for piece in pieces)
        found = [json.loads(line)["request_id"] for line in b"".join(pieces).splitlines()]
        assert found == [f"client-{number}" for number in range(30)]
        configured()


async def test_lines_that_could_not_be_written_count_before_they_were_encoded_as_after():
    class Broken(io.BytesIO):
        def write(self, data):
            raise OSError

    logs.configure("info", "json", Broken())
    bench, requests = ended(3)
    before = logs.LineLogger.lost
    for request in requests:
        logs.terminal_line(structlog.get_logger("gateway"), request, bench.now)
    await due()
    assert logs.LineLogger.lost == before + 3
    configured()
