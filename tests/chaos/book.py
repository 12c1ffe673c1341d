"""What became of every request, as its client saw it. Every token is compared as it arrives."""

import time
from collections import Counter
from typing import Any

import grpc
import msgspec
from google.rpc import error_details_pb2, status_pb2

from engine_stub.tokens import expected_tokens
from gateway.edges.grpc_status import STATUS_KEY
from gateway.v1 import gateway_pb2
from tests.chaos.traffic import Job
from tests.support.deployment import VOCAB_SIZE

MAX_VIOLATIONS = 200
_LIBRARY_ERROR = "Internal error from Core"
"""What grpc.aio makes of a stream whose connection went away while it read; no server says so."""
OK = "OK"
TRANSPORT = "CONNECTION_LOST"
"""The client library's own: its connection went away."""

ALWAYS_FAIR = frozenset(
    {
        OK, "RANK_LOST", "SEND_FAILED", "NO_ELIGIBLE_RANK", "GATEWAY_FULL", "RANKS_FULL", "QUEUE_FULL",
        "QUEUE_TIMEOUT", "KV_FULL", "TENANT_LIMIT", "DEADLINE_EXCEEDED", "ENGINE_REJECTED", "DATA_LOSS",
    }
)  # fmt: skip
"""How a valid request may end under faults. INTERNAL, UNKNOWN and ENGINE_ERROR are never fair."""
REFUSED = frozenset(
    {"INVALID_REQUEST", "INVALID_RANK", "PROMPT_TOO_LONG", "GATEWAY_FULL", "NO_ELIGIBLE_RANK", "RANKS_FULL"}
)
"""How a request that is wrong may end: room may be looked at before its contents."""


class Watched:
    """One request while it runs."""

    def __init__(self, book: "Book", job: Job, rpc: str) -> None:
        self.job = job
        self.rpc = rpc
        self.messages = 0
        self.outcome: str | None = None
        self.is_given_up = False
        self.is_torn = False
        """Its connection was closed by a fault."""
        self.began_at = self.last_at = time.monotonic()
        self.first_at: float | None = None
        self.tokens = 0
        self.attempts = 0
        self.arrivals: list[float] = []
        """When output came, where the book is detailed."""
        self._book = book
        request = job.request
        self.id = request.request_id
        self._n = request.sampling.n or 1
        self._expected: dict[int, list[int]] = {}
        self._done: dict[int, int] = {}
        self._finishes: dict[int, gateway_pb2.Finish] = {}

    @property
    def is_complete(self) -> bool:
        return len(self._finishes) == self._n

    def take(self, response: gateway_pb2.GenerateResponse) -> None:
        """Compare new output with what has to come."""
        now = time.monotonic()
        if self.first_at is None:
            self.first_at = now
        elif response.token_ids:
            self._book.gaps_ms.append((now - self.last_at) * 1e3)
        self.last_at = now
        self.messages += 1
        if self._book.is_detailed:
            self.arrivals.append(now)
        index, tokens = response.index, response.token_ids
        if response.request_id != self.id:
            self._wrong(f"output of {response.request_id!r} on its call")
        if self.outcome is not None or index in self._finishes:
            self._wrong("output after its end")
        done = self._done.get(index, 0)
        wanted = self._reference(index)[done : done + len(tokens)]
        if list(tokens) != wanted:
            self._wrong(f"sequence {index}, from token {done}: {list(tokens)[:8]} instead of {wanted[:8]}")
        if self.job.request.sampling.HasField("logprobs") and len(response.logprobs) != len(tokens):
            self._wrong(f"{len(response.logprobs)} log probabilities for {len(tokens)} tokens")
        self._done[index] = done + len(tokens)
        self.tokens += len(tokens)
        if response.HasField("finish"):
            self._finish(index, response.finish)

    def end(self, outcome: str, detail: str = "") -> None:
        """The one terminal outcome."""
        if self.outcome is not None:
            self._wrong(f"a second end: {self.outcome}, then {outcome}")
            return
        self.outcome = outcome
        if outcome == OK and not self.is_complete:
            self._wrong(f"OK with {len(self._finishes)} of {self._n} finishes")
        if outcome != OK and self.is_complete and not (self.is_given_up or self.is_torn or self.job.deadline_s):
            self._wrong(f"{outcome} after all its finishes")
        if not self._is_fair(outcome):
            self._wrong(f"ended with {outcome}: {detail}")
        self._book.ended(self)

    def hung(self) -> None:
        """It is long past its deadline."""
        self._wrong(f"no end {time.monotonic() - self.began_at:.1f} s after it was sent, {self.tokens} tokens")

    def _is_fair(self, outcome: str) -> bool:
        job = self.job
        if not job.is_valid:
            return outcome in REFUSED or self.is_torn
        if outcome in ALWAYS_FAIR:
            return True
        if outcome in ("CANCELLED", "ABORTED", TRANSPORT):
            return self.is_given_up or self.is_torn
        if outcome == "PINNED_RANK_UNAVAILABLE":
            return job.request.HasField("data_parallel_rank")
        return outcome == "SLOW_READER" and job.reads_slowly_s > 0

    def _finish(self, index: int, finish: gateway_pb2.Finish) -> None:
        self._finishes[index] = finish
        self.attempts = max(self.attempts, finish.attempts)
        request, wanted = self.job.request, self.job.request.sampling.max_tokens
        usage = (finish.reason, finish.prompt_tokens, finish.completion_tokens, self._done[index])
        if usage != (gateway_pb2.FINISH_REASON_LENGTH, len(request.prompt_token_ids), wanted, wanted):
            self._wrong(f"sequence {index} finished with {usage}, asked for {wanted} tokens")
        if finish.attempts > 1:
            self._book.retried += 1

    def _reference(self, index: int) -> list[int]:
        reference = self._expected.get(index)
        if reference is None:
            request = self.job.request
            sampling = request.sampling
            seed = sampling.seed + index if sampling.HasField("seed") else None
            reference = expected_tokens(request.prompt_token_ids, seed, sampling.max_tokens, VOCAB_SIZE)
            self._expected[index] = reference
        return reference

    def _wrong(self, what: str) -> None:
        self._book.violation(f"{self.id} ({self.rpc}): {what}")


