"""The queue against a naive one that sorts and searches, and the bound on waiting."""

from copy import copy

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.queueing import ANY, Waiting

UNITS = 2**32
MAX_WAIT_S = 8
TIMES = st.integers(0, 12).map(lambda quarters: quarters / 4)
PINS = st.sampled_from([None, None, None, 0, 1, 2])
LANES = st.sets(st.sampled_from([None, 0, 1, 2, 3])) | st.just(frozenset((None, 0, 1, 2)))
WEIGHTS = {"a": 1.0, "b": 3.0, "c": 0.25}
ENTRIES = st.fixed_dictionaries(
    {
        "tenant": st.sampled_from(["a", "b", "c", "d"]),
        "prefill_ms": st.sampled_from([0.0, 1.0, 40.0, 250.0]),
        "tokens": st.integers(1, 300),
        "priority": st.integers(0, 3),
        "pin": PINS,
        "timeout_s": st.sampled_from([None, None, 0.0, 1.0, 3.0, 99.0]),
    }
)
CONFIGS = st.fixed_dictionaries(
    {
        "order": st.sampled_from(["fcfs", "aging", "spf", "edf", "hrrn"]),
        "alpha": st.sampled_from([0, 16]),
        "fair": st.booleans(),
        "max_wait_s": st.sampled_from([None, MAX_WAIT_S]),
        "timeout_s": st.sampled_from([None, 2]),
        "timeout_action": st.sampled_from(["reject", "delay"]),
        "levels": st.sampled_from(
            [
                [],
                [
                    {"priority": 1, "timeout_s": 1, "timeout_action": "delay"},
                    {"priority": 2, "timeout_action": "reject"},
                ],
            ]
        ),
    }
)


class Tenant:
    def __init__(self, weight):
        self.weight = weight
        self.tag = self.serial = 0


class Naive:
    """The rules of the queue as loops over plain lists."""

    def __init__(self, config):
        self.config = config
        self.tenants = {name: Tenant(WEIGHTS.get(name, 1.0)) for name in "abcd"}
        self.entries = []
        self.late = set()
        self.delayed = 0
        self.virtual_time = self.serial = 0

    def key(self, entry, now):
        prefill_s = entry.prefill_ms / 1e3
        return {
            "fcfs": 0,
            "aging": entry.enqueued_at + self.config["alpha"] * prefill_s,
            "spf": prefill_s,
            "edf": entry.enqueued_at + max(0.2, round(5e3 * entry.prefill_ms) / 1e6),
            "hrrn": (entry.enqueued_at - (now + 0.01)) / (prefill_s + 0.01),
        }[self.config["order"]]

    def in_time_of(self, name, entries):
        return [entry for entry in entries if entry.account.name == name and entry not in self.late]

    def push(self, entry):
        name = entry.account.name
        if not self.in_time_of(name, self.entries):
            tenant = self.tenants[name]
            tenant.tag = max(tenant.tag, self.virtual_time)
            self.serial += 1
            tenant.serial = self.serial
        self.entries.append(entry)

    def expire(self, now):
        """What must be refused."""
        levels = {level["priority"]: level for level in self.config["levels"]}
        due = [e for e in self.entries if e.expires_at is not None and e.expires_at <= now]
        refused = []
        for entry in sorted(due, key=lambda e: (e.expires_at, e.number)):
            has_given_up = entry.gives_up_at is not None and entry.gives_up_at <= now
            action = levels.get(entry.priority, {}).get("timeout_action", self.config["timeout_action"])
            if has_given_up or action == "reject":
                refused.append(entry)
                self.remove(entry)
            else:
                self.delayed += 1
                self.late.add(entry)
        return refused

    def cutoff(self, now):
        return now - (self.config["max_wait_s"] or float("inf"))

    def order(self, now, lanes):
        """What repeated service would give."""
        twin = copy(self)
        twin.tenants = {name: copy(tenant) for name, tenant in self.tenants.items()}
        twin.entries, twin.late = self.entries[:], self.late.copy()
        order = []
        while (entry := twin.next(now, lanes)) is not None:
            order.append(entry)
            twin.take(entry)
        return order

    def next(self, now, lanes):
        asked = [entry for entry in self.entries if entry.lane in lanes]
        in_time = [entry for entry in asked if entry not in self.late]
        if in_time:
            if self.config["fair"]:
                names = {entry.account.name for entry in in_time}
                turn = min(names, key=lambda name: (self.tenants[name].tag, self.tenants[name].serial))
                in_time = self.in_time_of(turn, in_time)
            overdue = [entry for entry in in_time if entry.enqueued_at <= self.cutoff(now)]
            if overdue:
                return min(overdue, key=lambda e: (e.enqueued_at, e.number))
            return min(in_time, key=lambda e: (e.priority, self.key(e, now), e.number))
        return min(asked, key=lambda e: e.number, default=None)

    def take(self, entry):
        name, tenant = entry.account.name, self.tenants[entry.account.name]
        has_turn = bool(self.in_time_of(name, self.entries))
        start = tenant.tag
        self.virtual_time = max(self.virtual_time, start)
        cost = 1 + int(entry.service_tokens * (UNITS / tenant.weight))
        tenant.tag = max(start + cost, self.virtual_time)
        if has_turn:
            self.serial += 1
            tenant.serial = self.serial
        self.remove(entry)

    def remove(self, entry):
        self.entries.remove(entry)
        self.late.discard(entry)


