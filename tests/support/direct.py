"""Calls of our own transport without the transport, and a service behind a gate to serve them."""

import base64
from collections.abc import Callable, Iterable
from typing import Any

from google.rpc import status_pb2

from gateway.edges.grpc_direct import HeadFacts
from gateway.edges.grpc_gate import CallGate
from gateway.edges.grpc_gateway import GatewayService
from gateway.edges.grpc_status import STATUS_KEY
from gateway.h2.protocol.header_blocks import HeaderDecoder
from gateway.h2.rpc.heads import CallHead
from gateway.v1 import gateway_pb2
from tests.support.fake_driver import FakeDriver
from tests.support.grpc_edge import generate_request, info_of, make_config


class FakeStream:
    """What takes messages below a call; nothing while the call shuts."""

    def __init__(self, call: "FakeCall") -> None:
        self.call = call

    def push(self, message: bytes) -> bool:
        if self.call.is_shutting:
            return False
        self.call.messages.append(message)
        return True


class FakeCall:
    """A call of our own transport; `is_shutting` and `open_up` are what the client's windows do."""

    def __init__(self, metadata: Iterable[tuple[str, str | bytes]] = (), remaining: float | None = None) -> None:
        self.head = CallHead("/x/Generate", tuple(metadata), is_gzip=False)
        self.head.memo = HeadFacts(None, None)
        self.deadline_at = None if remaining is None else 1.0
        self.remaining = remaining
        self.on_ready: Callable[[], None] | None = None
        self.on_closed: Callable[[bool], None] | None = None
        self.is_ready = True
        self.is_shutting = False
        self.messages: list[bytes] = []
        self.initial: dict[str, str | bytes] | None = None
        self.code: int | None = None
        self.details = ""
        self.block = b""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5"

    def time_remaining(self) -> float | None:
        return self.remaining

    def send_head(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        assert not self.messages
        self.initial = dict(metadata)

    def push(self, message: bytes) -> None:
        assert self.code is None
        self.messages.append(message)
        if self.is_shutting:
            self.is_ready = False

    @property
    def stream(self) -> "FakeStream":
        assert self.messages, "the first message needs more"
        return FakeStream(self)

    def finish(self, code: int, details: str = "", trailing_block: bytes = b"") -> None:
        assert self.code is None, "a call ends once"
        self.code, self.details, self.block = code, details, trailing_block
        self._let_go()

    def leave(self, *, is_late: bool = False) -> None:
        """The client goes away, or its deadline passes."""
        on_closed, self.code = self.on_closed, -1
        self._let_go()
        assert on_closed is not None
        on_closed(is_late)

    def open_up(self) -> None:
        self.is_shutting = False
        self.is_ready = True
        assert self.on_ready is not None
        self.on_ready()

    def _let_go(self) -> None:
        self.is_ready = False
        self.on_ready = self.on_closed = None

    @property
    def responses(self) -> list[gateway_pb2.GenerateResponse]:
        return [gateway_pb2.GenerateResponse.FromString(message) for message in self.messages]

    @property
    def tokens(self) -> list[list[int]]:
        return [list(response.token_ids) for response in self.responses]

    @property
    def trailing(self) -> dict[str, bytes]:
        fields = HeaderDecoder(1 << 16, {}).decode(self.block)
        return {name.decode(): value for name, value in fields}

    @property
    def reason(self) -> str:
        value = self.trailing[STATUS_KEY]
        status = status_pb2.Status.FromString(base64.b64decode(value + b"=" * (-len(value) % 4)))
        assert (status.code, status.message) == (self.code, self.details)
        return info_of(status).reason


class World:
    """One service's Generate behind a gate. When a test is done, nothing may be counted any more."""

    def __init__(self, **config: Any) -> None:
        self.driver: Any = FakeDriver()
        self.config = make_config(**config)
        self.gate = CallGate(self.config)
        self.service = GatewayService(self.config, self.driver, self.gate)
        (method,) = (each for each in self.service.service.methods if each.name == "Generate")
        assert method.direct is not None
        self.serve: Callable[[bytes, Any], None] = method.direct(self.gate)

    def start(self, call: FakeCall | None = None, **fields: Any) -> tuple[FakeCall, Any, Any]:
        """A call, its request and its writer."""
        call = call or FakeCall()
        self.serve(generate_request(**fields).SerializeToString(), call)
        request = self.driver.requests[-1]
        return call, request, request.sink

    def is_clear(self) -> bool:
        return (self.gate.streams, self.gate.connections, len(self.gate.watch), len(self.driver.live)) == (0, 0, 0, 0)
