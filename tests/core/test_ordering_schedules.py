"""Preserved order over random schedules: ranks of different speeds, hits, streams, errors, losses, time-outs, cancels."""

import heapq
import random
from collections import deque

import pytest

from gateway.config.scheduling import Preserve
from gateway.core.request import Request
from tests.support.ordering import World, bytes_of

RUNS = 2000


class Rank:
    """Takes a few requests at a time, in order, and answers once per step for all of them."""

    def __init__(self, step_s, slots):
        self.step_s = step_s
        self.slots = slots
        self.queue = deque()
        self.running = {}
        self.is_stepping = False


class Schedule:
    """One run on simulated time. `orders` False plays a gateway that keeps no order, for comparison."""

    def __init__(self, seed, settings, *, domains=1, ranks=3, hits=0.4, faults=True, orders=True):
        self.rng = random.Random(seed)
        self.world = World(settings if orders else None)
        self.domains = [str(number) for number in range(domains)]
        self.ranks = [Rank(self.rng.choice((0.5, 1.0, 4.0, 10.0)), self.rng.randint(1, 4)) for _ in range(ranks)]
        self.hits = hits
        self.faults = faults
        self.events = []
        self.refused = dict.fromkeys(("places", "bytes"), 0)
        self.most_held = self.most_held_bytes = self.most_places = 0

    def at(self, when, what, *args):
        heapq.heappush(self.events, (when, len(self.world.log), self.rng.random(), what, args))

    def run(self, requests, gap_s):
        when = 0.0
        for _ in range(requests):
            self.at(when, self.arrive)
            when += self.rng.expovariate(1 / gap_s)
        while self.events:
            when, _, _, what, args = heapq.heappop(self.events)
            what(when, *args)
            if self.world.ordering is not None:
                self.watch(self.world.ordering)
        return self

    def watch(self, ordering):
        self.most_places = max(self.most_places, ordering.places)
        self.most_held_bytes = max(self.most_held_bytes, ordering.held_bytes)

    def arrive(self, now):
        rng, world, domain = self.rng, self.world, self.rng.choice(self.domains)
        if rng.random() < self.hits:
            request = world.hit(domain, tokens=rng.randint(0, 6))
            if isinstance(request, str):
                self.refused[request] += 1
            elif world.ordering is not None:
                held = len(world.accepted) - len(world.ended) - len(world.cancelled)
                self.most_held = max(self.most_held, held)
            return
        request = world.accept(domain, max_tokens=rng.randint(1, 6), n=rng.choice((1, 1, 2)))
        if isinstance(request, str):
            self.refused[request] += 1
            return
        rank = rng.choice(self.ranks)
        rank.queue.append(request)
        self.wake(now, rank)
        fate = rng.random() if self.faults else 1.0
        if fate < 0.1:
            self.at(now + rng.uniform(0, 30), self.cancel, request)
        elif fate < 0.15:
            self.at(now + rng.uniform(0, 30), self.fail, request)  # deadline, queue time-out, engine error
        elif fate < 0.16:
            self.at(now + rng.uniform(0, 30), self.lose, rank)

    def is_over(self, request):
        return request.handle in self.world.settled or request.handle in self.world.cancelled

    def wake(self, now, rank):
        if not rank.is_stepping:
            rank.is_stepping = True
            self.at(now + rank.step_s, self.step, rank)

    def step(self, now, rank):
        rank.is_stepping = False
        rank.running = {request: None for request in rank.running if not self.is_over(request)}
        while rank.queue and len(rank.running) < rank.slots:
            request = rank.queue.popleft()
            if not self.is_over(request):
                rank.running[request] = None
        rows, ends = [], []
        for request in rank.running:
            full = request.arrived.sampling.max_tokens
            counts = [min(self.rng.randint(0, 3), full - sequence.completion_tokens) for sequence in request.sequences]
            rows += zip(request.sequences, counts, strict=True)
            room = sum(full - sequence.completion_tokens for sequence in request.sequences)
            if sum(counts) == room:
                ends.append(request)
        self.rng.shuffle(rows)
        self.rng.shuffle(ends)
        self.world.batch(rows, ends)
        if rank.queue or len(ends) < len(rank.running):
            self.wake(now, rank)

    def cancel(self, _, request):
        self.world.cancel(request)

    def fail(self, _, request):
        if not self.is_over(request):
            self.world.settle(request)

    def lose(self, _, rank):
        for request in [*rank.running, *rank.queue]:
            self.fail(_, request)


