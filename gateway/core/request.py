"""Request 1-n Sequence 1-n Attempt, and the outbox of a sequence.

Admission, the deadline and the one terminal outcome belong to the Request; tokens, outbox and finish
to the Sequence; rank, incarnation, wire id and the charge to the Attempt.

These objects are the core's. The edge takes what is in a sequence's outbox and keeps its own object in
`Request.sink`; it never writes anything else.
"""

from typing import TYPE_CHECKING, Any

from gateway.core.errors import GatewayError
from gateway.core.events import RequestArrived
from gateway.core.lifecycle import TRANSITIONS, Evidence, Phase
from gateway.core.outbox import BYTES_PER_TOKEN, PACK_AT_TOKENS, Outbox, Record, logprob_bytes

if TYPE_CHECKING:
    from gateway.core.batches_in_flight import InFlightBatch
    from gateway.core.decisions import Decision
    from gateway.core.entry import Entry
    from gateway.core.ordering import Place
    from gateway.core.tenants import Account

__all__ = [
    "BYTES_PER_TOKEN",
    "PACK_AT_TOKENS",
    "Attempt",
    "Record",
    "Request",
    "Sequence",
    "is_resumable",
    "logprob_bytes",
]
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


class _Progress:
    """What a row touches of an attempt, in one place: the slots of a base class come first."""

    __slots__ = ("is_done", "max_tokens", "sequence", "tokens_out")


class Attempt(_Progress):
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
        "number",
        "prefill_us",
        "prompt_tokens",
        "rank",
        "released",
        "sent_at",
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


class Sequence(Outbox):
    """One generated continuation, with the outbox of what it generated.

    `entry` is set while it waits in the queue. `unsent` of its `attempts` never left the gateway. `queue_number` is its
    place among equals in the queue, once it had one. `sent_at` is when its first rank was picked. `sink` is its request's.
    """

    __slots__ = (
        "attempt",
        "attempts",
        "entry",
        "index",
        "queue_number",
        "request",
        "sent_at",
        "sink",
        "unsent",
    )

    def __init__(self, request: "Request", index: int) -> None:
        self.request = request
        self.sink = request.sink
        self.index = index
        self.attempt: Attempt | None = None
        self.attempts = 0
        self.unsent = 0
        self.entry: Entry | None = None
        self.queue_number: int | None = None
        self.sent_at: float | None = None
        # As `Outbox` begins; here for the price of one call less per sequence.
        self.finish = ""
        self.cached_tokens = self.completion_tokens = 0
        self.is_dirty = False
        self.held_bytes = 0
        self.record = None
        self.pending = ()
        self.packed = self.logprobs = None


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
        "is_accounted",
        "is_answered",
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
        self.is_accounted = self.is_answered = False
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

    def answered(self) -> None:
        """Say that its answer is out, or that nobody waits for one. The order with `accounted` is free; twice is once."""
        self.is_answered = True
        if self.is_accounted:
            self.unlink()

    def accounted(self) -> None:
        """Say that its end was counted and logged. Once it is answered as well, nobody needs it any more."""
        self.is_accounted = True
        if self.is_answered:
            self.unlink()
