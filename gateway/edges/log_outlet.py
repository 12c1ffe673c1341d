"""Where log lines go: a stream that is never waited for, and lines that leave together a moment later.

A log stream that cannot be written to (closed, full disk, broken pipe) costs its lines, never a request: losses are
counted in `LineLogger.lost`.
"""

import asyncio
import os
import select
import stat
from collections.abc import Callable
from typing import Any, BinaryIO, ClassVar

MAX_WAITING_BYTES = 16 * 1024
"""A quarter of what a pipe holds: its reader need not have read everything."""
MAX_DELAY_S = 0.05
_BYTES_PER_LINE = 400
"""What a line is taken for, besides its longest field, before it is encoded."""


class Outlet:
    """Writes lines to a stream without ever waiting for its reader: the event loop would wait with it.

    A pipe that is ready takes `PIPE_BUF` bytes without blocking, so lines go out in such pieces, each after
    a look. Files and terminals are written to as they are. `encode` makes lines of what `encode_soon` was given.
    """

    def __init__(self, stream: BinaryIO, encode: Callable[[list[Any]], bytes] = b"".join) -> None:
        self._stream = stream
        self._encode = encode
        self._ready = _readiness(stream)
        self._is_cut = False
        self._waiting: list[bytes] = []
        # Behind them, not encoded yet.
        self._unencoded: list[Any] = []
        self._waiting_bytes = 0
        # Will write what waits then, and the loop that it is of.
        self._timer: asyncio.TimerHandle | None = None
        self._planned_on: asyncio.AbstractEventLoop | None = None

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

    def write_soon(self, line: bytes) -> None:
        """Write a line within `MAX_DELAY_S`, together with others. Never raises for the stream's sake."""
        if self._unencoded:
            self._encode_all()
        self._waiting.append(line)
        self._waiting_bytes += len(line)
        if self._waiting_bytes > MAX_WAITING_BYTES or not self._plan():
            self.flush()

    def encode_soon(self, line: object, size: int) -> None:
        """The same with a line that is encoded then, in one step with others; its longest field has `size` bytes."""
        self._unencoded.append(line)
        self._waiting_bytes += size + _BYTES_PER_LINE
        if self._waiting_bytes > MAX_WAITING_BYTES or not self._plan():
            self.flush()

    def _plan(self) -> bool:
        """Let what waits be written soon. False if no loop runs: nobody would write later."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return False
        if loop is not self._planned_on:
            self._timer = loop.call_later(MAX_DELAY_S, self.flush_early)
            self._planned_on = loop
        return True

    def flush_early(self) -> None:
        """Write what waits ahead of its time, which then does not come. On the loop of who made it wait only."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = self._planned_on = None
        self.flush()

    def _encode_all(self) -> None:
        lines, self._unencoded = self._unencoded, []
        self._waiting += self._encode(lines).splitlines(keepends=True)

    def flush(self) -> None:
        """Write what waits. Never raises for the stream's sake."""
        if self._unencoded:
            if self._ready is None and not self._waiting:
                # They need not be told apart.
                unencoded, self._unencoded, self._waiting_bytes = self._unencoded, [], 0
                self._write_data(self._encode(unencoded), len(unencoded))
                return
            self._encode_all()
        if not self._waiting:
            return
        lines, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if self._ready is None:
            self._write_all(lines)
            return
        # No line is cut that fits into one piece: other processes may write to the same pipe.
        group: list[bytes] = []
        size = 0
        for line in lines:
            if group and size + len(line) >= select.PIPE_BUF:
                self._write_all(group)
                group, size = [], 0
            group.append(line)
            size += len(line)
        self._write_all(group)

    def _write_all(self, lines: list[bytes]) -> None:
        self._write_data(b"".join(lines), len(lines))

    def _write_data(self, data: bytes, lines: int) -> None:
        try:
            is_written = self.write(data)
        except (OSError, ValueError):  # ValueError: the stream was closed
            is_written = False
        if not is_written:
            LineLogger.lost += lines

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

    __slots__ = ("name", "outlet")

    def __init__(self, outlet: Outlet, name: str = "") -> None:
        self.outlet = outlet
        self.name = name

    def msg(self, line: bytes) -> None:
        """Write `line` and a newline, and flush; behind what waits."""
        self.outlet.flush()
        try:
            is_written = self.outlet.write(line + b"\n")
        except (OSError, ValueError):  # ValueError: the stream was closed
            is_written = False
        if not is_written:
            LineLogger.lost += 1

    debug = info = warning = error = critical = msg