class Ended(msgspec.Struct, array_like=True):
    """What is kept of a request, for comparison with the gateway's log."""

    outcome: str
    tokens: int
    rpc: str
    limit_s: float | None


class Book:
    """All requests of a run. `began_at` is when the load began, monotonic. A detailed one keeps every request."""

    def __init__(self, *, is_detailed: bool = False) -> None:
        self.is_detailed = is_detailed
        self.kept: list[Watched] = []
        self.began_at = time.monotonic()
        self.live: dict[str, Watched] = {}
        self.requests: dict[str, Ended] = {}
        self.outcomes: Counter[str] = Counter()
        self.tokens = 0
        self.retried = 0
        self.first_ms: list[float] = []
        self.total_ms: list[float] = []
        self.gaps_ms: list[float] = []
        self.violations: list[str] = []
        self.violation_count = 0

    def watch(self, job: Job, rpc: str) -> Watched:
        """Begin a request."""
        watched = Watched(self, job, rpc)
        assert watched.id not in self.live
        assert watched.id not in self.requests
        self.live[watched.id] = watched
        return watched

    def ended(self, watched: Watched) -> None:
        assert watched.outcome is not None
        del self.live[watched.id]
        self.requests[watched.id] = Ended(watched.outcome, watched.tokens, watched.rpc, watched.job.deadline_s)
        self.outcomes[watched.outcome] += 1
        if self.is_detailed:
            self.kept.append(watched)
        self.tokens += watched.tokens
        if watched.outcome == OK:
            self.total_ms.append((watched.last_at - watched.began_at) * 1e3)
        if watched.first_at is not None:
            self.first_ms.append((watched.first_at - watched.began_at) * 1e3)

    def violation(self, text: str) -> None:
        """Something that must never happen."""
        self.violation_count += 1
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(f"at {time.monotonic() - self.began_at:.3f} s: {text}")


def outcome_of(error: grpc.aio.AioRpcError) -> str:
    """The gateway's reason, or what the client library made of the lack of one."""
    details: Any = dict(error.trailing_metadata() or ()).get(STATUS_KEY)
    if details is not None:
        return reason_of(status_pb2.Status.FromString(details))
    if error.code() is grpc.StatusCode.UNAVAILABLE or error.details() == _LIBRARY_ERROR:
        return TRANSPORT
    return str(error.code().name)


def reason_of(status: status_pb2.Status) -> str:
    """The reason in a status with details."""
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Unpack(info):
            return str(info.reason)
    return f"code {status.code} without a reason"
