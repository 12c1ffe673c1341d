"""Structured logs: one JSON object a line on stderr, and one terminal line per accepted request.

Lines are written with one processor that adds time and level and encodes with msgspec (about 3 µs); the
console renderer and what it imports are loaded only when asked for. Prompts and generated tokens are
never logged. `gateway.edges.log_outlet` has the stream.

Terminal lines are most of all lines. As JSON they don't go through structlog: they are encoded in one step, and those of
one loop turn leave in one write. A line of any other kind leaves at once, behind them.
"""

import atexit
import io
import logging
import sys
from datetime import UTC, datetime
from typing import Any, BinaryIO, ClassVar, Literal

import msgspec
import structlog
from msgspec import UNSET, UnsetType
from structlog.processors import format_exc_info
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from gateway.config.values import LogFormat, LogLevel
from gateway.core.errors import Reason
from gateway.core.request import Attempt, Request
from gateway.edges.log_outlet import LineLogger, Outlet
from gateway.edges.waiting import queue_ms

__all__ = ["LineLogger", "Outlet", "configure", "terminal_line"]

_FAULTS = frozenset(
    {
        Reason.RANK_LOST,
        Reason.SEND_FAILED,
        Reason.ENGINE_REJECTED,
        Reason.ENGINE_ERROR,
        Reason.DATA_LOSS,
        Reason.MAX_AGE_EXCEEDED,
        Reason.SLOW_READER,
        Reason.INTERNAL,
    }
)
"""Ends that an operator should look at; they are logged as warnings."""


class _ToStructlog(logging.Handler):
    """Sends what libraries log (grpc, asyncio) down the same way, with the library's logger name."""

    _METHODS: ClassVar[dict[str, str]] = {
        "DEBUG": "debug",
        "INFO": "info",
        "WARNING": "warning",
        "ERROR": "error",
        "CRITICAL": "critical",
    }

    def emit(self, record: logging.LogRecord) -> None:
        log = getattr(structlog.get_logger(record.name), self._METHODS.get(record.levelname, "info"))
        try:
            message = record.getMessage()
        except (TypeError, ValueError):
            message = str(record.msg)
        if record.exc_info:
            log(message, exc_info=record.exc_info)
        else:
            log(message)


def configure(level: LogLevel, log_format: LogFormat, stream: BinaryIO | None = None) -> None:
    """Set up logging for the process; may be called again. `stream` is stderr unless given."""
    target = sys.stderr.buffer if stream is None else stream
    renderer = _render_json if log_format == "json" else _console_renderer(target)
    outlet = Outlet(target)
    _terminal.outlet.flush()
    _terminal.outlet = outlet
    _terminal.processors = [_drop_quiet, renderer]
    _terminal.log = None
    structlog.configure(
        processors=_terminal.processors,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *names: LineLogger(outlet, *names[:1]),
        # Not cached: a logger made before a second call would keep the first one's level.
        cache_logger_on_first_use=False,
    )
    LineLogger.threshold = _NUMBERS[level.upper()]
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _ToStructlog)]:
        root.removeHandler(handler)
    root.addHandler(_ToStructlog())
    # Libraries narrate at info; what matters of it to an operator is a warning there.
    root.setLevel(max(logging.WARNING, LineLogger.threshold))


class _TerminalLine(msgspec.Struct, kw_only=True):
    """The fields of a terminal line in their order. What is unset is not there."""

    timestamp: datetime | UnsetType = UNSET
    level: Literal["info", "warning"]
    event: str = "request_ended"
    logger: str | UnsetType = UNSET
    request_id: str
    rpc: str
    outcome: str
    error: str | None
    rank: int | None
    incarnation: int | None
    ranks: list[int] | None
    pinned_rank: int | None
    decision_id: int | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    n: int
    queue_ms: float
    ttft_ms: float | None
    e2e_ms: float
    attempts: int
    tenant: str | UnsetType = UNSET
    cached: bool | UnsetType = UNSET
    batch: int | UnsetType = UNSET


def terminal_line(log: FilteringBoundLogger, request: Request, now: float) -> None:
    """Log the end of an accepted request: called once each, with counts and times, never contents.

    `cached_tokens` is the largest of the sequences' (they share one prompt); `completion_tokens` and
    `attempts` are sums. `rank`, `incarnation` and `batch` are those of the last dispatch, `ranks` those of all
    sequences when there are several; all null for a request that no rank was given. `queue_ms` is the wait until the
    first dispatch, `ttft_ms` null when no token came, `error` when the request succeeded. `tenant`, `cached` and
    `batch` are there only where they say something.
    """
    error = request.error
    is_fault = error is not None and error.reason in _FAULTS
    if (logging.WARNING if is_fault else logging.INFO) < LineLogger.threshold:
        return
    line = _describe(request, now, "warning" if is_fault else "info")
    if _terminal.write(log, line):
        return
    write = log.warning if is_fault else log.info
    write(
        "request_ended",
        **{name: value for name in _TERMINAL_FIELDS if (value := getattr(line, name)) is not UNSET},
    )


_TERMINAL_FIELDS = _TerminalLine.__struct_fields__[4:]


