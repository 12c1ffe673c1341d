"""Hands one rank its requests: at once while its socket takes them, through the FIFO otherwise."""

from collections.abc import Callable

import msgspec
import zmq

from gateway.core.events import SendBlocked, SendFailed, SendUnblocked
from gateway.edges.engine_link.channel import Channel
from gateway.edges.engine_link.env import LinkEnv
from gateway.edges.engine_link.send_queue import SendQueue
from gateway.types import EngineRequest
from gateway.wire.protocol import EngineProtocol

REFUSAL_PAUSE_S = 0.25
"""A rank that refused a send counts as blocked for so long: it would only look idle."""
MAX_REFUSING_S = 1.0
"""A rank that refuses every send for so long, without a word from the monitor, is lost: it would only look idle."""
ENCODE_ERRORS = (msgspec.MsgspecError, ValueError, TypeError, OverflowError)


class Sender:
    """Sending side of one rank incarnation. Never raises; what goes wrong becomes a deferred event.

    What is still queued when the rank is lost is dropped: the loss covers those attempts. A refused send with
    EHOSTUNREACH is only a hint: it fails that attempt, the monitor decides about the rank.
    """

    def __init__(
        self,
        env: LinkEnv,
        protocol: EngineProtocol,
        channel: Channel,
        rank: int,
        incarnation: int,
        *,
        on_unreachable: Callable[[], None],
    ) -> None:
        self._env = env
        self._protocol = protocol
        self._channel = channel
        self._send_now = channel.send
        self._encode_add = protocol.encode_add
        self._counters = env.counters
        self._rank = rank
        self._incarnation = incarnation
        self._queue = SendQueue()
        self._is_blocked = False
        self._on_unreachable = on_unreachable
        self._refused_since: float | None = None
        self._paused_until: float | None = None

    def send(self, request: EngineRequest) -> None:
        """Encode once and send or queue."""
        try:
            frames = self._encode_add(request)
        except ENCODE_ERRORS as error:
            self._env.limited_log.warning(
                "request_not_encodable", rank=self._rank, wire_id=request.wire_id, error=str(error)
            )
            self._fail(request.wire_id, "encode")
            return
        if not self._is_blocked:
            try:
                self._send_now(frames)
            except zmq.Again:
                pass
            except zmq.ZMQError as error:
                self._note_refusal(error)
                self._fail(request.wire_id, "unreachable")
                return
            else:
                self._refused_since = None
                self._counters.adds += 1
                return
        if self._queue.offer(request.wire_id, frames):
            self._block()
        else:
            self._fail(request.wire_id, "overflow")

    def renew(self, incarnation: int) -> None:
        """Send in the name of another incarnation from now on."""
        self._incarnation = incarnation
        if self._is_blocked or self._paused_until is not None:
            self._env.events.defer(SendBlocked(self._rank, incarnation))

    def poke(self) -> None:
        """The pause after a refused send may be over."""
        if self._paused_until is not None and self._env.loop.time() >= self._paused_until:
            self._paused_until = None
            if not self._is_blocked:
                self._env.events.emit(SendUnblocked(self._rank, self._incarnation))

    def abort(self, wire_ids: list[str]) -> None:
        """Abort attempts: taken out of the FIFO when still there, sent or queued otherwise."""
        self._queue.abort(wire_ids)
        self._env.counters.aborted_ids += len(wire_ids)
        self.flush()

    def flush(self) -> None:
        """Send what is queued as far as the socket takes it."""
        while aborts := self._queue.next_aborts():
            sent = self._try_send(self._protocol.encode_abort(aborts))
            if sent is False:
                self._block()
                return
            if sent is None:
                self._env.counters.aborts_dropped += len(aborts)
            self._queue.aborts_sent(aborts)
        while add := self._queue.next_add():
            wire_id, frames = add
            sent = self._try_send(frames)
            if sent is False:
                self._block()
                return
            self._queue.add_sent(wire_id)
            if sent:
                self._env.counters.adds += 1
            else:
                self._fail(wire_id, "unreachable")
        self._unblock()

    def _try_send(self, frames: list[bytes]) -> bool | None:
        """True: taken. False: full, try later. None: the rank can't be reached."""
        try:
            self._send_now(frames)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            self._note_refusal(error)
            return None
        self._refused_since = None
        return True

    def _note_refusal(self, error: zmq.ZMQError) -> None:
        self._env.limited_log.warning("send_refused", rank=self._rank, error=error.strerror)
        now = self._env.loop.time()
        if self._paused_until is None and not self._is_blocked:
            self._env.events.defer(SendBlocked(self._rank, self._incarnation))
        self._paused_until = now + REFUSAL_PAUSE_S
        if self._refused_since is None:
            self._refused_since = now
        elif now - self._refused_since >= MAX_REFUSING_S:
            self._on_unreachable()

    def _fail(self, wire_id: str, cause: str) -> None:
        self._env.counters.send_failed.add(cause)
        self._env.events.defer(SendFailed(self._rank, self._incarnation, wire_id, cause))

    def _block(self) -> None:
        if not self._is_blocked:
            self._is_blocked = True
            self._env.counters.send_blocked += 1
            self._channel.set_wants_write(wants_write=True)
            if self._paused_until is None:
                self._env.events.defer(SendBlocked(self._rank, self._incarnation))

    def _unblock(self) -> None:
        if self._is_blocked:
            self._is_blocked = False
            self._channel.set_wants_write(wants_write=False)
            if self._paused_until is None:
                self._env.events.defer(SendUnblocked(self._rank, self._incarnation))
