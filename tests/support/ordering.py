"""A world around `Ordering`: requests that generate what a test says, and a log of what left, in order."""

from collections.abc import Iterable

from gateway.config.scheduling import Preserve
from gateway.core.events import RequestArrived
from gateway.core.ordering import Leaving, Ordering, worst_case_bytes
from gateway.core.request import BYTES_PER_TOKEN, Request, Sequence
from gateway.types import Sampling

END = -1


def make_arrived(*, prompt=(5, 6, 7), n=1, max_tokens=10, **given):
    """A request as the edge would hand it in; other keywords are fields of Sampling or RequestArrived."""
    sampling = {field: given.pop(field) for field in list(given) if field in Sampling.__struct_fields__}
    return RequestArrived(
        client_key="client",
        request_id="id",
        prompt_token_ids=list(prompt),
        sampling=Sampling(max_tokens=max_tokens, **sampling),
        n=n,
        **given,
    )


class World:
    """Plays the router (with `ordering` None: one that keeps no order) and notes what reaches the clients.

    Every sequence generates 0, 1, 2 ...; the log has (domain, request number, sequence index or END, tokens).
    """

    def __init__(self, settings: Preserve | None) -> None:
        self.ordering = Ordering(settings) if settings is not None else None
        self.log: list[tuple[str, int, int, tuple[int, ...]]] = []
        self.accepted: list[Request] = []
        self.domains: dict[int, str] = {}
        self.settled: dict[int, int] = {}
        self.cancelled: dict[int, int] = {}
        self.ended: set[int] = set()

    def accept(self, domain: str = "", *, max_tokens: int = 10, n: int = 1) -> Request | str:
        """The request, or why it was refused."""
        arrived = make_arrived(max_tokens=max_tokens, n=n)
        if self.ordering is not None:
            refusal = self.ordering.refusal(domain, worst_case_bytes(arrived))
            if refusal is not None:
                return refusal
        request = Request(len(self.accepted), arrived, 0.0)
        self.accepted.append(request)
        self.domains[request.handle] = domain
        if self.ordering is not None:
            self.ordering.reserve(request, domain, worst_case_bytes(arrived))
        return request

    def hit(self, domain: str = "", *, tokens: int = 3, n: int = 1) -> Request | str:
        """A request whose answer is known at once."""
        request = self.accept(domain, max_tokens=max(tokens, 1), n=n)
        if isinstance(request, Request):
            self.batch([(sequence, tokens) for sequence in request.sequences], [request])
        return request

    def batch(self, rows: Iterable[tuple[Sequence, int]], ends: Iterable[Request] = ()) -> None:
        """One engine batch: all rows first, then what it ended."""
        dirty = []
        for sequence, count in rows:
            if sequence.request.handle in self.cancelled:
                continue
            start = sequence.completion_tokens
            sequence.append(range(start, start + count), None)
            if not sequence.is_dirty:
                sequence.is_dirty = True
                dirty.append(sequence)
        ordering = self.ordering
        self.deliver([sequence for sequence in dirty if ordering is None or ordering.may_flush(sequence)])
        for request in ends:
            self.settle(request)

    def settle(self, request: Request) -> None:
        """The outcome is known, be it a success or an error: errors keep their place like any answer."""
        self.settled.setdefault(request.handle, generated(request))
        if self.ordering is None:
            self.deliver([request])
        else:
            assert request.place is not None
            held = sum(sequence.backlog_bytes for sequence in request.sequences)
            self.deliver(self.ordering.settle(request.place, held))

    def cancel(self, request: Request) -> None:
        """The caller is gone; one whose answer has left is no news."""
        if request.handle not in self.ended:
            self.cancelled.setdefault(request.handle, len(self.log))
        if self.ordering is not None:
            assert request.place is not None
            self.deliver(self.ordering.cancel(request.place))

    def deliver(self, leaving: Iterable[Leaving]) -> None:
        """Hand what leaves to the clients."""
        for item in leaving:
            if isinstance(item, Sequence):
                number = item.request.handle
                tokens, _ = item.take()
                self.log.append((self.domains[number], number, item.index, tuple(tokens)))
            else:
                self.log.append((self.domains[item.handle], item.handle, END, ()))
                self.ended.add(item.handle)

    def violations(self) -> list[str]:
        """What of O1 to O6 the log breaks, found without looking at any state of the ordering."""
        found = []
        latest: dict[str, int] = {}
        ended: set[int] = set()
        counts: dict[tuple[int, int], int] = {}
        totals: dict[int, int] = {}
        for at, (domain, number, index, tokens) in enumerate(self.log):
            if number < latest.get(domain, -1):
                found.append(f"{number} follows {latest[domain]}")
            latest[domain] = max(number, latest.get(domain, -1))
            if number in ended:
                found.append(f"{number} goes on after its end")
            if at >= self.cancelled.get(number, at + 1):
                found.append(f"{number} goes on after its cancellation")
            if index == END:
                ended.add(number)
                if totals.get(number, 0) != self.settled[number]:
                    found.append(f"{number} ends without all of its tokens")
                continue
            start = counts.get((number, index), 0)
            if tokens != tuple(range(start, start + len(tokens))):
                found.append(f"{number} lost or swapped tokens")
            counts[number, index] = start + len(tokens)
            totals[number] = totals.get(number, 0) + len(tokens)
        missing = {request.handle for request in self.accepted} - ended - set(self.cancelled)
        return found + [f"{number} never ends" for number in sorted(missing)]


def generated(request: Request) -> int:
    """Tokens of all its sequences together."""
    return sum(sequence.completion_tokens for sequence in request.sequences)


def bytes_of(tokens: int) -> int:
    """Bytes that this many tokens take in an outbox."""
    return BYTES_PER_TOKEN * tokens
