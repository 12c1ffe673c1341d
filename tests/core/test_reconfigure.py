"""Another configuration in the place of the running one, with work in flight: nothing charged is lost, nothing is renumbered."""

import random

import pytest

from gateway.core.effects import RankRemoved, RankStateChanged
from gateway.core.errors import GatewayError, Reason
from gateway.core.events import RankDrained, RankJoined, RankLost, RankUndrained, Reconfigured, SendBlocked, SendFailed
from gateway.core.ranks import RankState
from gateway.core.reconfigure import KEPT, REMOVED, with_leaving_ranks
from tests.support.core import Bench, load, make_config, make_info, wire_id

ABSENT, READY, DRAINING, LOST = (RankState[name] for name in ("ABSENT", "READY", "DRAINING", "LOST"))
FAR = {"max_wait_s": None}


def reconfigure(bench, ranks=None, **overrides):
    """Put another configuration in force; `Bench.send` checks every invariant right after it."""
    bench.config = make_config(bench.router.ranks.size if ranks is None else ranks, **overrides)
    return bench.send(Reconfigured(bench.config))


def groups(*sizes, **settings):
    return [
        {"name": f"g{number}", "protocol": "vllm", "handshake": f"tcp://127.0.0.1:{30500 + number}", "ranks": size}
        | settings
        for number, size in enumerate(sizes)
    ]


def finish_all(bench, requests):
    """Whatever order they go to ranks in."""
    while waiting := [request for request in requests if not request.is_settled]:
        at_ranks = [request for request in waiting if all(each.attempt is not None for each in request.sequences)]
        assert at_ranks, "nothing goes to any rank"
        bench.finish(at_ranks[0])
    bench.tick(0.1)
    bench.assert_quiet()


# ---- ranks -----------------------------------------------------------------------------------------


def test_added_ranks_are_absent_until_they_dial_and_the_others_go_on():
    bench = Bench(2)
    requests = [bench.request() for _ in range(4)]
    before = list(bench.router.ranks.own_tokens)
    assert reconfigure(bench, 4) == []
    table = bench.router.ranks
    assert table.state == [READY, READY, ABSENT, ABSENT]
    assert (table.incarnation, table.in_flight) == ([1, 1, 0, 0], [2, 2, 0, 0])
    assert table.own_tokens == [*before, 0, 0]
    with pytest.raises(GatewayError) as refused:
        bench.request(pinned_rank=3)
    assert refused.value.reason is Reason.PINNED_RANK_UNAVAILABLE
    bench.join(2)
    bench.join(3)
    requests += [bench.request() for _ in range(4)]
    assert table.in_flight == [2, 2, 2, 2]
    assert [view.rank for view in bench.router.rank_views(bench.now)] == [0, 1, 2, 3]
    finish_all(bench, requests)


def test_removed_ranks_end_what_they_have_and_are_gone_then():
    bench = Bench(3)
    requests = [bench.request() for _ in range(6)]
    effects = reconfigure(bench, 1)
    assert [(each.rank, each.new, each.cause) for each in effects] == [
        (1, "DRAINING", REMOVED),
        (2, "DRAINING", REMOVED),
    ]
    table = bench.router.ranks
    assert table.in_flight == [2, 2, 2]
    # They get nothing new, and a pin on them is refused.
    bench.finish(bench.request())
    assert bench.sent[-1] == 0
    assert isinstance(bench.offer(pinned_rank=2), GatewayError)
    for request in requests:
        if request.last_rank == 2:
            bench.finish(request)
    effects = bench.tick(0.1)
    assert [each.rank for each in effects if isinstance(each, RankRemoved)] == [2]
    assert (table.size, table.state) == (3, [READY, DRAINING, ABSENT]), "numbers before it are still in use"
    for request in requests:
        if request.last_rank == 1:
            bench.finish(request)
    effects = bench.tick(0.1)
    assert [each.rank for each in effects if isinstance(each, RankRemoved)] == [1]
    assert (table.size, table.state, table.in_flight) == (1, [READY], [2])
    refused = bench.offer(pinned_rank=1)
    assert refused.reason is Reason.INVALID_RANK
    finish_all(bench, requests)
    assert all(request.error is None for request in requests)


