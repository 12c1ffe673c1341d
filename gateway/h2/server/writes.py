"""One write per connection for what is flushed together, and one for what else happens in a loop turn."""

import asyncio
from typing import Protocol


class Writer(Protocol):
    """A connection that has something to write."""

    def write_out(self) -> None:
        """Hand everything that waits to the transport."""
        ...

    def abort(self) -> None:
        """Give the connection up."""
        ...


class Writes:
    """Collects the connections that have something to say, and lets all of them write."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[Writer] = []
        self._is_planned = False

    def soon(self, writer: Writer) -> None:
        """Let the connection write at the end of this turn. It must ask once only until it has written."""
        self._waiting.append(writer)
        if not self._is_planned:
            self._is_planned = True
            self._loop.call_soon(self.write_all)

    def hold(self) -> None:
        """Whoever calls this is about to produce what is to be written, and calls `write_all` then, without a turn between."""
        self._is_planned = True

    def write_all(self) -> None:
        """Let them write."""
        self._is_planned = False
        waiting, self._waiting = self._waiting, []
        for writer in waiting:
            try:
                writer.write_out()
            except Exception as error:  # noqa: BLE001 - a defect with one connection must not silence the others
                self._loop.call_exception_handler({"message": "a connection was not written to", "exception": error})
                writer.abort()
