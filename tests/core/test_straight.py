"""The straight way of common requests, beside the general one: the same events come to the same."""

from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.effects import RequestEnded
from gateway.core.errors import Reason
from gateway.core.events import (
    BatchReceived,
    RankJoined,
    RankLost,
    Reconfigured,
    RequestArrived,
    RequestCancelled,
    SendFailed,
    Tick,
)
from gateway.core.request import Request, Sequence
from gateway.types import EngineBatch, Sampling
from tests.support.core import Bench, load, make_config, make_info

GREEDY, WARM = Sampling(max_tokens=8, temperature=0.0), Sampling(max_tokens=8)
SAMPLINGS = (GREEDY, WARM, Sampling(max_tokens=1, temperature=0.0), Sampling(max_tokens=4090))
SLO = {"mode": "shadow", "ttft": [{"ttft_ms": 100.0}]}
CONFIGS: list[dict[str, Any]] = [
    {},
    {"failure": {"reroute": True, "resume": True}},
    {"policy": {"preset": "p2c"}},
    {"policy": {"preset": "smg"}},
    {"policy": {"cost": "1 / in_flight"}},
    {"predictor": {"prefill_ms": "0.5 + 0.01 * total_new_tokens", "calibrate": True}},
    {"predictor": {"prefill_ms": "1 / (total_new_tokens - 3)"}, "admission": {"max_in_flight_per_rank": 1}},
    {"admission": {"max_in_flight": 6}},
    {"admission": {"tenants": {"max_tracked": 1, "default": {"max_in_flight": 3}}}},
    {"admission": {"max_kv_tokens": 9000}},
    {"admission": {"id_reuse_after_s": 1.0}},
    {"gateways": 2},
    {"admission": {"max_in_flight_per_rank": 2}, "load": {"foreign_ttl_s": 0.5}},
]


class Pair:
    """Two benches that see the same; one of them takes the general way only."""

    def __init__(self, config: dict[str, Any], *, ranks: int = 2, tokens: int | None = None) -> None:
        info = make_info() if tokens is None else make_info(kv_capacity_tokens=tokens)
        self.benches = [Bench(ranks, info=info, **config) for _ in range(2)]
        self.benches[1].router._straight._is_on = False
        for bench in self.benches:
            for sampling in SAMPLINGS:
                bench.router._arrivals.validator._remember(sampling)

    def send(self, event: Any) -> list[Any]:
        mine, other = (bench.send(event) for bench in self.benches)
        assert [plain(effect) for effect in mine] == [plain(effect) for effect in other]
        assert state(self.benches[0]) == state(self.benches[1])
        return mine


def plain(value: Any) -> Any:
    """A value without the identity of what it is made of."""
    if isinstance(value, Request):
        hidden = ("sink", "sequences", "account", "error", "arrived")
        fields = {name: getattr(value, name) for name in value.__slots__ if name not in hidden}
        account = value.account.name if value.account is not None else None
        error = (value.error.reason, value.error.message) if value.error is not None else None
        return (fields, account, error, value.arrived.request_id, [plain(each) for each in value.sequences])
    if isinstance(value, Sequence):
        names = ("index", "attempts", "unsent", "finish", "completion_tokens", "cached_tokens", "is_dirty", "sent_at")
        record = value.record
        kept = (record.token_bytes, record.cache_bytes, list(record.token_ids)) if record is not None else None
        attempt = value.attempt
        hidden = ("sequence", "decision")
        tried = attempt and {name: getattr(attempt, name) for name in attempt.__slots__ if name not in hidden}
        decision = attempt and attempt.decision and attempt.decision.render()
        return ({name: getattr(value, name) for name in names}, kept, tried, decision, value.pending)
    if isinstance(value, Exception):
        return (type(value), str(value), vars(value))
    if isinstance(value, msgspec.Struct) and not isinstance(value, Sampling):
        return (type(value), [plain(getattr(value, name)) for name in value.__struct_fields__])
    return value