def test_ranks_that_have_nothing_are_gone_at_once_whatever_their_state():
    bench = Bench(4, join=False)
    for rank in (0, 1, 2):
        bench.join(rank)
    bench.lose(1)
    bench.send(RankDrained(2))
    effects = reconfigure(bench, 1)
    assert [each.rank for each in effects if isinstance(each, RankRemoved)] == [1, 2, 3]
    assert bench.router.ranks.size == 1
    assert len(bench.router.counters.decisions) == len(bench.router.counters.tokens) == 1


def test_a_rank_that_is_wanted_again_before_it_is_gone_goes_on():
    bench = Bench(3)
    requests = [bench.request() for _ in range(3)]
    bench.send(RankDrained(1))
    reconfigure(bench, 1)
    assert bench.router.ranks.state == [READY, DRAINING, DRAINING]
    effects = reconfigure(bench, 3)
    assert [(each.rank, each.new, each.cause) for each in effects] == [(2, "READY", KEPT)]
    assert bench.router.ranks.state == [READY, DRAINING, READY], "an operator drained rank 1"
    assert bench.router.ranks.incarnation == [1, 1, 1]
    bench.send(RankUndrained(1))
    finish_all(bench, requests)


def test_a_number_that_is_used_again_starts_anew():
    bench = Bench(3)
    held = bench.request(pinned_rank=1)
    reconfigure(bench, 1)
    assert bench.router.ranks.state == [READY, DRAINING, ABSENT]
    reconfigure(bench, 3)
    assert bench.router.ranks.state == [READY, READY, ABSENT]
    bench.send(RankJoined(rank=2, incarnation=1, info=make_info(max_num_seqs=2)))
    assert bench.router.ranks.max_in_flight[2] == 8
    finish_all(bench, [held, *(bench.request(pinned_rank=2) for _ in range(2))])


def test_a_leaving_rank_that_dials_anew_or_is_undrained_gets_no_work():
    bench = Bench(2)
    held = bench.request(pinned_rank=1)
    reconfigure(bench, 1)
    bench.send(RankUndrained(1))
    bench.tick(0.1)
    assert bench.router.ranks.state == [READY, DRAINING]
    bench.join(1)
    assert held.is_settled
    bench.tick(0.1)
    assert bench.router.ranks.size == 1
    bench.assert_quiet()


def test_a_gone_rank_that_joins_all_the_same_is_taken_out_again():
    bench = Bench(3)
    held = bench.request(pinned_rank=1)
    reconfigure(bench, 1)
    assert bench.router.ranks.state == [READY, DRAINING, ABSENT]
    effects = bench.send(RankJoined(rank=2, incarnation=2, info=make_info()))
    assert [each.new for each in effects if isinstance(each, RankStateChanged)] == ["READY", "DRAINING", "ABSENT"]
    assert [each.rank for each in effects if isinstance(each, RankRemoved)] == [2]
    assert bench.router.ranks.size == 3
    bench.finish(held)
    bench.tick(0.1)
    assert bench.router.ranks.size == 1


def test_last_words_of_a_rank_that_is_gone_are_nothing():
    bench = Bench(2)
    request = bench.request(pinned_rank=1)
    late = wire_id(request)
    bench.finish(request)
    reconfigure(bench, 1)
    assert bench.router.ranks.size == 1
    before = bench.router.counters.stale_events
    for event in (RankLost(1, 1, "gone"), SendBlocked(1, 1), SendFailed(1, 1, late, "gone"), RankDrained(1)):
        assert bench.send(event) == []
    assert bench.router.counters.stale_events == before + 4


def test_queued_requests_that_are_pinned_to_a_removed_rank_end():
    bench = Bench(2, scheduling={"mode": "queue", "queue": {"max_in_flight_per_rank": 1}})
    first, second = bench.request(pinned_rank=1), bench.request(pinned_rank=1)
    effects = reconfigure(bench, 1, scheduling={"mode": "queue", "queue": {"max_in_flight_per_rank": 1}})
    assert effects
    assert second.error is not None
    assert second.error.reason is Reason.RANK_LOST
    assert first.error is None
    finish_all(bench, [first])