def _describe(request: Request, now: float, level: Literal["info", "warning"]) -> _TerminalLine:
    error, arrived, sequences = request.error, request.arrived, request.sequences
    started, first, ended = request.accepted_at, request.first_token_at, request.ended_at
    if ended is None:
        ended = now
    # One sequence is what nearly all requests have; `_add_up` corrects what follows for the others.
    sequence = sequences[0]
    attempt = sequence.attempt
    sent_at = ended if sequence.sent_at is None else sequence.sent_at
    line = _TerminalLine(
        level=level,
        request_id=arrived.request_id,
        rpc=getattr(request.sink, "rpc", "unknown"),
        outcome="ok" if error is None else error.reason.value,
        error=None if error is None else error.message,
        rank=request.last_rank,
        incarnation=None if attempt is None else attempt.incarnation,
        ranks=None,
        pinned_rank=arrived.pinned_rank,
        decision_id=request.decision_id,
        prompt_tokens=len(arrived.prompt_token_ids),
        completion_tokens=sequence.completion_tokens,
        cached_tokens=sequence.cached_tokens,
        n=1,
        # Whole microseconds; `round` takes four times as long.
        queue_ms=int((sent_at - started) * 1e6 + 0.5) / 1e3,
        ttft_ms=None if first is None else int((first - started) * 1e6 + 0.5) / 1e3,
        e2e_ms=int((ended - started) * 1e6 + 0.5) / 1e3,
        attempts=sequence.attempts,
    )
    if len(sequences) > 1:
        attempt = _add_up(line, request)
    if arrived.tenant:
        line.tenant = arrived.tenant
    if request.is_cached:
        line.cached = True
    if attempt is not None and attempt.batch is not None:
        line.batch = attempt.batch.number
    return line


def _add_up(line: _TerminalLine, request: Request) -> Attempt | None:
    """Make the line one of all sequences; return the last attempt."""
    sequences = request.sequences
    attempts = [sequence.attempt for sequence in sequences if sequence.attempt is not None]
    line.n = len(sequences)
    line.incarnation = attempts[-1].incarnation if attempts else None
    line.ranks = [attempt.rank for attempt in attempts] if len(attempts) > 1 else None
    line.completion_tokens = sum(sequence.completion_tokens for sequence in sequences)
    line.cached_tokens = max(sequence.cached_tokens for sequence in sequences)
    line.queue_ms = round(queue_ms(request), 3)
    line.attempts = sum(sequence.attempts for sequence in sequences)
    return attempts[-1] if attempts else None


class _TerminalWriter:
    """The short way of terminal lines to the stream, while it gives what the long one would."""

    def __init__(self) -> None:
        self.outlet = Outlet(io.BytesIO())
        self.processors: list[Processor] = []
        # The logger that `_name` belongs to; None until the next line.
        self.log: FilteringBoundLogger | None = None
        self._name: str | UnsetType | None = None

    def write(self, log: FilteringBoundLogger, line: _TerminalLine) -> bool:
        """Write a line of `log`; False if it must go the long way."""
        # Who listens to the lines, as tests do, puts other processors into the list.
        if not self.processors or self.processors[-1] is not _render_json or not structlog.is_configured():
            return False
        if log is not self.log:
            self.log, self._name = log, _name_of(log)
        if self._name is None:
            return False
        line.logger = self._name
        line.timestamp = datetime.now(UTC)
        try:
            self.outlet.write_soon(_encode(line) + b"\n")
        except (TypeError, ValueError):  # as in `_render_json`
            return False
        if line.level == "warning":
            self.outlet.flush()
        return True

    def flush(self) -> None:
        """Write what still waits: the process may end within a loop turn."""
        self.outlet.flush()


def _name_of(log: FilteringBoundLogger) -> str | UnsetType | None:
    """A logger's name, UNSET without; None for one that has more to say, or that is none of ours."""
    bound = log.bind()
    inner = getattr(bound, "_logger", None)
    if not isinstance(inner, LineLogger) or structlog.get_context(bound):
        return None
    return inner.name or UNSET


_terminal = _TerminalWriter()
atexit.register(_terminal.flush)


_encode = msgspec.json.Encoder(enc_hook=repr).encode


_NUMBERS = logging.getLevelNamesMapping()


def _drop_quiet(_: WrappedLogger, method: str, fields: EventDict) -> EventDict:
    if _NUMBERS[method.upper()] < LineLogger.threshold:
        raise structlog.DropEvent
    return fields


def _render_json(logger: WrappedLogger, method: str, fields: EventDict) -> bytes:
    if "exc_info" in fields:
        fields = format_exc_info(logger, method, fields)
    line: dict[str, Any] = {"timestamp": datetime.now(UTC), "level": method, "event": fields.pop("event", "")}
    name = getattr(logger, "name", "")
    if name:
        line["logger"] = name
    line.update(fields)
    try:
        return _encode(line)
    except (TypeError, ValueError):  # ValueError: lone surrogates, which UTF-8 cannot carry
        return _encode({key: _printable(value) for key, value in line.items()})


def _printable(value: object) -> str:
    text = value if isinstance(value, str) else str(value)
    return text.encode(errors="backslashreplace").decode()


def _console_renderer(stream: BinaryIO) -> Processor:
    from structlog.dev import ConsoleRenderer, plain_traceback  # noqa: PLC0415 - only a console pays for it

    render = ConsoleRenderer(
        colors=stream.isatty(),
        # A newline in a client's request id must not forge a second line.
        repr_native_str=True,
        # The prettier formatters print local variables, and with them prompts.
        exception_formatter=plain_traceback,
    )

    def to_bytes(logger: WrappedLogger, method: str, fields: EventDict) -> bytes:
        stamped: EventDict = {"timestamp": datetime.now(UTC).strftime("%H:%M:%S.%f"), "level": method, **fields}
        if logger.name:
            stamped["logger"] = logger.name
        return str(render(logger, method, stamped)).encode(errors="backslashreplace")

    return to_bytes
