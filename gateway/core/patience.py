"""Whose wait for a rank is over: in the queue, or as a follower of one that is in the queue."""

from heapq import heapify, heappop, heappush
from math import inf

from gateway.core.dispatcher import Dispatcher
from gateway.core.entry import Entry
from gateway.core.errors import GatewayError
from gateway.core.lifecycle import Phase
from gateway.core.parts import Parts
from gateway.core.queue_timeouts import WaitLimit
from gateway.core.refusals import no_rank_for_long, queue_timeout
from gateway.core.request import Request

_SLACK = 64
_ACCEPTED, _QUEUED = Phase.ACCEPTED, Phase.QUEUED


class Patience:
    """Modes queue and batch. A follower (`response_cache.coalesce`) has the wait that it would have on its own.

    It counts from its own acceptance, so that those who wait for one answer do not wait one after the other when that
    one gets none.
    """

    def __init__(self, parts: Parts, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self._registry = parts.registry
        self._answers = parts.answers
        self._admission = parts.admission
        self._counters = parts.counters
        # Handles: a request that has ended must not stay in memory for its time-out.
        self._following: list[tuple[float, int, WaitLimit]] = []

    def watch(self, follower: Request) -> None:
        """A request waits for the answer of a live one."""
        limit = self.dispatcher.queue.time_outs.limit(follower.arrived)
        if limit.wait_s < inf:
            heappush(self._following, (follower.accepted_at + limit.wait_s, follower.handle, limit))

    def why_over(self, request: Request, now: float) -> GatewayError | None:
        """Why a request that waited for another one's answer may not begin to wait for a rank."""
        limit = self.dispatcher.queue.time_outs.limit(request.arrived)
        if now - request.accepted_at >= limit.wait_s:
            return self.timed_out(request.accepted_at, limit, now)
        since, wait_s = self.dispatcher.away_since(request), self.dispatcher.no_rank_wait_s
        if since is not None and now - max(since, request.accepted_at) >= wait_s:
            return no_rank_for_long(wait_s, self._admission.retry_after_s(1))
        return None

    def timed_out(self, since: float, limit: WaitLimit, now: float) -> GatewayError:
        """The end of a request whose time in the queue, which began at `since`, is over."""
        self._counters.queue_timeouts += 1
        return queue_timeout(now - since, limit, self._admission.retry_after_s(len(self.dispatcher) + 1))

    def gave_up(self, entry: Entry, now: float) -> GatewayError:
        """The end of an entry that has timed out. What it waited for was set when it was queued, whatever a reload says."""
        expires_at, gives_up_at = entry.expires_at or now, entry.gives_up_at
        # Both may have passed between two ticks: where the queue only delays, it was the call's that ended the wait.
        is_delay = self.dispatcher.queue.time_outs.is_delay(entry.priority)
        if gives_up_at is not None and (is_delay or gives_up_at <= expires_at):
            return self.timed_out(entry.queued_at, WaitLimit(gives_up_at - entry.queued_at, is_calls=True), now)
        return self.timed_out(entry.queued_at, WaitLimit(expires_at - entry.queued_at, is_calls=False), now)

    def expired_followers(self, now: float) -> list[tuple[Request, WaitLimit]]:
        """Followers whose own time-out has passed while the one that they follow has no rank either."""
        heap, registry = self._following, self._registry
        if len(heap) > 2 * len(registry) + _SLACK:
            heap[:] = [item for item in heap if registry.get(item[1]) is not None]
            heapify(heap)
        found = []
        while heap and heap[0][0] <= now:
            _, handle, limit = heappop(heap)
            request = registry.get(handle)
            if request is None or request.phase is not _ACCEPTED:
                continue
            leader = self._answers.leader_of(request.cache_key)
            if leader is not None and leader is not request and leader.phase is _QUEUED:
                found.append((request, limit))
        return found
