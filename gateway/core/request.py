"""Request 1-n Sequence 1-n Attempt, and the outbox of a sequence.

Admission, the deadline and the one terminal outcome belong to the Request; tokens, outbox and finish
to the Sequence; rank, incarnation, wire id and the charge to the Attempt.

These objects are the core's. The edge reads a sequence's outbox through `take()` and keeps its own
object in `Request.sink`; it never writes anything else.
"""

from array import array
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from gateway.core.errors import GatewayError
from gateway.core.events import RequestArrived
from gateway.core.lifecycle import TRANSITIONS, Evidence, Phase
from gateway.types import FinishReason, TokenLogprob

if TYPE_CHECKING:
    from gateway.core.batches_in_flight import InFlightBatch
    from gateway.core.decisions import Decision
    from gateway.core.entry import Entry
    from gateway.core.ordering import Place
    from gateway.core.tenants import Account

PACK_AT_TOKENS = 128
BYTES_PER_TOKEN = 4
_ACCEPTED, _SETTLED, _ENDED = Phase.ACCEPTED, Phase.SETTLED, Phase.ENDED


def is_resumable(arrived: RequestArrived) -> bool:
    """Whether any rank continues the request's sequences as the first one would have.

    Penalties count what was generated before, which the next rank takes for prompt; sampling depends on the state of
    the first engine's generator.
    """
    sampling = arrived.sampling
    return (
        sampling.temperature == 0
        and not sampling.frequency_penalty
        and not sampling.presence_penalty
        and sampling.repetition_penalty == 1
        and arrived.allow_resume is not False
    )


