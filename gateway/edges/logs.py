"""Structured logs: one JSON object a line on stderr, and one terminal line per accepted request.

Lines are written with one processor that adds time and level and encodes with msgspec (about 3 µs); the
console renderer and what it imports are loaded only when asked for. Prompts and generated tokens are
never logged. A log stream that cannot be written to (closed, full disk, broken pipe) costs its
lines, never a request: losses are counted in `LineLogger.lost`.
"""

import logging
import os
import select
import stat
import sys
from datetime import UTC, datetime
from typing import Any, BinaryIO, ClassVar

import msgspec
import structlog
from structlog.processors import format_exc_info
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from gateway.config.values import LogFormat, LogLevel
from gateway.core.errors import Reason
from gateway.core.request import Attempt, Request
from gateway.edges.waiting import queue_ms

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


class Outlet:
    """Writes lines to a stream without ever waiting for its reader: the event loop would wait with it.

    A pipe that is ready takes `PIPE_BUF` bytes without blocking, so a line goes out in such pieces, each after
    a look. Files and terminals are written to as they are.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._ready = _readiness(stream)
        self._is_cut = False

    def write(self, line: bytes) -> bool:
        """Write a line with its newline; False when the stream can't take (all of) it now."""
        if self._ready is None:
            self._put(line)
            return True
        if self._is_cut:
            line = b"\n" + line
        for start in range(0, len(line), select.PIPE_BUF):
            if not self._ready.poll(0):
                self._is_cut = self._is_cut or start > 0
                return False
            self._put(line[start : start + select.PIPE_BUF])
        self._is_cut = False
        return True

    def _put(self, data: bytes) -> None:
        self._stream.write(data)
        self._stream.flush()


def _readiness(stream: BinaryIO) -> "select.poll | None":
    """A poll object for streams whose reader can make a writer wait; None for all others."""
    try:
        number = stream.fileno()
        mode = os.fstat(number).st_mode
    except (OSError, ValueError):  # not a system file, or closed
        return None
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return None
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    return poll


class LineLogger:
    """The innermost logger: writes one encoded line, and never raises or waits for the stream's sake."""

    lost: ClassVar[int] = 0
    """Lines that could not be written (whole) since start."""
    threshold: ClassVar[int] = 0
    """The least severe level that is written: loggers that were bound before it changed go by it too."""

    __slots__ = ("_outlet", "name")

    def __init__(self, outlet: Outlet, name: str = "") -> None:
        self._outlet = outlet
        self.name = name

    def msg(self, line: bytes) -> None:
        """Write `line` and a newline, and flush."""
        try:
            is_written = self._outlet.write(line + b"\n")
        except (OSError, ValueError):  # ValueError: the stream was closed
            is_written = False
        if not is_written:
            LineLogger.lost += 1

    debug = info = warning = error = critical = msg


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
    structlog.configure(
        processors=[_drop_quiet, renderer],
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


def terminal_line(log: FilteringBoundLogger, request: Request, now: float) -> None:
    """Log the end of an accepted request: called once each, with counts and times, never contents.

    `cached_tokens` is the largest of the sequences' (they share one prompt); `completion_tokens` and
    `attempts` are sums. `rank`, `incarnation` and `batch` are those of the last dispatch, `ranks` those of all
    sequences when there are several; all null for a request that no rank was given. `queue_ms` is the wait until the
    first dispatch, `ttft_ms` null when no token came, `error` when the request succeeded. `tenant`, `cached` and
    `batch` are there only where they say something.
    """
    error = request.error
    started, first = request.accepted_at, request.first_token_at
    ended = now if request.ended_at is None else request.ended_at
    sequences = request.sequences
    attempts = [sequence.attempt for sequence in sequences if sequence.attempt is not None]
    write = log.warning if error is not None and error.reason in _FAULTS else log.info
    write(
        "request_ended",
        request_id=request.arrived.request_id,
        rpc=getattr(request.sink, "rpc", "unknown"),
        outcome="ok" if error is None else error.reason.value,
        error=None if error is None else error.message,
        rank=request.last_rank,
        incarnation=attempts[-1].incarnation if attempts else None,
        ranks=[attempt.rank for attempt in attempts] if len(attempts) > 1 else None,
        pinned_rank=request.arrived.pinned_rank,
        decision_id=request.decision_id,
        prompt_tokens=len(request.arrived.prompt_token_ids),
        completion_tokens=sum(sequence.completion_tokens for sequence in sequences),
        cached_tokens=max(sequence.cached_tokens for sequence in sequences),
        n=len(sequences),
        queue_ms=round(queue_ms(request), 3),
        ttft_ms=None if first is None else round((first - started) * 1000, 3),
        e2e_ms=round((ended - started) * 1000, 3),
        attempts=sum(sequence.attempts for sequence in sequences),
        **_where_known(request, attempts),
    )


def _where_known(request: Request, attempts: list[Attempt]) -> dict[str, object]:
    """Fields of features that most requests don't use."""
    fields: dict[str, object] = {}
    if request.arrived.tenant:
        fields["tenant"] = request.arrived.tenant
    if request.is_cached:
        fields["cached"] = True
    batch = attempts[-1].batch if attempts else None
    if batch is not None:
        fields["batch"] = batch.number
    return fields


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