def test_groups_come_and_go_at_the_end_and_readiness_follows():
    bench = Bench(groups=groups(2))
    assert bench.router.why_not_ready() is None
    reconfigure(bench, groups=groups(2, 2))
    assert "group g1: 0 of 2" in str(bench.router.why_not_ready())
    bench.join(2)
    assert bench.router.why_not_ready() is None
    held = bench.request(pinned_rank=2)
    reconfigure(bench, groups=groups(2, min_ready=2))
    assert bench.router.why_not_ready() is None, "a group on its way out is not waited for"
    assert [group.name for group in bench.router.layout.groups] == ["g0", "g1"]
    bench.lose(1)
    assert bench.router.why_not_ready() is not None
    finish_all(bench, [held])
    assert [group.name for group in bench.router.layout.groups] == ["g0"]
    assert bench.router.ranks.group_names == ["g0"]


def test_coupling_is_live():
    bench = Bench(groups=groups(2))
    reconfigure(bench, groups=groups(2, coupled=True))
    bench.lose(0)
    assert bench.router.ranks.state == [LOST, LOST]


def test_leaving_ranks_keep_their_places_in_the_layout():
    before, after = make_config(groups=groups(2, 3)), make_config(groups=groups(1))
    layout = with_leaving_ranks(after, before)
    assert [(group.name, group.ranks, group.min_ready) for group in layout.groups] == [("g0", 2, 1), ("g1", 3, 0)]
    assert with_leaving_ranks(before, after) == before


# ---- charges survive -------------------------------------------------------------------------------


def test_budgets_of_groups_count_what_was_in_flight_before_there_were_any():
    bench = Bench(groups=groups(2))
    requests = [bench.request([5] * 10, max_tokens=6) for _ in range(3)]
    assert bench.router.ranks.group_kv_tokens == [0]
    budget = {"max_requests": 3, "max_kv_tokens": 1000}
    reconfigure(bench, groups=groups(2, budget=budget))
    table = bench.router.ranks
    assert (table.group_in_flight, table.group_prompt_tokens, table.group_kv_tokens) == ([3], [30], [48])
    assert bench.offer().reason is Reason.RANKS_FULL
    reconfigure(bench, groups=groups(2))
    assert (table.group_in_flight, table.group_kv_tokens) == ([0], [0])
    requests.append(bench.request())
    reconfigure(bench, groups=groups(2, budget=budget))
    finish_all(bench, requests)
    assert (table.group_in_flight, table.group_prompt_tokens, table.group_kv_tokens) == ([0], [0], [0])


def test_token_budgets_count_what_was_accepted_before_there_were_any():
    bench = Bench(2)
    requests = [bench.request([5] * 100, max_tokens=10, tenant="a") for _ in range(3)]
    reconfigure(bench, admission={"max_prompt_tokens": 399})
    assert bench.router._admission.prompt_tokens == 300
    refused = bench.offer([5] * 100)
    assert (refused.reason, refused.facts["in_flight"]) == (Reason.GATEWAY_FULL, 300)
    requests.append(bench.request([5] * 99))
    reconfigure(bench)
    assert bench.router._admission.prompt_tokens == 0
    reconfigure(bench, admission={"max_kv_tokens": 10_000})
    assert bench.router._admission.kv_tokens == 3 * 110 + 99 + 16
    finish_all(bench, requests)


def test_a_smaller_limit_ends_nothing_and_lets_nothing_in():
    bench = Bench(2)
    requests = [bench.request() for _ in range(6)]
    reconfigure(bench, admission={"max_in_flight": 4, "max_in_flight_per_rank": 2})
    assert bench.offer().reason is Reason.GATEWAY_FULL
    bench.finish(requests[0])
    bench.finish(requests[1])
    assert bench.offer().reason is Reason.GATEWAY_FULL
    bench.finish(requests[2])
    assert bench.router.ranks.max_in_flight == [2, 2]
    reconfigure(bench)
    assert bench.router.ranks.max_in_flight == [1024, 1024]
    finish_all(bench, requests)


