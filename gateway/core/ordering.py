"""Preserved order: when a request's output may leave, so that answers leave in the order of acceptance.

Tokens stay in the outboxes of their sequences; nothing is copied here. Each domain is a row of places, one per
accepted request, in order of acceptance. The first is the head and streams live. All others wait: what they generate
is remembered by sequence and leaves when everything before it has left.

What makes it hold:
* a place is reserved at the one accept point, before any look-up, queue or rank can make a difference;
* errors are answers and keep their place; a caller who is gone has none, and what it generated is dropped at once;
* the bound is at acceptance. A request is charged the most that it can generate, and what it did not need is given
  back when it is settled. Nothing else ever waits for room here: a bound that held work back from the ranks could
  hold back the head, for which everyone waits;
* no method calls anyone. What may leave now is returned, in order, so nothing can happen half-way through.

Ask `may_flush` for what an engine batch made dirty before settling the requests that the batch ended, and deliver
what both return as one sequence: else a successor's output, listed first in its batch, overtakes the last of its head.
"""

from collections import OrderedDict

from gateway.config.scheduling import Preserve
from gateway.core.events import RequestArrived
from gateway.core.request import BYTES_PER_TOKEN, Request, Sequence, logprob_bytes
from gateway.types import TokenLogprob

Leaving = Sequence | Request
"""What may leave now: a sequence's outbox, or a request's end."""


class Place:
    """An accepted request's position in its domain.

    `charged_bytes` is what it may still have to hold; 0 for a head. `held` are the sequences that had output while it
    was not the head, in the order in which they first had some. `is_live` says that its output may leave at once: it
    is the head, or it has left. `request` is None once it has no place any more, so that the two form no cycle.
    """

    __slots__ = ("charged_bytes", "domain", "held", "is_live", "is_settled", "request")

    def __init__(self, request: Request, domain: str, charged_bytes: int, *, is_live: bool) -> None:
        self.request: Request | None = request
        self.domain = domain
        self.charged_bytes = charged_bytes
        self.held: dict[Sequence, None] = {}
        self.is_live = is_live
        self.is_settled = False


class Ordering:
    """All places, by domain. Exists only with `ordering: preserve`.

    `places` and `held_bytes` are what the settings bound: requests with a place, and the bytes they are charged.
    """

    def __init__(self, settings: Preserve) -> None:
        self._max_places = settings.max_places
        self.max_held_bytes = settings.max_held_bytes
        # An OrderedDict finds its first key in constant time after any number of removals at the front; a dict walks
        # over what was removed.
        self._domains: dict[str, OrderedDict[Place, None]] = {}
        self.places = 0
        self.held_bytes = 0

    @property
    def domains(self) -> int:
        """Domains with a place in them."""
        return len(self._domains)

    def refusal(self, domain: str, worst_bytes: int) -> str | None:
        """Which bound a new request would exceed: "places", "bytes" or None. Changes nothing.

        A request that would be its domain's head streams live: it is charged nothing, so it is never refused for bytes.
        """
        if self.places >= self._max_places:
            return "places"
        if domain in self._domains and self.held_bytes + worst_bytes > self.max_held_bytes:
            return "bytes"
        return None

    def reserve(self, request: Request, domain: str, worst_bytes: int) -> Place:
        """Give the request the next place of its domain, and set `request.place`.

        For a request that `refusal` just let pass. `worst_bytes` is the most it can generate; see `worst_case_bytes`.
        """
        row = self._domains.get(domain)
        is_live = row is None
        if row is None:
            row = self._domains[domain] = OrderedDict()
        place = Place(request, domain, 0 if is_live else worst_bytes, is_live=is_live)
        row[place] = None
        request.place = place
        self.places += 1
        self.held_bytes += place.charged_bytes
        return place

    def may_flush(self, sequence: Sequence) -> bool:
        """Whether the sequence's outbox may be flushed now. If not, it is returned once its turn has come.

        True for a head and for what has left; a cancelled request's output never leaves, nor is it remembered.
        """
        place = sequence.request.place
        if place is None or place.is_live:
            return True
        if place.request is not None:
            place.held[sequence] = None
        return False

    def settle(self, place: Place, held_bytes: int) -> list[Leaving]:
        """The request's outcome is known, and what it generated is in its outboxes: `held_bytes` of it.

        Returns what may leave now, in order: of each request whose turn has come the sequences that were held, then,
        if it is settled, the request itself, which stands for its end. Empty for a place that was settled before or
        is gone.
        """
        if place.is_settled or place.request is None:
            return []
        place.is_settled = True
        if place.is_live:
            return self._advance(place.domain)
        # Never more than was charged: room that acceptance did not find can't be taken now.
        self._refund(place, place.charged_bytes - held_bytes)
        return []

    def cancel(self, place: Place) -> list[Leaving]:
        """The request's answer goes to nobody: drop its place and what it holds. Its end is the caller's.

        Returns what its successors may send now, as `settle` does. Empty for a place that is gone.
        """
        if place.request is None:
            return []
        place.is_live = False
        self._remove(place)
        return self._advance(place.domain)

    def _advance(self, domain: str) -> list[Leaving]:
        """Let go of the settled places at the front; the first one that isn't settled streams live from now on.

        Without effect while the head isn't settled.
        """
        leaving: list[Leaving] = []
        row = self._domains[domain]
        while row:
            place = next(iter(row))
            place.is_live = True
            self._refund(place, place.charged_bytes)
            leaving.extend(place.held)
            place.held.clear()
            if not place.is_settled:
                return leaving
            assert place.request is not None
            leaving.append(place.request)
            self._remove(place)
        del self._domains[domain]
        return leaving

    def _remove(self, place: Place) -> None:
        del self._domains[place.domain][place]
        self._refund(place, place.charged_bytes)
        place.request = None
        place.held.clear()
        self.places -= 1

    def _refund(self, place: Place, surplus_bytes: int) -> None:
        if surplus_bytes > 0:
            place.charged_bytes -= surplus_bytes
            self.held_bytes -= surplus_bytes

    def check(self) -> None:
        """Assert what must be true between any two calls."""
        rows = self._domains.values()
        places = [place for row in rows for place in row]
        assert all(rows), "an empty domain was kept"
        assert self.places == len(places) <= self._max_places
        assert self.held_bytes == sum(place.charged_bytes for place in places) <= self.max_held_bytes
        heads = {next(iter(row)) for row in rows}
        for place in places:
            assert place.request is not None
            assert place.request.place is place
            assert place.charged_bytes >= 0
            assert place.is_live == (place in heads)
            if place in heads:
                assert (place.is_settled, len(place.held), place.charged_bytes) == (False, 0, 0), "a head streams live"
            assert all(sequence.request is place.request for sequence in place.held)


def worst_case_bytes(arrived: RequestArrived) -> int:
    """The most bytes that the request's outboxes can ever hold, counted as `Sequence.backlog_bytes` counts them."""
    sampling = arrived.sampling
    per_token = BYTES_PER_TOKEN
    if sampling.logprobs is not None:
        per_token += logprob_bytes((TokenLogprob(0.0, ((0, 0.0),) * sampling.logprobs),))
    return arrived.n * sampling.max_tokens * per_token
