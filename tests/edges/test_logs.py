"""Logs: JSON lines, one terminal line per accepted request, nothing of the prompts, no failing requests."""

import io
import json
import logging
import os
import subprocess
import sys
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
import structlog

from gateway.core.effects import RequestEnded
from gateway.core.errors import GatewayError, Reason
from gateway.core.events import AbortAll, RankLost
from gateway.edges import logs
from gateway.types import Sampling
from tests.support.core import Bench, wire_id

FIELDS = {
    *("timestamp", "level", "event", "logger", "request_id", "rpc", "outcome", "error", "decision_id"),
    *("rank", "incarnation", "ranks", "pinned_rank"),
    *("prompt_tokens", "completion_tokens", "cached_tokens", "n", "queue_ms", "ttft_ms", "e2e_ms", "attempts"),
}


@pytest.fixture(autouse=True)
def restore():
    """Leave the process's logging as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def configured(level="info", log_format="json"):
    stream = io.BytesIO()
    logs.configure(level, log_format, stream)
    return stream


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


class LoggedBench(Bench):
    """Logs each ended request as the running gateway does."""

    def __init__(self, ranks=2, **more):
        self.log = structlog.get_logger("gateway")
        super().__init__(ranks, **more)

    def send(self, event):
        effects = super().send(event)
        for effect in effects:
            if isinstance(effect, RequestEnded):
                logs.terminal_line(self.log, effect.request, self.now)
        return effects


def test_a_line_is_one_json_object_with_time_level_and_event():
    stream = configured()
    before = datetime.now(UTC)
    structlog.get_logger("gateway.test").info("something_happened", rank=0, text='quote " and\nnewline')
    (line,) = lines(stream)
    stamp = datetime.fromisoformat(line.pop("timestamp"))
    assert before <= stamp <= datetime.now(UTC)
    assert line == {
        "level": "info",
        "event": "something_happened",
        "logger": "gateway.test",
        "rank": 0,
        "text": 'quote " and\nnewline',
    }


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("debug", ["debug", "info", "warning", "error"]),
        ("info", ["info", "warning", "error"]),
        ("warning", ["warning", "error"]),
        ("error", ["error"]),
    ],
)
def test_the_level_filters(level, expected):
    stream = configured(level)
    log = structlog.get_logger()
    for name in ("debug", "info", "warning", "error"):
        getattr(log, name)("x")
    assert [line["level"] for line in lines(stream)] == expected


def test_configuring_again_changes_loggers_that_exist():
    log = structlog.get_logger("gateway")
    first = configured("error")
    log.info("hidden")
    second = configured("info")
    log.info("shown")
    assert not lines(first)
    assert [line["event"] for line in lines(second)] == ["shown"]


@pytest.mark.parametrize(
    "value", [object(), b"\xff", 2**80, float("nan"), {1, 2}, "\ud800", datetime(2026, 1, 1, tzinfo=UTC)]
)
def test_any_value_can_be_logged(value):
    stream = configured()
    structlog.get_logger().info("odd", value=value)
    (line,) = lines(stream)
    assert line["event"] == "odd"
    assert line["level"] == "info"


def test_exceptions_have_their_traceback_but_no_local_variables():
    for log_format in ("json", "console"):
        stream = configured(log_format=log_format)
        prompt = [int("424242")]
        try:
            prompt.index(0)
        except ValueError:
            structlog.get_logger().exception("failed")
        text = stream.getvalue().decode()
        assert "ValueError: 0 is not in list" in text
        assert "test_logs.py" in text
        assert "424242" not in text


def test_what_libraries_log_comes_the_same_way():
    stream = configured()
    logging.getLogger("grpc._cython").warning("lost %d of %d", 1, 2)
    logging.getLogger("asyncio").info("chatter")
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        logging.getLogger("asyncio").exception("Task exception was never retrieved")
    first, second = lines(stream)
    assert (first["logger"], first["level"], first["event"]) == ("grpc._cython", "warning", "lost 1 of 2")
    assert (second["level"], second["event"]) == ("error", "Task exception was never retrieved")
    assert "ZeroDivisionError" in second["exception"]


def test_a_library_s_broken_format_string_is_still_a_line():
    stream = configured()
    (handler,) = [handler for handler in logging.getLogger().handlers if handler.__module__ == logs.__name__]
    handler.emit(logging.LogRecord("lib", logging.WARNING, "lib.py", 1, "%d", ("not a number",), None))
    (line,) = lines(stream)
    assert (line["logger"], line["event"]) == ("lib", "%d")


def test_configuring_twice_does_not_double_the_lines():
    configured()
    stream = configured()
    logging.getLogger("x").warning("once")
    assert len(lines(stream)) == 1


class Broken(io.BytesIO):
    def write(self, _):
        raise BrokenPipeError


@pytest.mark.parametrize("kind", ["broken", "closed"])
def test_a_dead_stream_costs_lines_but_never_a_request(kind):
    stream = Broken()
    logs.configure("info", "json", stream)
    if kind == "closed":
        stream = io.BytesIO()
        logs.configure("info", "json", stream)
        stream.close()
    before = logs.LineLogger.lost
    bench = LoggedBench()
    bench.finish(bench.request())
    bench.assert_quiet()
    assert logs.LineLogger.lost == before + 1


# --- the terminal line -----------------------------------------------------------------------------


def test_the_terminal_line_of_a_success():
    stream = configured()
    bench = LoggedBench()
    request = bench.request(
        prompt=[31337] * 7, request_id="client-1", n=2, sink=SimpleNamespace(rpc="test.Service/Generate")
    )
    first, second = (sequence.attempt for sequence in request.sequences)
    bench.now += 0.25
    bench.batch(first.rank, [(first.wire_id, [27182, 27183], "")], cached_tokens=[3])
    bench.now += 0.5
    bench.batch(first.rank, [(first.wire_id, [27184], "stop")])
    bench.now += 0.25
    bench.batch(second.rank, [(second.wire_id, [27185], "stop")])
    (line,) = lines(stream)
    assert set(line) == FIELDS
    del line["timestamp"]
    assert line == {
        "level": "info",
        "event": "request_ended",
        "logger": "gateway",
        "request_id": "client-1",
        "rpc": "test.Service/Generate",
        "outcome": "ok",
        "error": None,
        "rank": second.rank,
        "incarnation": 1,
        "ranks": [first.rank, second.rank],
        "pinned_rank": None,
        "decision_id": request.decision_id,
        "prompt_tokens": 7,
        "completion_tokens": 4,
        "cached_tokens": 3,
        "n": 2,
        "queue_ms": 0.0,
        "ttft_ms": 250.0,
        "e2e_ms": 1000.0,
        "attempts": 2,
    }


def test_the_terminal_line_says_which_rank_was_asked_for_and_which_of_its_incarnations_worked():
    stream = configured()
    bench = LoggedBench()
    bench.join(1)
    bench.send(RankLost(1, 2, "test"))
    bench.join(1)
    bench.finish(bench.request(pinned_rank=1))
    (line,) = lines(stream)
    assert (line["rank"], line["pinned_rank"], line["incarnation"], line["ranks"]) == (1, 1, 3, None)


def test_prompt_and_tokens_are_never_logged():
    stream = configured("debug")
    bench = LoggedBench()
    bench.finish(bench.request(prompt=[31337] * 7), tokens=[27182])
    text = stream.getvalue().decode()
    assert text
    assert "31337" not in text
    assert "27182" not in text


def test_a_request_without_a_token_has_no_ttft():
    stream = configured()
    bench = LoggedBench()
    request = bench.request()
    bench.now += 2.0
    bench.cancel(request, Reason.CANCELLED)
    (line,) = lines(stream)
    assert (line["outcome"], line["ttft_ms"], line["e2e_ms"]) == ("CANCELLED", None, 2000.0)
    assert line["completion_tokens"] == 0


@pytest.mark.parametrize("reason", list(Reason))
def test_faults_are_warnings_and_the_callers_own_ends_are_not(reason):
    stream = configured()
    bench = Bench(1)
    request = bench.request()
    bench.cancel(request, Reason.CANCELLED)
    request.error = GatewayError(reason, "what to do about it")
    logs.terminal_line(structlog.get_logger(), request, bench.now)
    (line,) = lines(stream)
    assert (line["outcome"], line["error"], line["rpc"]) == (reason.value, "what to do about it", "unknown")
    is_fault = reason.name in {
        *("RANK_LOST", "SEND_FAILED", "ENGINE_REJECTED", "ENGINE_ERROR", "DATA_LOSS", "SLOW_READER", "INTERNAL"),
        "MAX_AGE_EXCEEDED",
    }
    assert line["level"] == ("warning" if is_fault else "info")


QUEUE = {"scheduling": {"mode": "queue", "queue": {"max_in_flight_per_rank": 1}}}


def test_the_wait_for_a_rank_is_logged_apart_from_the_rest():
    stream = configured()
    bench = LoggedBench(1, **QUEUE)
    first, second = bench.request(), bench.request()
    bench.now += 0.75
    bench.finish(first)
    bench.now += 0.5
    bench.finish(second)
    assert [(line["queue_ms"], line["e2e_ms"]) for line in lines(stream)] == [(0.0, 750.0), (750.0, 1250.0)]


def test_the_wait_is_that_before_the_first_rank_also_when_a_second_one_went_on():
    stream = configured()
    bench = LoggedBench(2, failure={"reroute": True})
    request = bench.request()
    bench.now += 3.0
    bench.lose(request.sequences[0].attempt.rank)
    bench.finish(request)
    (line,) = lines(stream)
    assert (line["outcome"], line["attempts"], line["queue_ms"]) == ("ok", 2, 0.0)


def test_a_request_that_no_rank_got_has_a_line_too():
    stream = configured()
    bench = LoggedBench(1, **QUEUE)
    bench.request()
    queued = bench.request()
    bench.now += 2.0
    bench.cancel(queued, Reason.CANCELLED)
    (line,) = lines(stream)
    assert (line["outcome"], line["queue_ms"], line["attempts"]) == ("CANCELLED", 2000.0, 0)
    assert (line["rank"], line["incarnation"], line["ranks"]) == (None, None, None)


def test_a_stored_answer_says_so_and_a_tenant_its_name():
    stream = configured()
    bench = LoggedBench(1, response_cache={})
    greedy = Sampling(max_tokens=4, temperature=0.0)
    bench.finish(bench.request(sampling=greedy, tenant="team-a"))
    bench.request(sampling=greedy, tenant="team-a")
    bench.finish(bench.request(sampling=greedy, use_cache=False))
    asked, stored, other = lines(stream)
    assert (asked["tenant"], stored["tenant"]) == ("team-a", "team-a")
    assert stored["cached"] is True
    assert (stored["rank"], stored["attempts"], stored["queue_ms"], stored["completion_tokens"]) == (None, 0, 0.0, 1)
    assert not {"cached", "batch"} & set(asked)
    assert not {"cached", "tenant"} & set(other)


def test_the_number_of_its_batch_is_logged():
    stream = configured()
    bench = LoggedBench(1, scheduling={"mode": "batch", "batch": {"window_ms": 0}})
    for _ in range(2):
        bench.finish(bench.request())
    assert [line["batch"] for line in lines(stream)] == [1, 2]


def test_exactly_one_line_per_accepted_request_however_it_ends():
    stream = configured()
    bench = LoggedBench(3)
    for _ in range(3):
        bench.finish(bench.request())
    bench.cancel(bench.request(), Reason.CANCELLED)
    lost = bench.request(pinned_rank=2)
    bench.batch(2, [(wire_id(lost), [1])])
    bench.send(RankLost(2, 1, "test"))
    bench.request(n=2)
    bench.send(AbortAll(Reason.DRAINING))
    bench.send(bench.arrived(prompt=()))  # refused: not accepted, no line
    bench.cancel(lost, Reason.CANCELLED)  # a second end: no second line
    counts = bench.router.counters
    outcomes = [line["outcome"] for line in lines(stream)]
    assert sorted(outcomes) == ["CANCELLED", "DRAINING", "RANK_LOST", "ok", "ok", "ok"]
    assert len(outcomes) == counts.accepted == sum(counts.ended.values())


# --- the console -----------------------------------------------------------------------------------


def test_the_console_is_one_line_too_whatever_the_request_id_is():
    stream = configured(log_format="console")
    bench = LoggedBench()
    bench.finish(bench.request(request_id="a\nb\x1b[31m"))
    text = stream.getvalue().decode()
    assert text.count("\n") == 1
    assert "\x1b" not in text
    assert "request_ended" in text
    assert "outcome='ok'" in text


def test_json_logging_makes_no_console_renderer():
    program = (
        "import io, structlog.dev\n"
        "def refuse(*args, **kwargs): raise SystemExit('console renderer made')\n"
        "structlog.dev.ConsoleRenderer.__init__ = refuse\n"
        "from gateway.edges import logs\n"
        "logs.configure('info', 'json', io.BytesIO())\n"
        "structlog.get_logger().info('x')\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_a_pipe_that_nobody_reads_costs_lines_and_never_waits():
    """Without the look before each write this test does not end."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as stream, os.fdopen(reader, "rb") as other_end:
        logs.configure("info", "json", stream)
        log = structlog.get_logger("gateway")
        before = logs.LineLogger.lost
        for number in range(400):
            log.info("filler", number=number, text="x" * 1000)
        assert logs.LineLogger.lost - before > 100
        os.set_blocking(reader, False)
        early = other_end.read()
        log.info("again", text="y" * 9000)
        late = other_end.read()
    told = [json.loads(line) for line in (early + late).splitlines() if line.endswith(b"}")]
    assert [line["number"] for line in told[:-1]] == list(range(len(told) - 1))
    assert (told[-1]["event"], len(told[-1]["text"])) == ("again", 9000)


def test_a_line_that_was_cut_does_not_spoil_the_next():
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as stream, os.fdopen(reader, "rb") as other_end:
        logs.configure("info", "json", stream)
        log = structlog.get_logger("gateway")
        log.info("long", text="z" * 200_000)
        os.set_blocking(reader, False)
        other_end.read()
        log.info("next")
        assert json.loads(other_end.read().splitlines()[-1])["event"] == "next"