def test_tenants_keep_what_is_charged_to_them():
    named = {"tenants": {"named": {"a": {"max_in_flight": 3}, "b": {}}, "active_s": 1.0}}
    bench = Bench(2, admission=named)
    requests = [bench.request(tenant=name) for name in ("a", "a", "b", "c", "")]
    # `a` goes on with its two, `c` is named now, `b` is not any more.
    other = {
        "tenants": {"named": {"a": {"max_in_flight": 2}, "c": {"max_in_flight": 1, "weight": 4.0}}, "active_s": 1.0}
    }
    reconfigure(bench, admission=other)
    assert bench.offer(tenant="a").reason is Reason.TENANT_LIMIT
    assert bench.offer(tenant="c").reason is Reason.TENANT_LIMIT
    requests.append(bench.request(tenant="b"))
    tenants = bench.router._admission.tenants
    assert {account.name: account.in_flight for account in tenants.active()} == {"a": 2, "b": 2, "c": 1, "": 1}
    assert tenants._active_units == sum(account.weight_units for account in tenants.active())
    assert sorted(account.name for account in tenants.named) == ["", "a", "c"]
    finish_all(bench, requests)
    bench.tick(10.0)
    bench.router._admission.tenants.account("x", bench.now)
    assert list(tenants._tracked) == ["x"], "b is nobody's any more"


# ---- settings --------------------------------------------------------------------------------------


def test_the_policy_changes_and_its_counts_go_on():
    bench = Bench(2, policy={"preset": None, "cost": "1 / in_flight"})
    requests = [bench.request() for _ in range(2)]
    faults = bench.router.counters.non_finite_costs
    assert faults > 0
    reconfigure(bench, policy={"preset": "round_robin"})
    requests += [bench.request() for _ in range(4)]
    assert bench.sent[2:] in ([0, 1, 0, 1], [1, 0, 1, 0])
    reconfigure(bench, policy={"preset": None, "cost": "1 / (in_flight - in_flight)"})
    requests.append(bench.request())
    assert bench.router.counters.non_finite_costs == faults + 2
    assert bench.router.decisions.latest(1)[0].formula == "1 / (in_flight - in_flight)"
    finish_all(bench, requests)


@pytest.mark.parametrize(
    "bad", [{"policy": {"preset": None, "cost": "in_flight +"}}, {"predictor": {"prefill_ms": "nonsense"}}]
)
def test_a_formula_that_cant_be_used_changes_nothing(bad):
    bench = Bench(2)
    requests = [bench.request() for _ in range(2)]
    layout, resolved = bench.router.layout, bench.router._parts.policy.resolved
    with pytest.raises(ValueError):
        bench.router.handle(Reconfigured(make_config(1, admission={"max_in_flight": 1}, **bad)), bench.now)
    assert (bench.router.layout, bench.router._parts.policy.resolved) == (layout, resolved)
    bench.router.check()
    assert bench.router.ranks.state == [READY, READY]
    finish_all(bench, [*requests, bench.request()])


def test_filters_change_at_once():
    bench = Bench(2)
    request = bench.request(pinned_rank=0)
    bench.batch(0, [(wire_id(request), [9])], load(1, 0, 0.9))
    assert bench.router.ranks.over_kv_count == 0
    reconfigure(bench, filters={"max_kv_usage": 0.5})
    assert bench.router.ranks.over_kv_count == 1
    reconfigure(bench, filters={"max_kv_usage": None})
    assert bench.router.ranks.over_kv_count == 0
    finish_all(bench, [request])


def test_the_predictor_comes_and_goes_with_work_in_flight():
    bench = Bench(2)
    first = bench.request([5] * 50)
    reconfigure(bench, predictor={"prefill_ms": "2 * total_new_tokens", "calibrate": True})
    assert bench.router.predictor.prefill_us(10) == 20_000
    second = bench.request([5] * 50)
    bench.now += 0.05
    bench.batch(first.last_rank, [(wire_id(first), [9])])
    bench.batch(second.last_rank, [(wire_id(second), [9])])
    learnt = bench.router.predictor._calibration
    reconfigure(bench, predictor={"prefill_ms": "2 * total_new_tokens", "calibrate": True, "mean_out_tokens": 3})
    assert bench.router.predictor._calibration is learnt, "the formula is the same"
    reconfigure(bench)
    assert not bench.router.predictor.has_model
    finish_all(bench, [first, second])


def test_limits_hold_for_what_comes_next():
    bench = Bench(1)
    old = bench.request(n=4)
    reconfigure(bench, limits={"max_n": 2, "max_request_age_s": 5.0})
    assert bench.offer(n=3).reason is Reason.INVALID_REQUEST
    bench.tick(6.0)
    assert old.error is not None
    assert old.error.reason is Reason.MAX_AGE_EXCEEDED
    request = bench.request(max_tokens=4000)
    reconfigure(bench, limits={"max_stream_buffer_bytes": 64})
    for _ in range(2):
        bench.batch(0, [(wire_id(request), list(range(100)))])
    assert request.error is not None
    assert request.error.reason is Reason.SLOW_READER
    bench.tick(2.0)
    bench.assert_quiet()