class Attempt:
    """One try of one sequence on one rank incarnation; `released` flips exactly once.

    Its prompt is the request's and what earlier attempts generated; `max_tokens` is what is left of the request's.

    `is_done` is set when its end was seen, which is before the release when both are in one batch. `prefill_us` is the
    predicted time of its prefill in microseconds (whole ones: sums of them must be exact), `actual_prefill_us` what it
    took, once its first token is here. `batch` is the batch that it was sent in, `decision` what sent it. `evidence` is
    what it was released on: the kind, the rank's incarnation, and how many of the rank's batches had been seen.
    """

    __slots__ = (
        "actual_prefill_us",
        "batch",
        "cached_tokens",
        "decision",
        "evidence",
        "first_token_at",
        "incarnation",
        "is_done",
        "max_tokens",
        "number",
        "prefill_us",
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
        arrived = sequence.request.arrived
        done = sequence.completion_tokens
        self.prompt_tokens = len(arrived.prompt_token_ids) + done
        self.cached_tokens = 0
        self.max_tokens = arrived.sampling.max_tokens - done
        self.prefill_us = sequence.request.prefill_us
        self.actual_prefill_us: int | None = None
        self.batch: InFlightBatch | None = None
        self.decision: Decision | None = None
        self.evidence: tuple[Evidence, int, int] | None = None
        self.tokens_out = 0
        self.is_done = False
        self.released = False


class Record:
    """Everything that a sequence generated: for another rank, and as an answer for the response cache.

    Another rank needs the tokens, of which up to `token_bytes` are kept. An answer has log probabilities as well: up to
    `cache_bytes` of both. Beyond that it is none any more (`is_answer`), and they are dropped; the tokens stay.
    """

    __slots__ = ("_answer_bytes", "cache_bytes", "is_answer", "logprobs", "token_bytes", "token_ids")

    def __init__(self, *, cache_bytes: int, token_bytes: int = 0) -> None:
        self.cache_bytes = cache_bytes
        self.token_bytes = token_bytes
        self.is_answer = cache_bytes > 0
        self.token_ids = array("I")
        self.logprobs: list[TokenLogprob] = []
        self._answer_bytes = 0

    def extend(self, token_ids: Seq[int], logprobs: Seq[TokenLogprob] | None) -> bool:
        """Keep more output. False when it got too large to be worth keeping."""
        self.token_ids.extend(token_ids)
        if self.is_answer:
            self._extend_answer(len(token_ids), logprobs)
        return self.is_answer or BYTES_PER_TOKEN * len(self.token_ids) <= self.token_bytes

    def _extend_answer(self, tokens: int, logprobs: Seq[TokenLogprob] | None) -> None:
        self._answer_bytes += BYTES_PER_TOKEN * tokens
        if logprobs is not None:
            self.logprobs.extend(logprobs)
            self._answer_bytes += logprob_bytes(logprobs)
        if self._answer_bytes > self.cache_bytes:
            self.is_answer = False
            self.logprobs.clear()


def logprob_bytes(logprobs: Seq[TokenLogprob]) -> int:
    """What log probabilities are charged with: 64 bytes a token and 16 per alternative."""
    return sum(64 + 16 * len(item.top) for item in logprobs)


class Sequence:
    """One generated continuation. The outbox holds tokens that no flush has taken yet.

    `entry` is set while it waits in the queue. `held_bytes` of the outbox waited for their turn, not for the reader.
    `record` keeps all tokens of a sequence whose answer may be cached or that another rank may have to go on with.
    `unsent` of its `attempts` never left the gateway. `pending` is the outbox's youngest part, as it came.
    `queue_number` is its place among equals in the queue, once it had one. `sent_at` is when its first rank was picked.
    """

    __slots__ = (
        "_logprobs",
        "_packed",
        "attempt",
        "attempts",
        "cached_tokens",
        "completion_tokens",
        "entry",
        "finish",
        "held_bytes",
        "index",
        "is_dirty",
        "pending",
        "queue_number",
        "record",
        "request",
        "sent_at",
        "unsent",
    )

    def __init__(self, request: "Request", index: int) -> None:
        self.request = request
        self.index = index
        self.attempt: Attempt | None = None
        self.attempts = 0
        self.unsent = 0
        self.finish: FinishReason = ""
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.is_dirty = False
        self.held_bytes = 0
        self.entry: Entry | None = None
        self.record: Record | None = None
        self.queue_number: int | None = None
        self.sent_at: float | None = None
        self.pending: list[int] = []
        self._packed: array[int] | None = None
        self._logprobs: list[TokenLogprob] | None = None

    def append(self, token_ids: Seq[int], logprobs: Seq[TokenLogprob] | None) -> bool:
        """Add new tokens. True when the backlog was long enough to be packed to four bytes a token."""
        pending = self.pending
        pending.extend(token_ids)
        self.completion_tokens += len(token_ids)
        if logprobs is not None:
            if self._logprobs is None:
                self._logprobs = []
            self._logprobs.extend(logprobs)
        if self.record is not None and not self.record.extend(token_ids, logprobs):
            self.record = None
        is_long = len(pending) >= PACK_AT_TOKENS
        if is_long:
            self.pack()
        return is_long

    def pack(self) -> None:
        """Keep the backlog at four bytes a token from now on."""
        self._packed = self._packed or array("I")
        self._packed.extend(self.pending)
        self.pending.clear()

    @property
    def backlog_bytes(self) -> int:
        """Bytes that wait in the outbox (logprobs count 64 bytes a token and 16 per alternative)."""
        total = BYTES_PER_TOKEN * (len(self.pending) + (len(self._packed) if self._packed is not None else 0))
        return total if self._logprobs is None else total + logprob_bytes(self._logprobs)

    def take(self) -> tuple[Seq[int], list[TokenLogprob] | None]:
        """Everything pending, and an empty outbox. Clears the dirty mark."""
        self.is_dirty = False
        self.held_bytes = 0
        tokens: Seq[int] = self.pending
        self.pending = []
        logprobs, self._logprobs = self._logprobs, None
        if self._packed is not None:
            self._packed.extend(tokens)
            tokens, self._packed = self._packed, None
        return tokens, logprobs


class Request:
    """An accepted request. `error` is None while it lives and after success.

    `account` is its tenant's; `place` its position in the preserved order, if there is one; `cache_key` names its
    answer in the response cache if it may be stored; `is_cached` that the answer came from there.
    """

    __slots__ = (
        "accepted_at",
        "account",
        "arrived",
        "cache_key",
        "decision_id",
        "ended_at",
        "error",
        "first_token_at",
        "handle",
        "is_cached",
        "last_rank",
        "phase",
        "place",
        "prefill_us",
        "sequences",
        "settled_at",
        "sink",
        "unfinished",
    )

    def __init__(self, handle: int, arrived: RequestArrived, now: float, prefill_us: int = 0) -> None:
        self.handle = handle
        self.arrived = arrived
        self.sink: Any = arrived.sink
        self.accepted_at = now
        self.first_token_at: float | None = None
        self.settled_at: float | None = None
        self.ended_at: float | None = None
        self.phase = _ACCEPTED
        self.error: GatewayError | None = None
        self.decision_id: int | None = None
        self.last_rank: int | None = None
        self.prefill_us = prefill_us
        self.account: Account | None = None
        self.place: Place | None = None
        self.cache_key: bytes | None = None
        self.is_cached = False
        n = arrived.n
        self.sequences = [Sequence(self, 0)] if n == 1 else [Sequence(self, index) for index in range(n)]
        self.unfinished = n

    @property
    def is_settled(self) -> bool:
        """Whether its outcome is known and nothing of it is charged any more."""
        return self.phase >= _SETTLED

    @property
    def is_ended(self) -> bool:
        """Whether its answer has left."""
        return self.phase is _ENDED

    def advance(self, phase: Phase) -> None:
        """Take a step of the life cycle. A step back or from a final phase is a defect of the caller."""
        assert phase in TRANSITIONS[self.phase], (self.phase, phase)
        self.phase = phase

    def unlink(self) -> None:
        """Break the reference cycles, so that an ended request needs no garbage collector. For its last user."""
        for sequence in self.sequences:
            sequence.attempt = None
        self.sequences.clear()
