"""Generate without a handler: one function call per request, then the driver's flushes into its writer do the rest.

On our own transport a request costs no task, no future and no coroutine. What a call passes before its request is
submitted is the same as elsewhere: the gate's bounds, the headers' checks, decoding. What headers say is read once for
all calls that share them.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from gateway.core.errors import GatewayError
from gateway.core.events import RequestArrived
from gateway.edges.grpc_context import DirectCall, RpcContext
from gateway.edges.grpc_methods import Method, raw_stream
from gateway.edges.grpc_request import Call, RequestReader
from gateway.edges.grpc_status import defect_of, encode_status
from gateway.edges.grpc_stream import serve_request
from gateway.edges.grpc_trailing import id_metadata
from gateway.h2.rpc.status import encode_metadata

if TYPE_CHECKING:
    from gateway.edges.driver import Driver
    from gateway.edges.grpc_gate import CallGate

_log = structlog.get_logger("gateway.grpc")

Prepare = Callable[[bytes, Call, float], RequestArrived]
"""Decodes a request of a call, at a time of the driver's clock, into an event whose sink is a `StreamWriter`."""


class HeadFacts:
    """What is known of a call's headers: its handler, with whose credentials it got in, what they say of requests."""

    __slots__ = ("call", "credentials", "handler")

    def __init__(self, handler: Any, credentials: Any) -> None:
        self.handler = handler
        self.credentials = credentials
        self.call: Call | None = None


def generate_method(driver: "Driver", reader: RequestReader, prepare: Prepare) -> Method:
    """The method Generate of a service, on both kinds of transport."""

    async def run(data: bytes, context: RpcContext) -> None:
        now = driver.clock()
        call = reader.call(context, now)
        arrived = prepare(data, call, now)
        await serve_request(driver, arrived, arrived.sink, call, context)

    return raw_stream("Generate", run, lambda gate: Direct(driver, reader, prepare, gate).serve)


class Direct:
    """Serves calls of one method through one gate."""

    def __init__(self, driver: "Driver", reader: RequestReader, prepare: Prepare, gate: "CallGate") -> None:
        self._driver = driver
        self._reader = reader
        self._prepare = prepare
        self._gate = gate

    def serve(self, data: bytes, call: DirectCall) -> None:
        """Begin the call's request, or refuse it. Whatever goes wrong is answered here."""
        gate, driver = self._gate, self._driver
        since = gate.clock()
        peer = call.peer()
        refusal = gate.enter(peer, len(data))
        if refusal is not None:
            self._refuse(call, refusal, since)
            return
        arrived: RequestArrived | None = None
        try:
            facts: HeadFacts = call.head.memo
            said = facts.call
            if said is None:
                said = facts.call = self._reader.headers(call.head.invocation_metadata)
            now = driver.clock()
            if call.deadline_at is not None:
                said = msgspec.structs.replace(said, deadline_at=now + (call.time_remaining() or 0.0))
            arrived = self._prepare(data, said, now)
            request = driver.submit(arrived)
        except GatewayError as error:
            gate.leave(peer)
            self._refuse(call, error, since, arrived)
        except Exception:  # noqa: BLE001 - the last line of defence: a defect must not kill other calls
            gate.leave(peer)
            if arrived is not None:
                arrived.sink.close()  # whatever the core may still do with it
            _log.exception("rpc_failed", rpc="Generate")
            self._refuse(call, defect_of("Generate"), since)
        else:
            arrived.sink.attach(call, request, driver, gate, peer)
            if said.request_id is not None:
                call.send_head(id_metadata(arrived.request_id))

    def _refuse(
        self, call: DirectCall, error: GatewayError, since: float, arrived: RequestArrived | None = None
    ) -> None:
        echo = b"" if arrived is None else encode_metadata(id_metadata(arrived.request_id))
        call.finish(*encode_status(error, echo))
        self._gate.refused(since)