def test_failure_settings_are_live():
    bench = Bench(2)
    reconfigure(bench, failure={"reroute": True})
    request = bench.request(pinned_rank=None)
    bench.lose(request.last_rank)
    assert not request.is_settled
    finish_all(bench, [request])


def test_a_gateway_more_scales_what_is_its_own():
    bench = Bench(1, predictor={"prefill_ms": "2 * total_new_tokens"})
    request = bench.request([5] * 50)
    assert bench.router.ranks.head_credit_us == [100_000]
    reconfigure(bench, gateways=2, predictor={"prefill_ms": "2 * total_new_tokens"})
    assert bench.router.ranks.head_credit_us == [0]
    finish_all(bench, [request])


# ---- the queue -------------------------------------------------------------------------------------


def queued(order="fcfs", **settings):
    return {"mode": "queue", "queue": {"order": order, "max_in_flight_per_rank": 1} | FAR | settings}


def test_what_waits_is_served_in_the_new_order():
    bench = Bench(1, scheduling=queued())
    blocker = bench.request()
    long, short = bench.request([5] * 200), bench.request([5] * 20)
    reconfigure(bench, scheduling=queued("spf"))
    bench.finish(blocker)
    assert bench.dispatched[-1].request.prompt_token_ids == [5] * 20
    reconfigure(bench, scheduling=queued("hrrn", fair=False))
    finish_all(bench, [short, long])


def test_a_wider_gate_lets_go_at_once():
    bench = Bench(1, scheduling=queued())
    requests = [bench.request() for _ in range(4)]
    assert bench.router.queue_depth == 3
    reconfigure(bench, scheduling=queued(max_in_flight_per_rank=3))
    assert bench.router.queue_depth == 1
    finish_all(bench, requests)


def test_time_outs_stay_those_that_a_request_came_with():
    bench = Bench(1, scheduling=queued(timeout_s=1.0, timeout_action="delay"))
    blocker = bench.request()
    early = bench.request()
    bench.tick(1.5)  # delayed by now
    late = bench.request()
    reconfigure(bench, scheduling=queued(timeout_s=100.0))
    after = bench.request()
    bench.tick(1.5)
    assert late.error is not None, "it came with one second, and they are refused now"
    assert late.error.reason is Reason.QUEUE_TIMEOUT
    bench.finish(blocker)
    assert bench.dispatched[-1].request.wire_id == wire_id(after), "what was delayed stays behind"
    finish_all(bench, [after, early])


def test_fairness_can_be_switched_under_a_backlog():
    bench = Bench(1, scheduling=queued())
    requests = [bench.request(tenant=name) for name in "aaaab"]
    reconfigure(bench, scheduling=queued(fair=False))
    requests.append(bench.request(tenant="c"))
    bench.finish(requests[0])
    assert bench.dispatched[-1].request.wire_id == wire_id(requests[1])
    reconfigure(bench, scheduling=queued(fair=True))
    finish_all(bench, requests)


def test_batches_in_flight_are_those_of_before():
    def settings(**batch):
        return {"mode": "batch", "queue": {"max_in_flight_per_rank": 8}, "batch": {"window_ms": 0.0} | batch}

    bench = Bench(2, scheduling=settings(max_in_flight_batches=1, release_at="finish"))
    requests = [bench.request() for _ in range(4)]
    assert bench.router.queue_depth == 2
    bench.batch(requests[0].last_rank, [(wire_id(requests[0]), [9])])
    reconfigure(bench, 3, scheduling=settings(max_in_flight_batches=1, release_at="first_token"))
    assert bench.router.queue_depth == 2
    bench.join(2)
    assert bench.router.queue_depth == 0, "both fit one batch of the new rank"
    reconfigure(bench, 1, scheduling=settings(max_in_flight_batches=2))
    finish_all(bench, requests)


# ---- at random -------------------------------------------------------------------------------------


ORDERED = {"ordering": "preserve", "limits": {"default_deadline_s": 60.0}, "response_cache": {"coalesce": True}}


