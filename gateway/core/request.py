"""Request 1-n Sequence 1-n Attempt, and the outbox of a sequence.

Admission, the deadline and the one terminal outcome belong to the Request; tokens, outbox and finish
to the Sequence; rank, incarnation, wire id and the charge to the Attempt.

These objects are the core's. The edge reads a sequence's outbox through `take()` and keeps its own
object in `Request.sink`; it never writes anything else.
"""

from array import array
from collections.abc import Sequence as Seq
from typing import Any

from gateway.core.errors import GatewayError
from gateway.core.events import RequestArrived
from gateway.types import FinishReason, TokenLogprob

_PACK_AT_TOKENS = 128
BYTES_PER_TOKEN = 4


class Attempt:
    """One try of one sequence on one rank incarnation; `released` flips exactly once.

    `is_done` is set when its end was seen, which is before the release when both are in one batch.
    """

    __slots__ = (
        "cached_tokens",
        "first_token_at",
        "incarnation",
        "is_done",
        "max_tokens",
        "number",
        "prompt_tokens",
        "rank",
        "released",
        "sent_at",
        "sequence",
        "tokens_out",
        "wire_id",
    )

    def __init__(
        self, sequence: "Sequence", wire_id: str, number: int, rank: int, incarnation: int, sent_at: float
    ) -> None:
        self.sequence = sequence
        self.wire_id = wire_id
        self.number = number
        self.rank = rank
        self.incarnation = incarnation
        self.sent_at = sent_at
        self.first_token_at: float | None = None
        self.prompt_tokens = len(sequence.request.arrived.prompt_token_ids)
        self.cached_tokens = 0
        self.max_tokens = sequence.request.arrived.sampling.max_tokens
        self.tokens_out = 0
        self.is_done = False
        self.released = False


class Sequence:
    """One generated continuation. The outbox holds tokens that no flush has taken yet."""

    __slots__ = (
        "_logprobs",
        "_packed",
        "_pending",
        "attempt",
        "attempts",
        "cached_tokens",
        "completion_tokens",
        "finish",
        "index",
        "is_dirty",
        "request",
    )

    def __init__(self, request: "Request", index: int) -> None:
        self.request = request
        self.index = index
        self.attempt: Attempt | None = None
        self.attempts = 0
        self.finish: FinishReason = ""
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.is_dirty = False
        self._pending: list[int] = []
        self._packed: array[int] | None = None
        self._logprobs: list[TokenLogprob] | None = None

    def append(self, token_ids: Seq[int], logprobs: Seq[TokenLogprob] | None) -> bool:
        """Add new tokens. True when the backlog was long enough to be packed to four bytes a token."""
        pending = self._pending
        pending.extend(token_ids)
        self.completion_tokens += len(token_ids)
        if logprobs is not None:
            if self._logprobs is None:
                self._logprobs = []
            self._logprobs.extend(logprobs)
        if len(pending) < _PACK_AT_TOKENS:
            return False
        if self._packed is None:
            self._packed = array("I")
        self._packed.extend(pending)
        pending.clear()
        return True

    @property
    def backlog_bytes(self) -> int:
        """Bytes that wait in the outbox (logprobs count 64 bytes a token and 16 per alternative)."""
        total = BYTES_PER_TOKEN * (len(self._pending) + (len(self._packed) if self._packed is not None else 0))
        if self._logprobs is not None:
            total += sum(64 + 16 * len(item.top) for item in self._logprobs)
        return total

    def take(self) -> tuple[Seq[int], list[TokenLogprob] | None]:
        """Everything pending, and an empty outbox. Clears the dirty mark."""
        self.is_dirty = False
        logprobs, self._logprobs = self._logprobs, None
        tokens: Seq[int] = self._pending
        self._pending = []
        if self._packed is not None:
            self._packed.extend(tokens)
            tokens, self._packed = self._packed, None
        return tokens, logprobs


class Request:
    """An accepted request. `error` is None while it lives and after success."""

    __slots__ = (
        "accepted_at",
        "arrived",
        "decision_id",
        "ended_at",
        "error",
        "first_token_at",
        "handle",
        "is_ended",
        "last_rank",
        "sequences",
        "sink",
        "unfinished",
    )

    def __init__(self, handle: int, arrived: RequestArrived, now: float) -> None:
        self.handle = handle
        self.arrived = arrived
        self.sink: Any = arrived.sink
        self.accepted_at = now
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self.is_ended = False
        self.error: GatewayError | None = None
        self.decision_id: int | None = None
        self.last_rank: int | None = None
        self.sequences = [Sequence(self, index) for index in range(arrived.n)]
        self.unfinished = arrived.n

    def unlink(self) -> None:
        """Break the reference cycles, so that an ended request needs no garbage collector. For its last user."""
        for sequence in self.sequences:
            sequence.attempt = None
        self.sequences.clear()
