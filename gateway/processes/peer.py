"""Messages between the supervisor and a process, over a pair of sockets that nobody else has.

Either side asks and answers; what a side has not been told to answer is an error for who asks. The end of the other
process is the end of the stream.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import msgspec
import structlog

_log = structlog.get_logger("gateway.processes")
_HEADER_BYTES = 4
MAX_MESSAGE_BYTES = 256 * 1024 * 1024

Handler = Callable[[Any], Awaitable[Any]]


class PeerError(Exception):
    """The other side is gone, or could not do what it was asked."""


class _Message(msgspec.Struct, array_like=True):
    kind: Literal["ask", "answer", "failure"]
    number: int
    what: str
    body: Any


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Message).decode


class Peer:
    """The other side. `handlers` answer what it asks, by name; `closed` is set when it is gone."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handlers: Mapping[str, Handler]
    ) -> None:
        self.handlers = dict(handlers)
        self.closed = asyncio.Event()
        self._reader = reader
        self._writer = writer
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._start(self._read())

    @classmethod
    async def open(cls, end: socket.socket, handlers: Mapping[str, Handler]) -> "Peer":
        """Speak over this end of a pair."""
        end.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=end)
        return cls(reader, writer, handlers)

    async def ask(self, what: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """What the other side answers. Raises PeerError, also when it does not answer in time."""
        if self.closed.is_set():
            raise PeerError(f"{what}: the process is gone")
        self._number += 1
        number = self._number
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(_Message("ask", number, what, body))
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise PeerError(f"{what}: no answer within {timeout_s:g} s") from None
        finally:
            self._asked.pop(number, None)

    async def close(self) -> None:
        """End the stream. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._writer.close()
        self._end()

    def _send(self, message: _Message) -> None:
        data = _encode(message)
        self._writer.write(len(data).to_bytes(_HEADER_BYTES, "big") + data)

    async def _read(self) -> None:
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(_HEADER_BYTES), "big")
                if size > MAX_MESSAGE_BYTES:
                    raise PeerError(f"a message of {size} bytes")
                self._take(_decode(await self._reader.readexactly(size)))
        except (asyncio.IncompleteReadError, OSError):
            pass  # the other process has ended
        finally:
            self._end()

    def _take(self, message: _Message) -> None:
        if message.kind == "ask":
            self._start(self._answer(message))
            return
        answer = self._asked.get(message.number)
        if answer is None or answer.done():
            return
        if message.kind == "answer":
            answer.set_result(message.body)
        else:
            answer.set_exception(PeerError(f"{message.what}: {message.body}"))

    async def _answer(self, message: _Message) -> None:
        try:
            body = await self.handlers[message.what](message.body)
            reply = _Message("answer", message.number, message.what, body)
        except PeerError as error:
            reply = _Message("failure", message.number, message.what, str(error))
        except Exception as error:  # noqa: BLE001 - a defect of one answer must not end the others
            _log.exception("defect", where=f"processes: {message.what}")
            reply = _Message("failure", message.number, message.what, repr(error))
        if not self.closed.is_set():
            self._send(reply)

    def _start(self, routine: Any) -> None:
        task = asyncio.get_running_loop().create_task(routine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self) -> None:
        self.closed.set()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(PeerError("the process is gone"))
