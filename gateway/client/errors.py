"""Why a generation failed, as the gateway said it."""

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class GenerationError(Exception):
    """A request that was refused, or ended without success after the outputs that were read before.

    `reason` is the stable string of docs/errors.md (empty when the connection failed), `metadata` what belongs to it,
    `retry_after_s` the gateway's hint in seconds, None where a retry can't help.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        metadata: dict[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{reason or code.name}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.metadata = metadata or {}
        self.retry_after_s = retry_after_s


def from_status(status: status_pb2.Status) -> GenerationError:
    """Read a `google.rpc.Status` with the details that the gateway attaches."""
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    retry_after_s = None
    details: list[AnyMessage] = list(status.details)
    for detail in details:
        detail.Unpack(info)
        if detail.Unpack(retry):
            retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return GenerationError(
        _CODES.get(status.code, grpc.StatusCode.UNKNOWN),
        status.message,
        reason=info.reason,
        metadata=dict(info.metadata),
        retry_after_s=retry_after_s,
    )


def from_call(error: grpc.aio.AioRpcError) -> GenerationError:
    """The end of a whole stream, as each of its generations sees it."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            return from_status(status_pb2.Status.FromString(value))
    return GenerationError(error.code(), error.details() or "the stream ended")
