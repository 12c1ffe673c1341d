"""What a rank remembers of its traffic, for tests and the control socket. Counts are exact, lists are bounded."""

from collections import Counter, deque

import msgspec

from engine_stub.scheduler.plan import Admission
from engine_stub.scheduler.sequence import Request
from engine_stub.wire.codec import Consequence, Load, Problem, Wave


class BadInput(msgspec.Struct, frozen=True):
    """One input that a gateway should never have sent."""

    reason: str
    consequence: Consequence
    request_id: str | None


class Refusal(msgspec.Struct, frozen=True):
    """One request that admission refused."""

    request_id: str
    reason: Admission


class Records:
    """Counters over all incarnations of a rank, and its latest inputs and reports (`limit` of each)."""

    def __init__(self, limit: int) -> None:
        self.adds = 0
        self.aborts = 0
        self.batches = 0
        self.steps = 0
        self.tokens = 0
        self.bad = 0
        self.foreign: str | None = None
        """What the first request of the other family was, if there was one."""
        self.refused: Counter[Admission] = Counter()
        self.received_adds: deque[Request] = deque(maxlen=limit)
        self.received_add_waves: deque[int] = deque(maxlen=limit)
        self.received_aborts: deque[str] = deque(maxlen=limit)
        self.received_waves: deque[Wave] = deque(maxlen=limit)
        self.refusals: deque[Refusal] = deque(maxlen=limit)
        self.bad_inputs: deque[BadInput] = deque(maxlen=limit)
        self.reported_loads: deque[Load | None] = deque(maxlen=limit)

    def add(self, request: Request) -> None:
        """A request arrived, good or bad."""
        self.adds += 1
        self.received_adds.append(request)

    def abort(self, request_id: str) -> None:
        """One id of an ABORT arrived."""
        self.aborts += 1
        self.received_aborts.append(request_id)

    def bad_input(self, problem: Problem, request_id: str | None) -> None:
        """An input had a problem."""
        self.bad += 1
        if problem.is_foreign and self.foreign is None:
            self.foreign = problem.reason
        self.bad_inputs.append(BadInput(problem.reason, problem.consequence, request_id))

    def refuse(self, request_id: str, reason: Admission) -> None:
        """Admission refused a request."""
        self.refused[reason] += 1
        self.refusals.append(Refusal(request_id, reason))