def state(bench: Bench) -> list[Any]:
    """Everything that a later event may depend on, and what is counted."""
    router = bench.router
    admission, registry = router._admission, router._registry
    tenants, ledger = admission.tenants, router._attempts.ledger
    accounts = [
        (each.name, each.in_flight, each.is_active, each.last_seen_at)
        for each in (*tenants._lasting.values(), *tenants._tracked.values(), tenants._overflow)
    ]
    return [
        {name: getattr(router.counters, name) for name in router.counters.__slots__},
        {name: value for name, value in vars(router.ranks).items() if isinstance(value, list | int | float)},
        (admission.sequences, admission._mean_gap_s, admission._last_release_at, admission._expected_back),
        (accounts, tenants.overflowed),
        (list(registry._requests), list(registry._by_client), dict(registry._tombstones), registry._deadlines.heap),
        (list(ledger.live), [list(each) for each in ledger.by_rank], [list(each) for each in ledger._unstarted]),
        [decision.render() for decision in router.decisions.latest(2)],
        [plain(item) for item in router.dirty],
        (router._parts.policy._state.cursor, router.predictor.faults, router.predictor.scale),
    ]


def any_step(random: Random) -> tuple[Any, ...]:
    """Something that happens; mostly what most requests are like."""
    kind = random.choice(["arrive"] * 6 + ["rows"] * 6 + ["report", "cancel", "lose", "unsent", "same id", "tick"])
    match kind:
        case "arrive":
            more = random.choice([{}] * 16 + [{"n": 2}, {"pinned_rank": 1}, {"priority": 3}, {"allow_resume": False}])
            prompt = random.choice([[5], [5, 6, 7]] * 6 + [[5, 32000], [5, -1], [7] * 60, [7] * 3000])
            deadline_s = random.choice([None, None, None, 5.0, 0.0, 0.3])
            return (kind, random.choice(SAMPLINGS), more, random.choice(["", "", "a", "b"]), deadline_s, prompt)
        case "rows":
            finish = random.choice(["", "stop", "stop", "length", "error", "abort"])
            return (kind, random.randrange(2), random.randrange(4), finish)
        case "report":
            return (kind, random.randrange(2), random.randrange(5), random.choice([0.0, 0.5, 0.99]))
        case "cancel" | "unsent":
            return (kind, random.randrange(6))
        case "lose":
            return (kind, random.randrange(2))
        case "tick":
            return (kind, random.choice([0.01, 0.4, 2.0]))
    return (kind,)


def apply(pair: Pair, number: int, step: tuple[Any, ...]) -> None:
    bench = pair.benches[0]
    kind, *rest = step
    live = list(bench.router._registry)
    if kind == "arrive":
        sampling, more, tenant, deadline_s, prompt = rest
        deadline_at = None if deadline_s is None else bench.now + deadline_s
        values = {"client_key": "c", "request_id": f"r{number}", "tenant": tenant, "deadline_at": deadline_at}
        pair.send(RequestArrived(prompt_token_ids=prompt, sampling=sampling, **values | more))
    elif kind == "same id":
        known = live[0].arrived if live else None
        if known is not None:
            pair.send(msgspec.structs.replace(known, sampling=GREEDY, n=1, pinned_rank=None))
    elif kind in ("rows", "report"):
        rank, count, what = rest
        ids = list(bench.router._attempts.ledger.by_rank[rank])[:count] if kind == "rows" else []
        finish = [what] * len(ids)
        report = load(count, 0, what if kind == "report" else 0.1)
        batch = EngineBatch(ids=ids, token_ids=[[9]] * len(ids), finish=finish, load=report)
        pair.send(BatchReceived(rank, bench.router.ranks.incarnation[rank], batch))
    elif kind == "cancel" and live:
        pair.send(RequestCancelled(live[rest[0] % len(live)].handle, Reason.CANCELLED))
    elif kind == "lose":
        incarnation = bench.router.ranks.incarnation[rest[0]]
        pair.send(RankLost(rest[0], incarnation, "gone"))
        pair.send(RankJoined(rank=rest[0], incarnation=incarnation + 1, info=make_info()))
    elif kind == "unsent" and bench.router._attempts.ledger.live:
        attempts = list(bench.router._attempts.ledger.live.values())
        attempt = attempts[rest[0] % len(attempts)]
        pair.send(SendFailed(attempt.rank, attempt.incarnation, attempt.wire_id, "encode"))
    elif kind == "tick":
        for each in pair.benches:
            each.now += rest[0]
        pair.send(Tick())