class QueueMachine(RuleBasedStateMachine):
    @initialize(config=CONFIGS)
    def start(self, config):
        self.waiting = Waiting(weights=WEIGHTS, **config)
        self.queue = self.waiting.queue
        self.naive = Naive(config)
        self.gone = []

    @rule(more=ENTRIES)
    def push(self, more):
        self.naive.push(self.waiting.push(**more))

    @rule(seconds=TIMES)
    def time_passes(self, seconds):
        self.waiting.now += seconds

    @rule(lanes=LANES)
    def the_order_is_the_naive_one(self, lanes):
        assert self.waiting.order(lanes) == self.naive.order(self.waiting.now, lanes)

    @rule(lanes=LANES, skipped=st.integers(0, 3))
    def take_one(self, lanes, skipped):
        """The caller may have no room for the first ones."""
        order = self.waiting.order(lanes)
        if skipped < len(order):
            self.take(order[skipped])

    @rule(lanes=LANES, count=st.integers(1, 5))
    def take_a_batch(self, lanes, count):
        for entry in self.waiting.order(lanes)[:count]:
            self.take(entry)

    def take(self, entry):
        self.queue.taken(entry)
        self.naive.take(entry)
        self.gone.append(entry)

    @precondition(lambda self: self.naive.entries)
    @rule(data=st.data())
    def remove(self, data):
        entry = data.draw(st.sampled_from(self.naive.entries))
        self.queue.remove(entry)
        self.naive.remove(entry)
        self.gone.append(entry)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def what_is_gone_stays_gone(self, data):
        entry = data.draw(st.sampled_from(self.gone))
        data.draw(st.sampled_from([self.queue.remove, self.queue.taken]))(entry)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def one_comes_back(self, data):
        entry = data.draw(st.sampled_from(self.gone))
        self.gone.remove(entry)
        self.queue.push(entry, self.waiting.now)
        self.naive.push(entry)

    @rule()
    def expire(self):
        refused = self.naive.expire(self.waiting.now)
        assert self.queue.expired(self.waiting.now) == refused
        self.gone += refused

    @invariant()
    def counts_and_lists_agree(self):
        self.queue.check()
        entries = sorted(self.naive.entries, key=lambda e: (e.enqueued_at, e.number))
        assert self.queue.entries() == entries
        assert len(self.queue) == len(entries)
        assert self.queue.oldest() is (entries[0] if entries else None)
        assert {entry for entry in entries if entry.is_delayed} == self.naive.late
        assert self.queue.timeouts_delayed == self.naive.delayed
        for number in range(4):
            assert self.queue.depth_of(number) == sum(entry.priority == number for entry in entries)
            assert self.queue.pinned_to(number) == [entry for entry in entries if entry.pinned_rank == number]

    def teardown(self):
        for entry in self.queue.entries():
            self.queue.taken(entry)
        assert not any(
            (self.queue._rows, self.queue._backlogs, self.queue._expiries, self.queue._turns.line, self.queue._depths)
        )


QueueMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestQueueAgainstTheNaiveOne = QueueMachine.TestCase


@settings(max_examples=200, deadline=None)
@given(
    config=CONFIGS.map(lambda config: config | {"max_wait_s": MAX_WAIT_S}),
    steps=st.lists(st.tuples(ENTRIES, TIMES, st.integers(0, 2)), min_size=5, max_size=60),
)
def test_an_overdue_entry_is_passed_only_by_those_that_have_waited_at_least_as_long(config, steps):
    """The bound: once overdue and until its time-out, an entry is served after at most as many others of its tenant as
    were overdue before it; with `fair` off, of all tenants."""
    waiting = Waiting(weights=WEIGHTS, **config)
    ahead = {}
    passed = {}

    def group(entry):
        return entry.account.name if config["fair"] else None

    def serve():
        overdue = {}
        for entry in waiting.queue.entries():
            if not entry.is_delayed and waiting.now - entry.enqueued_at >= MAX_WAIT_S:
                overdue.setdefault(group(entry), []).append(entry)
        for members in overdue.values():
            for place, entry in enumerate(members):
                ahead.setdefault(entry, place)
        served = waiting.serve()
        if served is not None:
            members = overdue.get(group(served), [])
            assert served in members or not members or served.is_delayed
            for entry in members:
                if entry is not served:
                    passed[entry] = passed.get(entry, 0) + 1
            assert not served.is_delayed or not overdue
        return served

    for more, seconds, services in steps:
        waiting.push(**more)
        waiting.now += seconds
        waiting.queue.expired(waiting.now)
        for _ in range(services):
            serve()
    waiting.now += MAX_WAIT_S
    while serve() is not None:
        pass
    for entry, count in passed.items():
        assert count <= ahead[entry]


@given(count=st.integers(1, 40), services=st.integers(1, 10))
@settings(max_examples=30, deadline=None)
def test_without_the_bound_a_low_priority_can_wait_for_ever(count, services):
    """What `max_wait_s` is for; with it the test above would be idle talk."""
    waiting = Waiting(max_wait_s=None, fair=False)
    low = waiting.push(priority=9)
    for _ in range(count):
        waiting.now += MAX_WAIT_S
        for _ in range(services):
            waiting.push(priority=0)
            assert waiting.serve() is not low
    assert next(waiting.queue.in_order(waiting.now, ANY)) is low
