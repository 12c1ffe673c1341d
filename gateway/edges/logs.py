"""Structured logs: one JSON object a line on stderr, and one terminal line per accepted request.

Lines are written with one processor that adds time and level and encodes with msgspec (about 3 µs); the
console renderer and what it imports are loaded only when asked for. Prompts and generated tokens are
never logged. `gateway.edges.log_outlet` has the stream.

Terminal lines are most of all lines. As JSON they don't go through structlog: they are encoded in one step, and those of
a twentieth of a second leave in one write. A warning and a line of any other kind leave at once, behind them.
"""

import atexit
import io
import logging
import sys
from datetime import UTC, datetime
from typing import Any, BinaryIO, ClassVar

import msgspec
import structlog
from msgspec import UNSET, UnsetType
from structlog.processors import format_exc_info
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from gateway.config.values import LogFormat, LogLevel
from gateway.core.errors import Reason
from gateway.core.request import Request
from gateway.edges.log_lines import OWN_FIELDS_AT, TerminalLine, describe, set_fields
from gateway.edges.log_outlet import LineLogger, Outlet

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
    outlet = Outlet(target, _encode_lines)
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
    line = describe(request, now, "warning" if is_fault else "info")
    if _terminal.write(log, line):
        return
    write = log.warning if is_fault else log.info
    write("request_ended", **set_fields(line, OWN_FIELDS_AT))


def write_waiting() -> None:
    """Write the lines that wait to leave with others; on the loop that they are of."""
    _terminal.outlet.flush_early()


class _TerminalWriter:
    """The short way of terminal lines to the stream, while it gives what the long one would."""

    def __init__(self) -> None:
        self.outlet = Outlet(io.BytesIO())
        self.processors: list[Processor] = []
        # The logger that `_name` belongs to; None until the next line.
        self.log: FilteringBoundLogger | None = None
        self._name: str | UnsetType | None = None

    def write(self, log: FilteringBoundLogger, line: TerminalLine) -> bool:
        """Write a line of `log`; False if it must go the long way."""
        # Who listens to the lines, as tests do, puts other processors into the list.
        if not self.processors or self.processors[-1] is not _render_json or not structlog.is_configured():
            return False
        if log is not self.log:
            self.log, self._name = log, _name_of(log)
        if self._name is None:
            return False
        outlet = self.outlet
        line.logger = self._name
        line.timestamp = datetime.now(UTC)
        if line.error is None:
            outlet.encode_soon(line, len(line.request_id))
            return True
        try:
            outlet.write_soon(_encode(line) + b"\n")
        except (TypeError, ValueError):  # as in `_render_json`: an error may quote anything
            return False
        if line.level == "warning":
            outlet.flush()
        return True

    def flush(self) -> None:
        """Write what still waits: the process may end before its time has come."""
        self.outlet.flush()


def _name_of(log: FilteringBoundLogger) -> str | UnsetType | None:
    """A logger's name, UNSET without; None for one that has more to say, or that is none of ours."""
    bound = log.bind()
    inner = getattr(bound, "_logger", None)
    # Who listens to the lines may also have set up other processors for all loggers.
    is_ours = getattr(bound, "_processors", None) is _terminal.processors
    if not is_ours or not isinstance(inner, LineLogger) or structlog.get_context(bound):
        return None
    return inner.name or UNSET


_terminal = _TerminalWriter()
atexit.register(_terminal.flush)


_encoder = msgspec.json.Encoder(enc_hook=repr)
_encode = _encoder.encode


def _encode_lines(lines: list[TerminalLine]) -> bytes:
    try:
        return _encoder.encode_lines(lines)
    except (TypeError, ValueError):
        return b"".join(map(_encode_line, lines))


def _encode_line(line: TerminalLine) -> bytes:
    try:
        return _encode(line) + b"\n"
    except (TypeError, ValueError):
        return _encode_printable(set_fields(line, 0)) + b"\n"


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
        return _encode_printable(line)


def _encode_printable(line: dict[str, Any]) -> bytes:
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
