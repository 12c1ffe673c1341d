"""One write per connection and loop turn, whatever happens in the turn."""

import asyncio
from typing import Protocol


class Writer(Protocol):
    """A connection that has something to write."""

    def write_out(self) -> None:
        """Hand everything that waits to the transport."""
        ...


class Writes:
    """Collects the connections that have something to say in this turn. One callback serves them all."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[Writer] = []

    def soon(self, writer: Writer) -> None:
        """Let the connection write at the end of this turn. It must ask once only until it has written."""
        if not self._waiting:
            self._loop.call_soon(self._write_all)
        self._waiting.append(writer)

    def _write_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for writer in waiting:
            writer.write_out()