@settings(max_examples=40, deadline=None)
@given(config=st.sampled_from(CONFIGS), tokens=st.sampled_from([None, None, 3500]), seed=st.integers(0, 10**6))
def test_both_ways_come_to_the_same(config, tokens, seed):
    pair, random = Pair(config, tokens=tokens), Random(seed)
    for number in range(50):
        apply(pair, number, any_step(random))


def took(bench: Bench, **more: Any) -> bool:
    """Whether a request goes straight, whose parameters have passed before."""
    bench.send(bench.arrived(sampling=GREEDY))
    before = state(bench)
    is_straight = bench.router._straight.take(bench.arrived(**{"sampling": GREEDY} | more), bench.now, [])
    assert is_straight or state(bench) == before
    return is_straight


def test_the_common_request_goes_straight():
    assert took(Bench())
    assert took(Bench(policy={"preset": "predicted"}, predictor={"prefill_ms": "1"}))


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"pinned_rank": 0},
        {"priority": 1},
        {"model": "m"},
        {"prompt": [32000]},
        {"prompt": [-1]},
        {"deadline_at": 100.0},
        {"sampling": WARM},
    ],
)
def test_what_is_not_common_goes_the_general_way(more):
    assert not took(Bench(), **more)


def test_a_prompt_that_is_too_long_for_a_rank_goes_the_general_way():
    info = make_info(max_model_len=50)
    assert took(Bench(info=info), prompt=[7] * 49)
    assert not took(Bench(info=info), prompt=[7] * 50)


def test_a_rank_that_fails_a_filter_sends_everyone_the_general_way():
    bench = Bench(2)
    bench.send(RankLost(1, 1, "gone"))
    assert not took(bench)


@pytest.mark.parametrize(
    "config",
    [
        {"scheduling": {"mode": "queue"}},
        {"ordering": "preserve"},
        {"response_cache": {}},
        {"slo": SLO},
        {"admission": {"max_in_flight": 2}},
        {"admission": {"max_prompt_tokens": 1000}},
        {"admission": {"tenants": {"default": {"max_in_flight": 100}}}},
        {"admission": {"tenants": {"named": {"x": {"max_in_flight": 100}}}}},
    ],
)
def test_what_has_more_to_look_at_goes_the_general_way(config):
    assert not took(Bench(**config))


def test_it_follows_the_settings():
    bench = Bench()
    assert took(bench)
    bench.send(Reconfigured(make_config(4, slo=SLO)))
    assert not took(bench)


def test_a_common_request_passes_every_part_once():
    bench = Bench(failure={"reroute": True, "resume": True})
    bench.finish(bench.request(sampling=GREEDY))
    request = bench.request(sampling=GREEDY)
    assert request.sequences[0].record.token_bytes == 4 * GREEDY.max_tokens
    sent = bench.dispatched[-1]
    assert (sent.rank, sent.incarnation, sent.request.prompt_token_ids) == (request.last_rank, 1, [5, 6, 7])
    effects = bench.batch(request.last_rank, [(request.sequences[0].attempt.wire_id, [7], "stop")])
    assert [type(effect) for effect in effects] == [RequestEnded]
    assert request.error is None
    assert request.is_ended
    assert request.settled_at == request.ended_at == bench.now
    bench.flush()
    bench.assert_quiet()


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_sequence_of_one_token_is_kept_for_no_other_rank(max_tokens):
    bench = Bench(failure={"reroute": True, "resume": True})
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0)
    for _ in range(2):  # the general way, and then the straight one
        request = bench.request(sampling=sampling)
        assert (request.sequences[0].record is None) is (max_tokens == 1)


def test_foreign_load_that_is_over_is_forgotten_before_a_decision():
    pair = Pair({"load": {"foreign_ttl_s": 0.5}})
    arrive = ("arrive", GREEDY, {}, "", None, [5])
    apply(pair, 0, arrive)
    apply(pair, 1, ("rows", pair.benches[0].dispatched[0].rank, 1, "stop"))
    apply(pair, 2, ("report", 1, 4, 0.5))
    for bench in pair.benches:
        bench.now += 1.0
    apply(pair, 3, arrive)
    assert pair.benches[0].router.counters.foreign_expired == 1
