"""The control socket: watch and break ranks while they serve. JSON requests from a ZMQ REQ socket.

| request | effect |
|---|---|
| `{"op": "state"}` | the state of every rank (`"rank": i` for one) |
| `{"op": "telemetry"}` | counters, gauges, rates and, if measured, step times of every rank |
| `{"op": "effective-config"}` | what every rank really runs with; null: not measured or not bounded |
| `{"op": "events", "id": "..."}` | the event log, of one request or (without `id`) of all; null: not logged |
| `{"op": "faults", "rank": i, "set": {...}}` | switch fields of `Faults`; without `rank`: on every rank |
| `{"op": "kill", "rank": i}` | sockets closed, nothing flushed |
| `{"op": "restart", "rank": i}` | a new, healthy incarnation dials (the reply doesn't wait for it) |

Every reply is `{"ok": true, "ranks": [...]}`, by default with the state of each rank, or `{"ok": false, "error": "..."}`.
"""

import asyncio
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
import zmq

from engine_stub import views
from engine_stub.group import StubGroup
from engine_stub.rank import StubRank
from engine_stub.sockets import FrameReader, Frames

LOCAL_PREFIXES = ("tcp://127.", "tcp://localhost:", "tcp://[::1]:", "ipc://")


class ControlRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request."""

    op: Literal["state", "telemetry", "effective-config", "events", "faults", "kill", "restart"]
    rank: int | None = None
    id: str | None = None
    set: dict[str, Any] = {}


class ControlReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """One reply."""

    ok: bool
    ranks: list[dict[str, Any]] = []
    error: str | None = None


class ControlServer:
    """Answers control requests of one group, one at a time. Local addresses only (ValueError)."""

    def __init__(self, group: StubGroup, address: str) -> None:
        if not address.startswith(LOCAL_PREFIXES):
            raise ValueError(f"control address {address} is not local: use tcp://127.0.0.1:PORT or ipc://PATH")
        self._group = group
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # A ROUTER serves REQ clients and, unlike a REP, may be read before it has answered.
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self._close()
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._arrived: asyncio.Queue[Frames] = asyncio.Queue()
        self._reader = FrameReader(self._socket, self._arrived.put_nowait)

    async def __aenter__(self) -> Self:
        """Start reading; `run` answers."""
        self._reader.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the socket."""
        self._reader.stop()
        self._close()

    def _close(self) -> None:
        self._socket.close()
        self._context.term()

    async def run(self) -> None:
        """Answer until cancelled."""
        while True:
            *envelope, body = await self._arrived.get()
            reply = await self.handle(body)
            self._socket.send_multipart([*envelope, msgspec.json.encode(reply)], zmq.NOBLOCK)

    async def handle(self, body: bytes) -> ControlReply:
        """The reply to one request; never raises on bad input."""
        try:
            request = msgspec.json.decode(body, type=ControlRequest)
            ranks = self._selected(request)
            for rank in ranks:
                await _perform(request, rank)
        except (msgspec.MsgspecError, LookupError) as error:
            return ControlReply(ok=False, error=str(error))
        return ControlReply(ok=True, ranks=[_view(request, rank) for rank in ranks])

    def _selected(self, request: ControlRequest) -> list[StubRank]:
        ranks = self._group.ranks
        if request.rank is None:
            if request.op in ("kill", "restart"):
                raise LookupError(f"{request.op} needs a rank: 0..{len(ranks) - 1}")
            return ranks
        if not 0 <= request.rank < len(ranks):
            raise LookupError(f"there is no rank {request.rank}: 0..{len(ranks) - 1}")
        return [ranks[request.rank]]


async def _perform(request: ControlRequest, rank: StubRank) -> None:
    match request.op:
        case "faults":
            rank.set_faults(**request.set)
        case "kill":
            await rank.kill()
        case "restart":
            await rank.restart()
        case _:
            pass


def _view(request: ControlRequest, rank: StubRank) -> dict[str, Any]:
    match request.op:
        case "telemetry":
            return views.telemetry(rank)
        case "effective-config":
            return views.effective(rank)
        case "events":
            return views.events(rank, request.id)
        case _:
            return views.state(rank)