def settings_for(rng):
    return Preserve(max_places=rng.choice((2, 8, 64)), max_held_bytes=bytes_of(rng.choice((8, 40, 10_000))))


def test_random_schedules_have_no_violation():
    accepted = refused = cancelled = errors = 0
    for seed in range(RUNS):
        rng = random.Random(-seed)
        settings = settings_for(rng)
        run = Schedule(seed, settings, domains=rng.randint(1, 3), ranks=rng.randint(1, 5)).run(30, rng.choice((0.2, 2)))
        world, ordering = run.world, run.world.ordering
        assert world.violations() == [], seed
        assert (ordering.places, ordering.held_bytes, ordering.domains) == (0, 0, 0), seed
        assert run.most_places <= settings.max_places, seed
        assert run.most_held_bytes <= settings.max_held_bytes, seed
        accepted += len(world.accepted)
        refused += sum(run.refused.values())
        cancelled += len(world.cancelled)
        errors += sum(
            world.settled[handle] < request.arrived.n * request.arrived.sampling.max_tokens
            for handle, request in enumerate(world.accepted)
            if handle in world.settled
        )
    # A schedule in which nothing goes wrong would prove little.
    assert accepted + refused == 30 * RUNS
    assert min(accepted, refused) > 10_000
    assert min(cancelled, errors) > 500


def test_the_same_schedules_without_order_are_found_out():
    broken = 0
    for seed in range(100):
        rng = random.Random(-seed)
        run = Schedule(seed, settings_for(rng), domains=rng.randint(1, 3), ranks=rng.randint(1, 5), orders=False)
        run.run(30, 0.2)
        broken += bool(run.world.violations())
    assert broken > 90


def overload(requests, settings):
    """60 % hits and many times what the ranks can do, in one domain."""
    return Schedule(7, settings, hits=0.6, faults=False).run(requests, 0.5)


@pytest.mark.parametrize("requests", [200, 1000, 4000])
@pytest.mark.parametrize(
    ("met", "settings"),
    [("places", Preserve(max_places=32)), ("bytes", Preserve(max_places=10**6, max_held_bytes=bytes_of(100)))],
)
def test_under_overload_with_hits_the_gate_bounds_what_is_held_and_always_drains(requests, met, settings):
    run = overload(requests, settings)
    world, ordering = run.world, run.world.ordering
    assert world.violations() == []
    assert (ordering.places, ordering.held_bytes, ordering.domains) == (0, 0, 0)
    assert len(world.ended) == len(world.accepted) == requests - run.refused[met]
    assert run.refused[met] > requests // 3
    assert len(world.accepted) > requests // 20
    assert run.most_held <= run.most_places <= (32 if met == "places" else 101)
    assert 0 < run.most_held_bytes <= settings.max_held_bytes


def test_without_a_bound_what_is_held_grows_with_the_load():
    small, large = (overload(requests, Preserve(max_places=10**6)) for requests in (200, 2000))
    assert large.world.violations() == []
    assert large.most_held > 4 * small.most_held > 4 * 32


def test_a_head_that_hangs_holds_only_its_own_domain_and_only_until_its_deadline():
    world = World(Preserve())
    hung = world.accept("a")
    waiting = [world.hit("a") for _ in range(20)]
    others = [world.hit("b") for _ in range(20)]
    assert world.ended == {request.handle for request in others}
    world.settle(hung)  # the deadline makes it an error answer
    assert world.ended == {request.handle for request in (hung, *waiting, *others)}
    assert isinstance(hung, Request)
    assert world.violations() == []
