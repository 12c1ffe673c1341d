"""A hypothesis state machine over `Ordering` beside a naive model that walks every row from its front."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gateway.config.scheduling import Preserve
from gateway.core.ordering import worst_case_bytes
from gateway.core.request import Request
from tests.support.ordering import World, bytes_of, generated

DOMAINS = "abc"
picks = st.integers(0, 10**6)


class Model:
    """What must be so, worked out from the whole row each time: who is live, who has left, who is charged what."""

    def __init__(self, max_places, max_held_bytes):
        self.max_places = max_places
        self.max_held_bytes = max_held_bytes
        self.rows: dict[str, list[Request]] = {}
        self.charged: dict[int, int] = {}
        self.settled: set[int] = set()
        self.left: set[int] = set()

    @property
    def places(self):
        return sum(map(len, self.rows.values()))

    def refusal(self, domain, worst_bytes):
        if self.places >= self.max_places:
            return "places"
        has_head = bool(self.rows.get(domain))
        return "bytes" if has_head and sum(self.charged.values()) + worst_bytes > self.max_held_bytes else None

    def accept(self, request, domain):
        self.rows.setdefault(domain, []).append(request)
        self.charged[request.handle] = worst_case_bytes(request.arrived)
        self.walk()

    def settle(self, request):
        if any(request in row for row in self.rows.values()) and request.handle not in self.settled:
            self.settled.add(request.handle)
            self.charged[request.handle] = min(self.charged[request.handle], bytes_of(generated(request)))
            self.walk()

    def cancel(self, request):
        for row in self.rows.values():
            if request in row:
                row.remove(request)
                self.charged.pop(request.handle)
        self.walk()

    def walk(self):
        for domain, row in list(self.rows.items()):
            while row and row[0].handle in self.settled:
                request = row.pop(0)
                self.left.add(request.handle)
                self.charged.pop(request.handle)
            if row:
                self.charged[row[0].handle] = 0
            else:
                del self.rows[domain]

    def is_live(self, request):
        return request.handle in self.left or any(row[0] is request for row in self.rows.values())


class OrderingMachine(RuleBasedStateMachine):
    """Few places and little room, so that both bounds are met often."""

    @initialize(places=st.integers(1, 9), tokens=st.integers(1, 60))
    def start(self, places, tokens):
        self.world = World(Preserve(max_places=places, max_held_bytes=bytes_of(tokens)))
        self.model = Model(places, bytes_of(tokens))

    def enter(self, make, domain, max_tokens, n):
        ordering = self.world.ordering
        before = (ordering.places, ordering.held_bytes, ordering.domains, len(self.world.log))
        refusal = self.model.refusal(domain, bytes_of(n * max_tokens))
        result = make()
        if refusal is not None:
            assert result == refusal
            assert (ordering.places, ordering.held_bytes, ordering.domains, len(self.world.log)) == before  # O9
        else:
            self.model.accept(result, domain)
        return None if refusal is not None else result

    @rule(domain=st.sampled_from(DOMAINS), max_tokens=st.integers(1, 20), n=st.integers(1, 3))
    def accept(self, domain, max_tokens, n):
        self.enter(lambda: self.world.accept(domain, max_tokens=max_tokens, n=n), domain, max_tokens, n)

    @rule(domain=st.sampled_from(DOMAINS), tokens=st.integers(1, 20), n=st.integers(1, 2))
    def hit(self, domain, tokens, n):
        request = self.enter(lambda: self.world.hit(domain, tokens=tokens, n=n), domain, tokens, n)
        if request is not None:
            self.model.settle(request)

    def picked(self, picks_of, among):
        chosen = {among[pick % len(among)].handle: among[pick % len(among)] for pick in picks_of} if among else {}
        return list(chosen.values())

    @property
    def running(self):
        done = self.model.settled | set(self.world.cancelled)
        return [request for request in self.world.accepted if request.handle not in done]

    @rule(rows=st.lists(st.tuples(picks, st.integers(0, 4)), max_size=6), ends=st.lists(picks, max_size=3))
    def batch(self, rows, ends):
        """Rows of several requests in any order, and those that the batch ends: success and error look the same."""
        sequences = [sequence for request in self.running for sequence in request.sequences]
        chosen = {}
        for pick, count in rows if sequences else ():
            sequence = sequences[pick % len(sequences)]
            room = sequence.request.arrived.sampling.max_tokens - sequence.completion_tokens
            chosen[sequence] = min(count, room)
        ended = self.picked(ends, self.running)
        self.world.batch(chosen.items(), ended)
        for request in ended:
            self.model.settle(request)

    @rule(pick=picks)
    def settle_anyone(self, pick):
        """Also those that are settled, gone or cancelled: an end is applied once."""
        for request in self.picked([pick], self.world.accepted):
            log = len(self.world.log)
            is_second = request.handle in self.model.settled or request.handle in self.world.cancelled
            if request.handle not in self.world.cancelled:
                self.world.settle(request)
            else:
                assert self.world.ordering.settle(request.place, 0) == []
            assert not is_second or len(self.world.log) == log
            self.model.settle(request)

    @rule(pick=picks)
    def cancel_anyone(self, pick):
        """Queued, streaming, settled, left, cancelled before."""
        for request in self.picked([pick], self.world.accepted):
            self.world.cancel(request)
            self.model.cancel(request)

    @rule(pick=picks)
    def ask_for_anyone(self, pick):
        """A sequence that is still dirty when its request has settled, left or been cancelled."""
        for request in self.picked([pick], self.world.accepted):
            is_wanted = request.handle not in self.world.cancelled
            is_live = self.model.is_live(request)
            assert self.world.ordering.may_flush(request.sequences[0]) == (is_live and is_wanted)

    @rule(domain=st.sampled_from(DOMAINS))
    def settle_head(self, domain):
        if row := self.model.rows.get(domain):
            head = row[0]
            self.world.settle(head)
            self.model.settle(head)
            assert head.handle in self.world.ended  # the domain moves on (O12)

    @rule(domain=st.sampled_from(DOMAINS))
    def cancel_head(self, domain):
        if row := self.model.rows.get(domain):
            head = row[0]
            self.world.cancel(head)
            self.model.cancel(head)

    @invariant()
    def agrees_with_the_model(self):
        if not hasattr(self, "world"):
            return
        ordering, model = self.world.ordering, self.model
        ordering.check()
        assert (ordering.places, ordering.domains) == (model.places, len(model.rows))
        assert ordering.held_bytes == sum(model.charged.values()) <= model.max_held_bytes
        assert self.world.ended == model.left
        waiting = {handle for handle in model.charged if handle not in model.left}
        for request in self.world.accepted:
            if request.handle in self.world.cancelled:
                assert request.place.request is None
                assert not request.place.held
            elif model.is_live(request):
                assert not any(sequence.backlog_bytes for sequence in request.sequences)
            else:
                assert request.handle in waiting
                assert request.place.charged_bytes == model.charged[request.handle]
                assert sum(s.backlog_bytes for s in request.sequences) == bytes_of(generated(request))

    def teardown(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        for request in reversed(self.running):
            world.settle(request)
        assert world.violations() == []
        assert (world.ordering.places, world.ordering.held_bytes, world.ordering.domains) == (0, 0, 0)  # O5
        assert all(request.place.request is None and not request.place.held for request in world.accepted)


TestOrderingMachine = OrderingMachine.TestCase
TestOrderingMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
