"""A group's handshake socket. Whatever arrives here is answered, held, or counted; nothing ends it.

Message `[identity, payload]` (wire 1.2): the identity is the engine index as two bytes,
little-endian; the payload a map with the status HELLO or READY.
"""

import asyncio

import zmq

from gateway.config.checks import MAX_RANKS
from gateway.config.schema import Group
from gateway.edges.engine_link.connections import source_fd
from gateway.edges.engine_link.counters import LimitedLog, LinkCounters
from gateway.edges.engine_link.endpoints import bind, remove_ipc_path
from gateway.edges.engine_link.monitored import Context
from gateway.edges.engine_link.rank_link import RankLink
from gateway.edges.engine_link.reader import Socket, SocketReader
from gateway.wire.handshake import WireError, decode_hello, index_of

MAX_FRAME_BYTES = 64 * 1024
"""A HELLO has under 200 bytes; larger frames are garbage, and libzmq itself cuts off those above the next bound."""
MAX_RECEIVED_BYTES = 1024 * 1024
_UNKNOWN_HINT = "raise groups[].ranks, or correct start_index"
_OPTIONS: dict[int, int] = {
    zmq.LINGER: 0,
    zmq.ROUTER_MANDATORY: 1,
    zmq.ROUTER_HANDOVER: 1,
    zmq.MAXMSGSIZE: MAX_RECEIVED_BYTES,
}


class HandshakePort:
    """Bound by `open` (raises LinkError); hands HELLO and READY to the rank that they are of."""

    def __init__(self, group: Group, counters: LinkCounters, limited_log: LimitedLog) -> None:
        self.address = ""
        self._group = group
        self._counters = counters
        self._log = limited_log
        self._ranks: dict[int, RankLink] = {}
        # Who dialled for a place that is not configured, and its connection: engines say HELLO once and wait.
        self._early: dict[int, int | None] = {}
        self._socket: Socket | None = None
        self._reader: SocketReader | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no rank could dial here."""
        return not self._ranks

    def add(self, index: int, rank: RankLink) -> None:
        """Let the rank at this place of the group dial; it may have done so before."""
        self._ranks[index] = rank
        if index in self._early:
            rank.on_hello(self._early.pop(index))

    def remove(self, index: int) -> None:
        """A HELLO for this place of the group is for nobody from now on."""
        self._ranks.pop(index, None)

    def open(self, context: Context, loop: asyncio.AbstractEventLoop) -> None:
        """Bind and listen."""
        self._socket = context.socket(zmq.ROUTER)
        for option, value in _OPTIONS.items():
            self._socket.setsockopt(option, value)
        self.address = bind(self._socket, self._group.handshake)
        self._reader = SocketReader(loop, self._socket, self._on_message)

    def send_init(self, identity: bytes, payload: bytes) -> bool:
        """Answer a HELLO; False when the engine isn't connected any more."""
        if self._socket is None or self._reader is None:
            return False
        try:
            self._socket.send_multipart([identity, payload], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        finally:
            self._reader.poke()
        return True

    def poke(self) -> None:
        """Safety tick."""
        if self._reader is not None:
            self._reader.poke()

    def close(self) -> None:
        """Stop listening."""
        if self._reader is not None:
            self._reader.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            remove_ipc_path(self.address)

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        identity = frames[0].bytes
        if any(len(frame) > MAX_FRAME_BYTES for frame in frames):
            self._reject("oversized", identity)
            return
        index = index_of(identity)
        if index is None:
            self._reject("bad_identity", identity)
            return
        try:
            hello = decode_hello([frame.buffer for frame in frames[1:]])
        except WireError as error:
            self._reject("garbage", identity, engine_index=index, problem=str(error))
            return
        place = index - self._group.start_index
        rank = self._ranks.get(place)
        if rank is None:
            if hello.status == "HELLO" and 0 <= place < MAX_RANKS:
                self._early[place] = source_fd(frames[0])
            self._reject("unknown_index", identity, engine_index=index, configured=self._configured, hint=_UNKNOWN_HINT)
            return
        if hello.status == "HELLO":
            rank.on_hello(source_fd(frames[0]))
        else:
            rank.on_ready()

    @property
    def _configured(self) -> str:
        """The numbers that engines may dial with."""
        first = self._group.start_index
        return f"{first + min(self._ranks)}..{first + max(self._ranks)}" if self._ranks else "none"

    def _reject(self, outcome: str, identity: bytes, **facts: object) -> None:
        self._counters.handshakes.add(outcome)
        self._log.warning(f"handshake_{outcome}", group=self._group.name, identity=identity[:16].hex(), **facts)
