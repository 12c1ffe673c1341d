"""Who is live: requests by handle and by client id, ids that were used lately, and when each request's time is over."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heappush
from itertools import count

from gateway.config.schema import Config
from gateway.core.deadlines import Deadlines
from gateway.core.errors import GatewayError, Reason
from gateway.core.events import RequestArrived
from gateway.core.request import Request

MAX_TOMBSTONES = 65536


class Registry:
    """The live requests. An id is taken from acceptance to the end, and `id_reuse_after_s` beyond it."""

    def __init__(self, config: Config) -> None:
        self.configure(config)
        self._requests: dict[int, Request] = {}
        self._by_client: dict[tuple[str, str], Request] = {}
        self._tombstones: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._deadlines = Deadlines()
        self.new_handle: Callable[[], int] = count(1).__next__
        """A number that no request of this process had."""

    def configure(self, config: Config) -> None:
        """Go by these limits."""
        self._max_age_s = config.limits.max_request_age_s
        self._reuse_after_s = config.admission.id_reuse_after_s

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def get(self, handle: int) -> Request | None:
        """The live request with this handle."""
        return self._requests.get(handle)

    def find(self, client_key: str, request_id: str) -> Request | None:
        """The live request with this client id."""
        return self._by_client.get((client_key, request_id))

    def oldest(self) -> Request | None:
        """The live request that was accepted first."""
        return next(iter(self._requests.values()), None)

    def check_id(self, arrived: RequestArrived, now: float) -> None:
        """Raise `DUPLICATE_REQUEST_ID` when the id is taken."""
        key = (arrived.client_key, arrived.request_id)
        if key not in self._by_client and not self._tombstones:
            return
        if key in self._by_client:
            text = f"a live request already has the id {arrived.request_id!r}"
        elif self._tombstones.get(key, now) > now:
            text = f"a request with the id {arrived.request_id!r} ended less than {self._reuse_after_s:g} s ago"
        else:
            return
        raise GatewayError(Reason.DUPLICATE_REQUEST_ID, text, request_id=arrived.request_id)

    def add(self, request: Request) -> None:
        """Watch an accepted request until `remove`."""
        arrived = request.arrived
        self._requests[request.handle] = request
        self._by_client[arrived.client_key, arrived.request_id] = request
        if arrived.deadline_at is not None:
            heappush(self._deadlines.heap, (arrived.deadline_at, request.handle))

    def remove(self, request: Request, now: float) -> None:
        """The request has ended."""
        arrived = request.arrived
        key = (arrived.client_key, arrived.request_id)
        # Who was told to retry must be let in again, with the same id.
        if self._reuse_after_s is not None and (request.error is None or not request.error.retryable):
            # Before the live entry goes: no moment at which neither knows the id. An old one loses its place.
            self._tombstones.pop(key, None)
            self._tombstones[key] = now + self._reuse_after_s
            if len(self._tombstones) > MAX_TOMBSTONES:
                self._tombstones.popitem(last=False)
        del self._requests[request.handle]
        del self._by_client[key]

    def expire(self, now: float) -> list[tuple[Request, Reason]]:
        """Unsettled requests whose time is over and why, earliest first; forgets old ids."""
        requests = self._requests
        self._deadlines.compact(requests)
        tombstones = self._tombstones
        while tombstones and next(iter(tombstones.values())) <= now:
            tombstones.popitem(last=False)
        over = [(requests[handle], Reason.DEADLINE_EXCEEDED) for handle in self._deadlines.expired(now, requests)]
        if self._max_age_s is not None:
            # They stand in the order of their acceptance.
            for request in requests.values():
                if request.accepted_at + self._max_age_s > now:
                    break
                over.append((request, Reason.MAX_AGE_EXCEEDED))
        return over

    def why_over(self, request: Request, now: float) -> Reason | None:
        """Whose time it is that has passed, ahead of the next `expire`; None if neither has."""
        deadline_at = request.arrived.deadline_at
        if deadline_at is not None and deadline_at <= now:
            return Reason.DEADLINE_EXCEEDED
        is_old = self._max_age_s is not None and request.accepted_at + self._max_age_s <= now
        return Reason.MAX_AGE_EXCEEDED if is_old else None

    def check(self) -> None:
        """Assert that both indices agree; for tests."""
        assert all(not request.is_ended for request in self._requests.values())
        assert set(map(id, self._by_client.values())) == set(map(id, self._requests.values()))
        assert len(self._tombstones) <= MAX_TOMBSTONES
