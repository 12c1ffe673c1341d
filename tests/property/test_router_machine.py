"""A hypothesis state machine over the router: invariants after every step, quiet at the end."""

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gateway.core.effects import AbortOnRank, Dispatch, RequestAccepted, RequestEnded, RequestRefused
from gateway.core.errors import Reason
from gateway.core.events import RankLost, SendBlocked, SendFailed, SendUnblocked, Tick
from tests.support.core import Bench, load, make_info

RANKS = 3
picks = st.integers(0, 10**6)


class RouterMachine(RuleBasedStateMachine):
    """Ranks that do as told: they know what was dispatched to them and answer any of it, or not."""

    @initialize(
        preset=st.sampled_from(
            ["lmetric", "smg", "vllm", "vllm_4w_r", "round_robin", "random", "p2c", "least_in_flight"]
        ),
        protocol=st.sampled_from(["vllm", "tokenspeed"]),
        per_rank=st.sampled_from([2, 5, 64]),
    )
    def start(self, preset, protocol, per_rank):
        self.bench = Bench(
            RANKS,
            protocol,
            policy={"preset": preset},
            admission={"max_in_flight_per_rank": per_rank, "max_in_flight": 2 * per_rank + 1},
            info=make_info(kv_capacity_tokens=300),
        )
        self.counted = protocol == "tokenspeed"
        self.accepted: dict[int, object] = {}
        self.engine: list[dict[str, int]] = [{} for _ in range(RANKS)]
        self.outcomes: dict[int, int] = {}

    def send(self, effects):
        for effect in effects:
            if isinstance(effect, Dispatch):
                assert self.bench.router.ranks.state[effect.rank] == "READY"
                self.engine[effect.rank][effect.request.wire_id] = 0
            elif isinstance(effect, AbortOnRank):
                for wire_id in effect.wire_ids:
                    self.engine[effect.rank].pop(wire_id, None)
            elif isinstance(effect, RequestAccepted):
                self.accepted[effect.request.handle] = effect.request
            elif isinstance(effect, RequestEnded):
                self.outcomes[effect.request.handle] = self.outcomes.get(effect.request.handle, 0) + 1
        return effects

    @rule(
        prompt=st.integers(1, 120),
        n=st.integers(1, 4),
        pin=st.none() | st.integers(-1, RANKS),
        deadline=st.none() | st.floats(0, 5),
    )
    def arrive(self, prompt, n, pin, deadline):
        bench = self.bench
        before = list(bench.router.ranks.in_flight)
        at = None if deadline is None else bench.now + deadline
        effects = self.send(bench.send(bench.arrived([1] * prompt, n=n, pinned_rank=pin, deadline_at=at)))
        if any(isinstance(effect, RequestRefused) for effect in effects):
            assert len(effects) == 1
            assert bench.router.ranks.in_flight == before
        else:
            assert sum(bench.router.ranks.in_flight) == sum(before) + n

    @rule(
        rank=st.integers(0, RANKS - 1),
        pick=picks,
        tokens=st.integers(0, 3),
        finish=st.sampled_from(["", "", "stop", "length", "abort", "error"]),
        report=st.booleans(),
        count_error=st.sampled_from([0, 0, 0, 0, 1, -1]),
    )
    def answer(self, rank, pick, tokens, finish, report, count_error):
        mine = self.engine[rank]
        if not mine:
            return
        wire_id = sorted(mine)[pick % len(mine)]
        mine[wire_id] += tokens
        row = (wire_id, [7] * tokens, finish, mine[wire_id] + count_error)
        if finish:
            del mine[wire_id]
        snapshot = load(pick % 50, pick % 7, (pick % 130) / 100) if report else None
        self.send(self.bench.batch(rank, [row if self.counted else row[:3]], snapshot))

    @rule(rank=st.integers(0, RANKS - 1), running=st.integers(0, 9), waiting=st.integers(0, 9))
    def report_alone(self, rank, running, waiting):
        self.send(self.bench.batch(rank, [], load(running, waiting, 0.3)))

    @rule(rank=st.integers(0, RANKS - 1), pick=picks, lossy=st.booleans())
    def unreadable(self, rank, pick, lossy):
        mine = sorted(self.engine[rank])
        failed = [mine[pick % len(mine)]] if mine else []
        self.send(self.bench.batch(rank, [], failed_ids=failed, lossy=lossy, fault="ragged"))

    @rule(rank=st.integers(0, RANKS - 1), foreign=st.booleans())
    def stray_row(self, rank, foreign):
        wire_id = "feedfeedfeedfeed-1-0-1" if foreign else "0123456789abcdef-ffffff-0-1"
        self.send(self.bench.batch(rank, [(wire_id, [3])], load(2, 2, 0.2)))
        if self.bench.router.ranks.in_flight[rank] == 0:
            assert self.bench.router.ranks.reported_running[rank] == 0

    @rule(pick=picks, reason=st.sampled_from([Reason.CANCELLED, Reason.ABORTED, Reason.SLOW_READER]))
    def cancel(self, pick, reason):
        if self.accepted:
            handles = sorted(self.accepted)
            request = self.accepted[handles[pick % len(handles)]]
            from gateway.core.events import RequestCancelled

            self.send(self.bench.send(RequestCancelled(request.handle, reason)))

    @rule(rank=st.integers(0, RANKS - 1), pick=picks)
    def send_fails(self, rank, pick):
        mine = sorted(self.engine[rank])
        if mine:
            wire_id = mine[pick % len(mine)]
            del self.engine[rank][wire_id]
            incarnation = self.bench.router.ranks.incarnation[rank]
            self.send(self.bench.send(SendFailed(rank, incarnation, wire_id, "unreachable")))

    @rule(rank=st.integers(0, RANKS - 1), blocked=st.booleans())
    def block(self, rank, blocked):
        kind = SendBlocked if blocked else SendUnblocked
        self.send(self.bench.send(kind(rank, self.bench.router.ranks.incarnation[rank])))

    @rule(rank=st.integers(0, RANKS - 1), current=st.booleans())
    def lose(self, rank, current):
        incarnation = self.bench.router.ranks.incarnation[rank] - (0 if current else 1)
        self.send(self.bench.send(RankLost(rank, incarnation, "disconnected")))
        if current:
            self.engine[rank].clear()

    @rule(rank=st.integers(0, RANKS - 1))
    def join(self, rank):
        self.engine[rank].clear()
        self.bench.now += 0.001
        number = self.bench.router.ranks.incarnation[rank] + 1
        from gateway.core.events import RankJoined

        info = make_info(kv_capacity_tokens=300)
        self.send(self.bench.send(RankJoined(rank=rank, incarnation=number, info=info)))

    @rule(step=st.floats(0, 3))
    def tick(self, step):
        self.bench.now += step
        self.send(self.bench.send(Tick()))

    @invariant()
    def outcomes_are_unique_and_empty_ranks_are_clamped(self):
        if not hasattr(self, "bench"):
            return
        assert all(count == 1 for count in self.outcomes.values())
        ranks = self.bench.router.ranks
        assert ranks.open_count == sum(ranks.is_open)
        assert ranks.over_kv_count == sum(ranks.is_over_kv)
        assert all(0.0 <= usage <= 1.0 for usage in ranks.kv_usage)
        for rank in range(RANKS):
            assert ranks.kv_floor_tokens <= ranks.free_kv_tokens[rank]
            assert ranks.foreign[rank] == max(0, ranks.running[rank] + ranks.waiting[rank] - ranks.in_flight[rank])

    def teardown(self):
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        for rank, mine in enumerate(self.engine):
            for wire_id in list(mine):
                self.send(bench.batch(rank, [(wire_id, [], "stop")]))
        bench.now += 10
        bench.send(Tick())
        bench.assert_quiet()
        assert set(self.outcomes) == set(self.accepted)
        assert [rank for rank in range(RANKS) if bench.router.ranks.reported_running[rank]] == []


RouterMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestRouterMachine = RouterMachine.TestCase
