"""When a detected loss is announced: after the rows that came before it.

The event "disconnected" and the data travel on different pipes. Two waits make up for that: a short
one, because libzmq may report a disconnect just before it hands over the last messages; and, when
the request socket's connection went first, a longer one for the batch socket's, whose last rows may
still be in the kernel. Both are bounded: a batch connection that stays up doesn't delay the loss.
"""

import asyncio
from collections.abc import Callable

SETTLE_S = 0.002
OUTPUT_GRACE_S = 0.1
DRAIN_LIMIT_S = 1.0


class PendingLoss:
    """Drains the batch socket, then calls `finish` once.

    `drain` handles a bounded number of messages and says whether the socket is empty;
    `is_output_up` says whether more can still come.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        cause: str,
        *,
        drain: Callable[[], bool],
        is_output_up: Callable[[], bool],
        finish: Callable[[], None],
    ) -> None:
        self.cause = cause
        self._loop = loop
        self._drain = drain
        self._is_output_up = is_output_up
        self._finish = finish
        self._began_at = loop.time()
        self._handle: asyncio.Handle = loop.call_later(SETTLE_S, self._advance)

    def cancel(self) -> None:
        """The link closes: nobody is told."""
        self._handle.cancel()

    def _advance(self) -> None:
        age_s = self._loop.time() - self._began_at
        # Scheduled first, so that a handler's exception doesn't keep the loss from being announced.
        self._handle = self._loop.call_later(SETTLE_S, self._advance)
        is_empty = self._drain()
        self._handle.cancel()
        if not is_empty and age_s < DRAIN_LIMIT_S:
            self._handle = self._loop.call_soon(self._advance)
        elif self._is_output_up() and age_s < OUTPUT_GRACE_S:
            self._handle = self._loop.call_later(SETTLE_S, self._advance)
        else:
            self._finish()
