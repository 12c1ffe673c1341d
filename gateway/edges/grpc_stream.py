"""Generate with a handler: serves one request's stream on any transport of the gRPC library's interface."""

from typing import TYPE_CHECKING

from gateway.core.errors import GatewayError
from gateway.core.events import RequestArrived
from gateway.edges.grpc_context import RpcContext
from gateway.edges.grpc_request import Call
from gateway.edges.grpc_status import abort_with
from gateway.edges.grpc_trailing import id_metadata, trailing_metadata
from gateway.edges.grpc_writer import StreamWriter

if TYPE_CHECKING:
    from gateway.edges.driver import Driver


async def serve_request(
    driver: "Driver", arrived: RequestArrived, stream: StreamWriter, call: Call, context: RpcContext
) -> None:
    """Submit a request whose sink is `stream`, write its output and end the call with its outcome.

    However the handler is left, the request has ended afterwards and holds nothing. The request id goes out as
    trailing metadata, and as a header for callers that sent it as one: headers of their own cost a transport
    operation per request, which is a good part of a short one.
    """
    echo = id_metadata(arrived.request_id)
    try:
        request = driver.submit(arrived)
    except GatewayError as error:
        await abort_with(context, error, echo)
    stream.watch(context, lambda reason: driver.cancel(request, reason))
    try:
        if call.request_id is not None:
            await context.send_initial_metadata(echo)
        await stream.run(context)
        farewell = stream.farewell(request) if stream.failure is None else None
        for message in farewell or ():
            await stream.write(context, message)
    finally:
        stream.close()
        # A no-op once the request has ended; else the client is gone or its transport failed.
        driver.cancel(request, call.early_end(driver.clock()))
    trailing = (*echo, *trailing_metadata(request))
    request.answered()
    failure = stream.failure or request.error
    if failure is not None and farewell is None:
        await abort_with(context, failure, trailing)
    context.set_trailing_metadata(trailing)
