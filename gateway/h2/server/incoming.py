"""The request side of a call: messages as they arrive, read when the handler wants them."""

import asyncio
from collections.abc import Callable

from gateway.h2.rpc.messages import MessageReader
from gateway.h2.rpc.status import Code, RpcError

MAX_UNREAD_BYTES = 128 * 1024
"""Whole messages that a handler has not read yet: beyond this its client gets no more room in the window."""


class Incoming:
    """Messages of one request. `give_back` is told how many bytes may be sent anew, `hold` what incomplete ones take."""

    __slots__ = ("_arrived", "_give_back", "_has_ended", "_hold", "_is_single", "_reader", "_unread", "_withheld")

    def __init__(
        self,
        reader: MessageReader,
        *,
        is_single: bool,
        give_back: Callable[[int], None],
        hold: Callable[[int], None],
    ) -> None:
        self._reader = reader
        self._is_single = is_single
        self._give_back = give_back
        self._hold = hold
        self._arrived: asyncio.Future[None] | None = None
        self._has_ended = False
        self._unread = 0
        self._withheld = 0

    def receive(self, data: bytes) -> None:
        """A piece of the request's body. Raises `RpcError`."""
        if self._has_ended:
            return
        reader = self._reader
        before = reader.partial_bytes
        self._unread += reader.feed(data)
        self._hold(reader.partial_bytes - before)
        if self._is_single and len(reader.messages) > 1:
            raise RpcError(Code.INTERNAL, "more than one request message")
        self._withheld += len(data)
        self._return_room()
        self._wake()

    def end(self) -> bool:
        """The client has said everything. False if that does not matter any more; `RpcError` if it is no whole request."""
        if self._has_ended:
            return False
        self._has_ended = True
        if self._reader.partial_bytes:
            raise RpcError(Code.INTERNAL, "the request ends within a message")
        if self._is_single and not self._reader.messages:
            raise RpcError(Code.INTERNAL, "the request has no message")
        self._wake()
        return True

    def close(self) -> None:
        """Hold nothing any more; who reads gets no more than is there."""
        self._hold(-self._reader.partial_bytes)
        self._has_ended = True
        self._give_back = _ignore
        self._hold = _ignore
        self._wake()

    def take(self) -> bytes:
        """The only message."""
        return self._reader.messages.popleft()

    async def read(self) -> bytes | None:
        """The next message; None after the last one."""
        messages = self._reader.messages
        while not messages:
            if self._has_ended:
                return None
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        message = messages.popleft()
        self._unread -= len(message)
        self._return_room()
        return message

    def _return_room(self) -> None:
        if self._withheld and self._unread <= MAX_UNREAD_BYTES:
            size, self._withheld = self._withheld, 0
            self._give_back(size)

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)


def _ignore(_: int) -> None:
    pass
