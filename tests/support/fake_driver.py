"""A driver for northbound tests: real core objects, a scripted engine, no ranks.

Like the real one it passes on once per loop turn what there is, in order, and a request's end after its last flush. It
keeps the books that the tests ask about: `live` must be empty at the end of every test.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from gateway.core.errors import GatewayError, Reason
from gateway.core.events import CacheFlushed, Event, RequestArrived
from gateway.core.lifecycle import Phase
from gateway.core.request import Attempt, Request
from gateway.core.request import Sequence as Continuation
from gateway.core.views import RankView
from gateway.types import FinishReason, TokenLogprob

Script = Callable[["FakeDriver", Request], None]


def make_view(rank: int, **changes: Any) -> RankView:
    values: dict[str, Any] = {
        "rank": rank,
        "group": "g",
        "group_rank": rank,
        "state": "READY",
        "incarnation": 1,
        "in_flight": 0,
        "reported_running": None,
        "reported_waiting": None,
        "running": None,
        "waiting": None,
        "foreign": None,
        "kv_usage": None,
        "snapshot_age_ms": None,
        "cost": 0.0,
    }
    return RankView(**(values | changes))


class FakeDecision:
    def __init__(self, number: int, rank: int | None) -> None:
        self.id = number
        self.rank = rank

    def render(self) -> dict[str, object]:
        return {"id": self.id, "rank": self.rank, "costs": [0.0, float("inf")], "filters": ("state",), "dry_run": False}


class FakeDecisions:
    def __init__(self) -> None:
        self.kept: dict[int, FakeDecision] = {}

    def get(self, number: int) -> FakeDecision | None:
        return self.kept.get(number)

    def latest(self, limit: int) -> list[FakeDecision]:
        return [self.kept[number] for number in sorted(self.kept, reverse=True)[:limit]]


class FakeRouter:
    def __init__(self) -> None:
        self.by_client: dict[tuple[str, str], Request] = {}
        self.views = [make_view(rank) for rank in range(4)]
        self.decisions = FakeDecisions()
        self.response_cache: SimpleNamespace | None = None

    def find(self, client_key: str, request_id: str) -> Request | None:
        return self.by_client.get((client_key, request_id))

    def rank_views(self, now: float) -> list[RankView]:
        assert now > 0
        return self.views

    def explain(self, arrived: RequestArrived, now: float) -> FakeDecision:
        assert now > 0
        if not arrived.prompt_token_ids:
            raise GatewayError(Reason.INVALID_REQUEST, "prompt_token_ids: must not be empty", field="prompt_token_ids")
        return FakeDecision(0, len(arrived.prompt_token_ids))


class FakeDriver:
    """`script` is called in the loop turn after each submit and says what the engine does."""

    def __init__(self, script: Script | None = None) -> None:
        self.router = FakeRouter()
        self.clock = time.monotonic
        self.script = script
        self.refusal: GatewayError | None = None
        self.arrivals: list[RequestArrived] = []
        self.requests: list[Request] = []
        self.live: dict[int, Request] = {}
        self.max_backlog_bytes = 1 << 20
        self._dirty: list[Continuation | Request] = []
        self._is_scheduled = False

    def emit(self, event: Event) -> None:
        cache = self.router.response_cache
        assert type(event) is CacheFlushed
        if cache is not None:
            cache.entries = cache.nbytes = 0

    def submit(self, arrived: RequestArrived) -> Request:
        self.arrivals.append(arrived)
        if self.refusal is not None:
            raise self.refusal
        key = (arrived.client_key, arrived.request_id)
        if key in self.router.by_client:
            raise GatewayError(Reason.DUPLICATE_REQUEST_ID, "a live request has this id", request_id=arrived.request_id)
        now = self.clock()
        handle = len(self.requests) + 1
        request = Request(handle, arrived, now)
        for sequence in request.sequences:
            rank = (arrived.pinned_rank or 0) + sequence.index
            sequence.attempts = 1
            sequence.sent_at = now
            sequence.attempt = Attempt(sequence, f"w-{handle}-{sequence.index}", 1, rank, 1, now)
        request.decision_id = handle
        self.router.decisions.kept[handle] = FakeDecision(handle, arrived.pinned_rank or 0)
        self.requests.append(request)
        self.live[handle] = request
        self.router.by_client[key] = request
        if self.script is not None:
            asyncio.get_running_loop().call_soon(self.script, self, request)
        return request

    def tokens(
        self,
        request: Request,
        token_ids: Sequence[int],
        *,
        index: int = 0,
        logprobs: Sequence[TokenLogprob] | None = None,
        finish: FinishReason = "",
    ) -> None:
        """One engine row; the request ends OK with the finish of its last sequence."""
        if request.is_ended:
            return
        sequence = request.sequences[index]
        sequence.append(token_ids, logprobs)
        if not sequence.is_dirty:
            sequence.is_dirty = True
            self._dirty.append(sequence)
        if finish:
            sequence.finish = finish
            request.unfinished -= 1
            if request.unfinished == 0:
                self.end(request)
        elif sequence.backlog_bytes > self.max_backlog_bytes:
            self.end(request, GatewayError(Reason.SLOW_READER, "too slow", limit_bytes=self.max_backlog_bytes))
        self._schedule()

    def answer(self, request: Request, token_ids: Sequence[int], finish: FinishReason = "stop") -> None:
        """The whole answer comes from the response cache: no rank, no decision."""
        request.is_cached = True
        request.decision_id = None
        for sequence in request.sequences:
            sequence.attempt, sequence.attempts = None, 0
            self.tokens(request, token_ids, index=sequence.index, finish=finish)

    def end(self, request: Request, error: GatewayError | None = None) -> None:
        if request.is_ended:
            return
        request.phase = Phase.ENDED
        request.ended_at = self.clock()
        request.error = error
        del self.live[request.handle]
        del self.router.by_client[request.arrived.client_key, request.arrived.request_id]
        self._dirty.append(request)
        self._schedule()

    def cancel(self, request: Request, reason: Reason) -> None:
        self.end(request, GatewayError(reason, f"ended: {reason}"))

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_scheduled = False
        dirty, self._dirty = self._dirty, []
        for item in dirty:
            if isinstance(item, Request):
                item.sink.end(item)
                item.accounted()
            else:
                item.sink.flush(item)


def count_up(driver: FakeDriver, request: Request) -> None:
    """Engine: `max_tokens` tokens per sequence, one a turn: the prompt's length, then one more each time."""

    def step(done: int) -> None:
        for sequence in request.sequences:
            first = len(request.arrived.prompt_token_ids)
            is_last = done + 1 == request.arrived.sampling.max_tokens
            driver.tokens(request, [first + done], index=sequence.index, finish="length" if is_last else "")
        if not request.is_ended:
            asyncio.get_running_loop().call_soon(step, done + 1)

    step(0)
