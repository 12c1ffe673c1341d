"""Every error that a caller can see, with a stable reason, whether a retry can help, and the facts.

The mapping of a reason to a transport status code is the edge's (`gateway/edges/grpc_status.py`).
`docs/errors.md` lists them all; a test compares the two.
"""

from enum import StrEnum


class Reason(StrEnum):
    """Stable, machine-readable reasons: `google.rpc.ErrorInfo.reason`, metric labels, log fields."""

    # Enum's own hash is a Python function, and an overload counts every refusal.
    __hash__ = str.__hash__

    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    INVALID_REQUEST = "INVALID_REQUEST"
    UNSUPPORTED_FIELD = "UNSUPPORTED_FIELD"
    INVALID_RANK = "INVALID_RANK"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    METADATA_TOO_LARGE = "METADATA_TOO_LARGE"
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    KV_TOO_SMALL = "KV_TOO_SMALL"
    DUPLICATE_REQUEST_ID = "DUPLICATE_REQUEST_ID"
    PINNED_RANK_UNAVAILABLE = "PINNED_RANK_UNAVAILABLE"
    NO_ELIGIBLE_RANK = "NO_ELIGIBLE_RANK"
    TOO_MANY_STREAMS = "TOO_MANY_STREAMS"
    GATEWAY_FULL = "GATEWAY_FULL"
    TENANT_LIMIT = "TENANT_LIMIT"
    QUEUE_FULL = "QUEUE_FULL"
    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
    ORDER_FULL = "ORDER_FULL"
    SLO_UNATTAINABLE = "SLO_UNATTAINABLE"
    RANKS_FULL = "RANKS_FULL"
    KV_FULL = "KV_FULL"
    DRAINING = "DRAINING"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    MAX_AGE_EXCEEDED = "MAX_AGE_EXCEEDED"
    CANCELLED = "CANCELLED"
    ABORTED = "ABORTED"
    SLOW_READER = "SLOW_READER"
    STREAM_IDLE = "STREAM_IDLE"
    RANK_LOST = "RANK_LOST"
    SEND_FAILED = "SEND_FAILED"
    ENGINE_REJECTED = "ENGINE_REJECTED"
    ENGINE_ERROR = "ENGINE_ERROR"
    DATA_LOSS = "DATA_LOSS"
    DECISION_NOT_FOUND = "DECISION_NOT_FOUND"
    CONFIG_INVALID = "CONFIG_INVALID"
    CONFIG_NEEDS_RESTART = "CONFIG_NEEDS_RESTART"
    CONFIG_NOT_APPLIED = "CONFIG_NOT_APPLIED"
    INTERNAL = "INTERNAL"


class GatewayError(Exception):
    """An error with a next step. `facts` become ErrorInfo metadata; values are rendered as strings."""

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        retryable: bool = False,
        retry_after_s: float | None = None,
        **facts: object,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retryable = retryable
        self.retry_after_s = retry_after_s
        self.facts = facts