def some_config(draw, mode):
    """A configuration that the running one can become: the mode stays."""
    queue = {
        "order": draw.choice(["fcfs", "aging", "hrrn", "spf", "edf"]),
        "fair": draw.random() < 0.5,
        "max_in_flight_per_rank": draw.choice([1, 2, 8]),
        "timeout_s": draw.choice([None, 0.5, 3.0]),
        "timeout_action": draw.choice(["reject", "delay"]),
        "levels": draw.choice([[], [{"priority": 1, "max_depth": 3}]]),
    }
    batch = {"max_in_flight_batches": draw.choice([1, 2]), "release_at": draw.choice(["first_token", "finish"])}
    return {
        "policy": {"preset": draw.choice(["lmetric", "p2c", "round_robin", "smg", "least_in_flight"])},
        "groups": groups(*draw.choice([(2,), (3,), (2, 2), (2, 1)]), coupled=draw.random() < 0.3)
        if draw.random() < 0.5
        else groups(2, budget=draw.choice([{}, {"max_kv_tokens": 300}, {"max_requests": 4}])),
        "predictor": draw.choice([None, {"prefill_ms": "total_new_tokens"}]),
        "filters": {"max_kv_usage": draw.choice([None, 0.5])},
        "gateways": draw.choice([1, 2]),
        "failure": {"reroute": draw.random() < 0.5, "resume": draw.random() < 0.5},
        "admission": {
            "max_in_flight": draw.choice([4, 100]),
            "max_prompt_tokens": draw.choice([None, 60]),
            "tenants": {"named": draw.choice([{}, {"a": {"weight": 3.0}}, {"b": {"max_in_flight": 2}}])},
        },
        "scheduling": {"mode": mode} | ({} if mode == "direct" else {"queue": queue, "batch": batch}),
    }


def fits(bench, wanted):
    """What `gateway.config.changes` would let through: here, only the end of the list of ranks changes."""
    old = [(group.name, index) for group in bench.router.layout.groups for index in range(group.ranks)]
    new = [(group.name, index) for group in wanted.groups for index in range(group.ranks)]
    shorter = min(len(old), len(new))
    return old[:shorter] == new[:shorter]


@pytest.mark.parametrize("mode", ["direct", "queue", "batch"])
@pytest.mark.parametrize("seed", range(8))
def test_any_change_at_any_time_keeps_every_charge(mode, seed):
    draw = random.Random(f"{mode}-{seed}")
    fixed = ORDERED if seed % 2 else {}
    bench = Bench(groups=groups(2), scheduling={"mode": mode}, **fixed)
    live, changes = [], 0
    for _ in range(150):
        live = [request for request in live if not request.is_settled]
        table = bench.router.ranks
        step = draw.random()
        if step < 0.45:
            pin = draw.choice([None, None, draw.randrange(table.size)])
            found = bench.offer(
                [5] * draw.randint(1, 30), n=draw.choice([1, 2]), tenant=draw.choice("abc"), pinned_rank=pin,
                priority=draw.choice([0, 1]),
            )  # fmt: skip
            if not isinstance(found, GatewayError):
                live.append(found)
        elif step < 0.65 and live:
            for sequence in draw.choice(live).sequences:
                attempt = sequence.attempt
                if attempt is not None and not attempt.released:
                    bench.batch(attempt.rank, [(attempt.wire_id, [9], "length")])
        elif step < 0.72 and live:
            request = draw.choice(live)
            attempt = request.sequences[0].attempt
            if attempt is not None and not attempt.released:
                bench.batch(attempt.rank, [(attempt.wire_id, [7])], load(1, 0, draw.random()))
        elif step < 0.75 and live:
            bench.cancel(draw.choice(live), Reason.CANCELLED)
        elif step < 0.80:
            rank = draw.randrange(table.size)
            bench.send(draw.choice([RankDrained(rank), RankUndrained(rank)]))
        elif step < 0.85:
            rank = draw.randrange(table.size)
            if table.state[rank] in (ABSENT, LOST):
                bench.join(rank)
            elif draw.random() < 0.3:
                bench.lose(rank)
        elif step < 0.95:
            wanted = some_config(draw, mode) | fixed
            if fits(bench, make_config(**wanted)):
                changes += 1
                reconfigure(bench, **wanted)
        else:
            bench.tick(draw.choice([0.05, 0.7]))
    assert changes > 3
    for request in live:
        if not request.is_settled:
            bench.cancel(request, Reason.CANCELLED)
    bench.tick(0.1)
    bench.assert_quiet()
