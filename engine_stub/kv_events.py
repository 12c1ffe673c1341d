"""Publishing a rank's KV events on ZMQ, with a buffer for subscribers that missed some.

The publisher lives as long as the rank, over its incarnations: each of them starts again at sequence
number 0, with `AllBlocksCleared` as its first event. A subscriber sees the number go back, or the
event, and forgets what it knew of the rank. A batch is sent for each step that changed the cache.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from engine_stub.config import KvEvents
from engine_stub.kv_events_wire import END_OF_REPLAY, SEQUENCE_BYTES, EventEncoder, rank_endpoint
from engine_stub.scheduler import AllBlocksCleared, CacheEvent
from engine_stub.sockets import FrameReader, Frames

SOCKETS = 2
"""Per rank."""


class KvEventPublisher:
    """The PUB socket of one rank and, if configured, its replay ROUTER. Raises ZMQError when it can't bind.

    Sends never block: a subscriber that is too slow loses batches and can ask for them again.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: KvEvents,
        *,
        rank: int,
        block_size: int,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        assert settings.endpoint is not None, "no endpoint: nothing to publish on"
        self.sequence = 0
        self._settings = settings
        self._unix_clock = unix_clock
        self._topic = settings.topic.encode()
        self._encoder = EventEncoder(
            block_size=block_size, rank=rank, event_form=settings.event_form, hash_form=settings.hash_form
        )
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=settings.buffer_steps)
        self._replay: zmq.Socket[bytes] | None = None
        self._reader: FrameReader | None = None
        self._socket = context.socket(zmq.PUB)
        try:
            self._socket.setsockopt(zmq.SNDHWM, settings.hwm)
            self.endpoint = _bind(self._socket, rank_endpoint(settings.endpoint, rank))
            self.replay_endpoint = None
            if settings.replay_endpoint is not None:
                self._replay = context.socket(zmq.ROUTER)
                self.replay_endpoint = _bind(self._replay, rank_endpoint(settings.replay_endpoint, rank))
        except (zmq.ZMQError, ValueError):
            self.close()
            raise

    @property
    def ready_config(self) -> dict[str, Any]:
        """What the rank says of it when it registers: vLLM's keys, and the addresses that are really bound."""
        settings = self._settings
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": settings.endpoint,
            "replay_endpoint": settings.replay_endpoint,
            "buffer_steps": settings.buffer_steps,
            "hwm": settings.hwm,
            "topic": settings.topic,
            "bound_endpoint": self.endpoint,
            "bound_replay_endpoint": self.replay_endpoint,
        }

    def start_incarnation(self) -> None:
        """The rank (re)starts with an empty cache: sequence numbers begin at 0 again."""
        self.sequence = 0
        self._kept.clear()
        self.publish([AllBlocksCleared()])
        if self._replay is not None and self._reader is None:
            self._reader = FrameReader(self._replay, self._on_replay)
            self._reader.start()

    def publish(self, events: list[CacheEvent]) -> None:
        """Send one batch, if there are events."""
        if not events:
            return
        payload = self._encoder.payload(events, self._unix_clock())
        self._kept.append((self.sequence, payload))
        self._socket.send_multipart([self._topic, _number(self.sequence), payload], zmq.NOBLOCK)
        self.sequence += 1

    def close(self) -> None:
        """Close the sockets."""
        if self._reader is not None:
            self._reader.stop()
        for socket in (self._socket, self._replay):
            if socket is not None:
                socket.close(linger=0)

    def _on_replay(self, frames: Frames) -> None:
        assert self._replay is not None
        if len(frames) != 3 or len(frames[2]) != SEQUENCE_BYTES:
            return
        identity, first = frames[0], int.from_bytes(frames[2], "big")
        for number, payload in self._kept:
            if number >= first:
                self._replay.send_multipart([identity, b"", _number(number), payload])
        self._replay.send_multipart([identity, b"", END_OF_REPLAY, b""])


def _number(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind; the address with the port that the system chose."""
    socket.bind(endpoint)
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
