"""Errors on the wire: a `GatewayError` becomes a `google.rpc.Status` with details.

The details follow google.rpc: ErrorInfo always (reason, domain "rankgate", facts as metadata), RetryInfo when the
error says when a retry can help, BadRequest when it names a field.
"""

from typing import NoReturn

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from gateway.core.errors import GatewayError, Reason
from gateway.edges.grpc_context import Metadata, RpcContext
from gateway.h2.rpc.status import encode_metadata

DOMAIN = "rankgate"
STATUS_KEY = "grpc-status-details-bin"
# A client's default limit for all metadata together is 8 KiB; a status is sent twice in it (text and details).
_MAX_MESSAGE_CHARS = 1024
_MAX_FACT_CHARS = 256
_MICROS = 1_000_000

CODES: dict[Reason, grpc.StatusCode] = {
    Reason.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Reason.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.UNSUPPORTED_FIELD: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.INVALID_RANK: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.MODEL_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.METADATA_TOO_LARGE: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.MESSAGE_TOO_LARGE: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.PROMPT_TOO_LONG: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.KV_TOO_SMALL: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.DUPLICATE_REQUEST_ID: grpc.StatusCode.ALREADY_EXISTS,
    Reason.PINNED_RANK_UNAVAILABLE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NO_ELIGIBLE_RANK: grpc.StatusCode.UNAVAILABLE,
    Reason.TOO_MANY_STREAMS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.GATEWAY_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.TENANT_LIMIT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.QUEUE_TIMEOUT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.ORDER_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.SLO_UNATTAINABLE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.RANKS_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.KV_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Reason.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.MAX_AGE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.CANCELLED: grpc.StatusCode.CANCELLED,
    Reason.ABORTED: grpc.StatusCode.ABORTED,
    Reason.SLOW_READER: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.STREAM_IDLE: grpc.StatusCode.UNAVAILABLE,
    Reason.RANK_LOST: grpc.StatusCode.UNAVAILABLE,
    Reason.SEND_FAILED: grpc.StatusCode.UNAVAILABLE,
    Reason.ENGINE_REJECTED: grpc.StatusCode.UNAVAILABLE,
    Reason.ENGINE_ERROR: grpc.StatusCode.INTERNAL,
    Reason.DATA_LOSS: grpc.StatusCode.DATA_LOSS,
    Reason.DECISION_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.CONFIG_INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.CONFIG_NEEDS_RESTART: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.CONFIG_NOT_APPLIED: grpc.StatusCode.UNAVAILABLE,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
}
"""The status code of every reason; `docs/errors.md` shows the same table."""


def to_status(error: GatewayError) -> status_pb2.Status:
    """Code, message and details of an error."""
    number: int = CODES[error.reason].value[0]
    status = status_pb2.Status(code=number, message=_clip(error.message, _MAX_MESSAGE_CHARS))
    details: list[Message] = [_error_info(error)]
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMicroseconds(round(error.retry_after_s * _MICROS))
        details.append(retry)
    field = error.facts.get("field")
    if isinstance(field, str):
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=status.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    for detail in details:
        status.details.add().Pack(detail)
    return status


def encode_status(error: GatewayError, trailing_block: bytes = b"") -> tuple[int, str, bytes]:
    """The error's code, message and trailing header fields, behind others that are encoded."""
    status = to_status(error)
    block = trailing_block + encode_metadata(((STATUS_KEY, status.SerializeToString()),))
    return status.code, status.message, block


def defect_of(rpc: str) -> GatewayError:
    """What a caller learns of a defect of ours in a method of this name, with or without its service's."""
    name = rpc.rpartition("/")[2]
    return GatewayError(Reason.INTERNAL, f"{name} failed inside the gateway; its log has the details")


async def abort_with(context: RpcContext, error: GatewayError, trailing_metadata: Metadata = ()) -> NoReturn:
    """End the call with the error's status. `trailing_metadata` is sent along."""
    status = to_status(error)
    trailing = (*trailing_metadata, (STATUS_KEY, status.SerializeToString()))
    await context.abort(CODES[error.reason], status.message, trailing)


def _error_info(error: GatewayError) -> error_details_pb2.ErrorInfo:
    info = error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN)
    info.metadata["retryable"] = _render(error.retryable)
    for name, fact in error.facts.items():
        if fact is not None:
            info.metadata[name] = _render(fact)
    return info


def _render(fact: object) -> str:
    text = str(fact).lower() if isinstance(fact, bool) else str(fact)
    return _clip(text, _MAX_FACT_CHARS)


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
