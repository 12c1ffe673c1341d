"""A hypothesis state machine over the router: every mode and setting, invariants after each step, quiet at the end."""

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gateway.core.errors import Reason
from gateway.core.events import (
    AbortAll,
    DrainStarted,
    LoadReported,
    RankHeard,
    RankJoined,
    RankLost,
    RankUndrained,
    RequestCancelled,
    SendBlocked,
    SendFailed,
    SendUnblocked,
    Tick,
    WaveReported,
)
from gateway.types import Sampling
from tests.property.deployments import (
    DEADLINE_S,
    MAX_AGE_S,
    MAX_EJECTED_S,
    MIN_QUEUE_TIMEOUT_S,
    RANKS,
    REUSE_AFTER_S,
    asks,
    deployments,
)
from tests.property.watch import Watch
from tests.support.core import load

STEP_S = 0.01
EJECTED_STEPS = round(MAX_EJECTED_S / STEP_S) + 1
"""What waits for an ejected rank waits no longer."""
picks = st.integers(0, 10**6)
ranks = st.integers(0, RANKS - 1)


class RouterMachine(RuleBasedStateMachine):
    """Ranks that do as told: they know what was dispatched to them and answer any of it, or not."""

    @initialize(
        bench=deployments(),
        end=st.sampled_from(["finish", "age", "abort", "drain"]),
        asks=st.lists(asks, min_size=3, max_size=12),
    )
    def start(self, bench, end, asks):
        self.bench = bench
        self.end = end
        self.watch = Watch(bench)
        self.counted = bench.config.groups[0].protocol == "tokenspeed"
        self.numbers = 0
        for ask in asks:
            self.arrive(**ask)

    # ---- clients: several rules, so that hardly any run is without -----------------------------------
    @rule(ask=asks, count=st.integers(1, 4))
    def arrive_alike(self, ask, count):
        for _ in range(count):
            self.arrive(**ask)

    @rule(asks=st.lists(asks, min_size=2, max_size=6))
    def arrive_mixed(self, asks):
        for ask in asks:
            self.arrive(**ask)

    @rule(pick=picks, count=st.integers(1, 3))
    def arrive_as_before(self, pick, count):
        """The same question again, of one whose answer may be stored or shared."""
        known = [r.arrived for r in self.watch.accepted.values() if r.arrived.sampling.temperature == 0]
        for _ in range(count if known else 0):
            arrived = known[pick % len(known)]
            who = (arrived.tenant, arrived.session_id, arrived.client_key)
            length = len(arrived.prompt_token_ids)
            like = {"n": arrived.n, "priority": arrived.priority, "max_tokens": arrived.sampling.max_tokens}
            self.arrive(length=length, who=who, greedy=True, **like)

    @rule(
        ask=asks,
        pin=st.sampled_from([*range(RANKS)] * 3 + [-1, RANKS]),
        patience=st.sampled_from([None, MIN_QUEUE_TIMEOUT_S]),
    )
    def arrive_pinned(self, ask, pin, patience):
        self.arrive(**ask, pin=pin, patience=patience)

    @rule(ask=asks, deadline=st.sampled_from([0.0, 0.02, 0.5, 3.0]), again=st.sampled_from([False, False, True]))
    def arrive_in_a_hurry(self, ask, deadline, again):
        self.arrive(**ask, deadline=deadline, again=again)

    def arrive(
        self, length, n, who, priority, greedy, max_tokens, *, pin=None, patience=None, deadline=None, again=False
    ):
        bench = self.bench
        if deadline is None and bench.router.ordering is not None:
            deadline = DEADLINE_S
        tenant, session, client = who
        self.numbers += not again
        before, refused = list(bench.router.ranks.in_flight), bench.router.counters.refused.copy()
        self.watch.send(
            bench.arrived(
                [length] * length,
                sampling=Sampling(max_tokens=max_tokens, temperature=0.0 if greedy else 1.0),
                n=n,
                pinned_rank=pin,
                deadline_at=None if deadline is None else bench.now + deadline,
                tenant=tenant,
                session_id=session,
                client_key=client,
                request_id=str(self.numbers),
                priority=priority,
                queue_timeout_s=patience,
            )
        )
        if bench.router.counters.refused != refused and bench.config.scheduling.mode == "direct":
            assert bench.router.ranks.in_flight == before

    @rule(pick=picks, reason=st.sampled_from([Reason.CANCELLED, Reason.ABORTED, Reason.SLOW_READER, Reason.INTERNAL]))
    def cancel(self, pick, reason):
        handles = sorted(self.watch.accepted)
        if handles:
            # Mostly a late one: the early ones have ended.
            handle = handles[-1 - (pick % len(handles)) % 8 % len(handles)]
            self.watch.send(RequestCancelled(handle, reason))

    @rule(is_lazy=st.booleans())
    def deliver(self, is_lazy):
        self.watch.is_lazy = is_lazy
        self.watch.flush()

    # ---- ranks ---------------------------------------------------------------------------------

    @rule(
        rank=ranks,
        pick=picks,
        tokens=st.integers(0, 3),
        finish=st.sampled_from(["", "", "stop", "length", "abort", "error"]),
        report=st.booleans(),
        count_error=st.sampled_from([0, 0, 0, 0, 0, 0, 1, -1]),
    )
    def answer(self, rank, pick, tokens, finish, report, count_error):
        mine = self.watch.engine[rank]
        if not mine:
            return
        wire_id = sorted(mine)[pick % len(mine)]
        row = self.row(rank, wire_id, tokens, finish, count_error)
        snapshot = load(pick % 50, pick % 7, (pick % 130) / 100) if report else None
        self.watch.batch(rank, [row], snapshot)

    @rule(steps=st.lists(picks, min_size=1, max_size=4))
    def work(self, steps):
        for finishes in steps:
            for rank in range(RANKS):
                self.step(rank, 1, finishes >> rank)

    @rule(rank=ranks, tokens=st.integers(1, 2), finishes=picks)
    def step(self, rank, tokens, finishes):
        rows = [
            self.row(rank, wire_id, tokens, "stop" if finishes >> index & 1 else "")
            for index, wire_id in enumerate(sorted(self.watch.engine[rank]))
        ]
        self.bench.now += 0.01
        self.watch.batch(rank, rows, load(len(rows), 0, 0.1))

    def row(self, rank, wire_id, tokens, finish, count_error=0):
        mine = self.watch.engine[rank]
        start = mine[wire_id]
        left = self.watch.limit[wire_id] - start
        if left or tokens < 3:  # few ranks send more than they were asked for
            tokens = min(tokens, left)
        mine[wire_id] += tokens
        if finish:
            del mine[wire_id]
        first = self.watch.base[wire_id] + start
        row = (wire_id, list(range(first, first + tokens)), finish, start + tokens + count_error)
        return row if self.counted else row[:3]

    @rule(rank=ranks, running=st.integers(0, 9), waiting=st.integers(0, 9))
    def report_alone(self, rank, running, waiting):
        self.watch.batch(rank, [], load(running, waiting, 0.3))

    @rule(rank=ranks, running=st.integers(0, 9), waiting=st.integers(0, 9), taken_at=st.none() | st.floats(1.0, 9.0))
    def report_to_coordinator(self, rank, running, waiting, taken_at):
        snapshot = load(running, waiting, 0.3, source="coordinator", taken_at_s=taken_at)
        self.watch.send(LoadReported(rank, self.bench.router.ranks.incarnation[rank], snapshot))

    @rule(rank=ranks, complete=st.none() | st.integers(0, 4), start=st.none() | st.integers(0, 4))
    def report_wave(self, rank, complete, start):
        self.watch.send(WaveReported(rank, self.bench.router.ranks.incarnation[rank], complete, start))

    @rule(rank=ranks, pick=picks, lossy=st.booleans())
    def unreadable(self, rank, pick, lossy):
        mine = sorted(self.watch.engine[rank])
        failed = [mine[pick % len(mine)]] if mine else []
        self.watch.batch(rank, [], failed_ids=failed, lossy=lossy and pick % 4 == 0, fault="ragged")

    @rule(rank=ranks, pick=picks)
    def stray_row(self, rank, pick):
        late = sorted(self.watch.ghosts[rank])
        wire_id = late[pick % len(late)] if late and pick % 3 else "feedfeedfeedfeed-1-0-1"
        tokens, final = [7], "stop" if pick % 2 else ""
        self.watch.batch(
            rank, [(wire_id, tokens, final, 1) if self.counted else (wire_id, tokens, final)], load(2, 2, 0.2)
        )
        if self.bench.router.ranks.in_flight[rank] == 0:
            assert self.bench.router.ranks.reported_running[rank] == 0

    @rule(rank=ranks, pick=picks)
    def send_fails(self, rank, pick):
        mine = sorted(self.watch.engine[rank])
        # Only what the rank has not answered yet can still fail to reach it.
        mine = [wire_id for wire_id in mine if not self.watch.engine[rank][wire_id]]
        if mine:
            wire_id = mine[pick % len(mine)]
            del self.watch.engine[rank][wire_id]
            self.watch.unsent(wire_id)
            self.watch.send(SendFailed(rank, self.bench.router.ranks.incarnation[rank], wire_id, "unreachable"))

    @rule(rank=ranks, blocked=st.booleans())
    def block(self, rank, blocked):
        kind = SendBlocked if blocked else SendUnblocked
        self.watch.send(kind(rank, self.bench.router.ranks.incarnation[rank]))

    @rule(rank=ranks, current=st.sampled_from([True, False, False]))
    def lose(self, rank, current):
        if current:
            self.watch.engine[rank].clear()
        incarnation = self.bench.router.ranks.incarnation[rank] - (0 if current else 1)
        self.watch.send(RankLost(rank, incarnation, "disconnected"))

    @rule(rank=ranks, replaces=st.sampled_from([False, False, False, True]), reattached=st.booleans())
    def join(self, rank, replaces, reattached=False):
        if self.bench.router.ranks.state[rank] == "READY" and not replaces:
            return
        self.watch.engine[rank].clear()
        if not reattached:
            self.watch.ghosts[rank].clear()
        self.bench.now += 0.001
        number = self.bench.router.ranks.incarnation[rank] + 1
        info = self.bench.infos[rank]
        self.watch.send(RankJoined(rank=rank, incarnation=number, info=info, reattached=reattached))

    @rule(rank=ranks, answers=st.booleans())
    def say_something(self, rank, answers):
        """A message that carries nothing of the live, maybe the answer to a question whether the rank lives."""
        probes = [probe.request.wire_id for probe in self.bench.probed if probe.rank == rank]
        if answers and probes:
            row = (probes[-1], [1], "length", 1)
            self.watch.batch(rank, [row if self.counted else row[:3]])
            table = self.bench.router.ranks
            assert table.silent_s[rank] == 0.0 or (table.is_blocked[rank] and not table.in_flight[rank])
        else:
            self.watch.send(RankHeard(rank, self.bench.router.ranks.incarnation[rank]))

    @rule(rank=ranks, migrate=st.booleans())
    def drain_rank(self, rank, migrate):
        self.watch.drain(rank, migrate=migrate)

    @rule(rank=ranks, others=st.lists(ranks, max_size=2), tokens=st.integers(1, 2), migrates=st.booleans())
    def break_off(self, rank, others, tokens, migrates):
        """What has just got tokens, maybe all that it asked for, has to go on elsewhere."""
        for other in others:
            self.join(other, replaces=False)
            self.watch.send(SendUnblocked(other, self.bench.router.ranks.incarnation[other]))
        self.step(rank, tokens, finishes=0)
        if migrates:
            self.drain_rank(rank, migrate=True)
        else:
            self.lose(rank, current=True)

    @rule(rank=ranks)
    def undrain_rank(self, rank):
        self.watch.send(RankUndrained(rank))

    # ---- time ----------------------------------------------------------------------------------

    @rule(step=st.sampled_from([0.0, 0.004, 0.03, 0.3, 1.0, 3.0]))
    def tick(self, step):
        self.bench.now += step
        self.watch.send(Tick())

    @rule(steps=st.integers(1, 12), speaks=st.sampled_from([None, *range(RANKS)]))
    def silence(self, steps, speaks):
        """Nobody says anything for a while, or only one rank does."""
        for _ in range(steps):
            self.bench.now += 0.25
            self.watch.send(Tick())
            if speaks is not None:
                self.watch.batch(speaks, [])

    @rule()
    def tick_when_due(self):
        due_at = self.bench.router.next_due()
        if due_at is not None:
            self.bench.now = due_at
            self.watch.send(Tick())

    @rule(pick=picks)
    def drain(self, pick):
        if self.end == "drain" and pick % 4 == 0:
            self.watch.send(DrainStarted())

    @invariant()
    def idle_ranks_are_clamped_and_columns_agree(self):
        if not hasattr(self, "bench"):
            return
        table = self.bench.router.ranks
        assert table.open_count == sum(table.is_open)
        assert table.over_kv_count == sum(table.is_over_kv)
        assert all(0.0 <= usage <= 1.0 for usage in table.kv_usage)
        for rank in range(RANKS):
            assert table.kv_floor_tokens <= table.free_kv_tokens[rank]
            assert table.foreign[rank] == max(0, table.running[rank] + table.waiting[rank] - table.in_flight[rank])

    # ---- the end -------------------------------------------------------------------------------

    def teardown(self):
        if not hasattr(self, "watch") or self.watch.is_broken:
            return
        bench, watch = self.bench, self.watch
        watch.is_lazy = False
        if self.end == "abort":
            dispatched = len(bench.dispatched)
            watch.send(AbortAll(Reason.DRAINING))
            assert len(bench.dispatched) == dispatched, "work sent out only to be aborted"
        elif self.end == "age":
            bench.now += MAX_AGE_S
            watch.send(Tick())
        else:
            self.finish_everything()
        watch.flush()
        bench.now += REUSE_AFTER_S
        watch.send(Tick())
        bench.assert_quiet()
        assert len(bench.router._registry._tombstones) == 0
        assert not bench.router.dirty
        assert [rank for rank in range(RANKS) if bench.router.ranks.reported_running[rank]] == []

    def finish_everything(self):
        """All ranks work and answer: what is live ends, and nothing is stuck in the queue."""
        bench, watch = self.bench, self.watch
        for rank in range(RANKS):
            if bench.router.ranks.state[rank] != "READY":
                self.join(rank, replaces=False)
            watch.send(SendUnblocked(rank, bench.router.ranks.incarnation[rank]))
        if bench.router._dispatcher is not None:
            bench.router._dispatcher._waits_for = 0
        for _ in range(4 * watch.offered + 4 + EJECTED_STEPS):
            bench.now += STEP_S
            watch.send(Tick())
            for rank in range(RANKS):
                rows = [self.row(rank, wire_id, 1, "stop") for wire_id in sorted(watch.engine[rank])]
                watch.batch(rank, rows)
            if not bench.router.live_count:
                return
        raise AssertionError(f"{bench.router.live_count} requests never end")


RouterMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestRouterMachine = pytest.mark.timeout(600)(RouterMachine.TestCase)
