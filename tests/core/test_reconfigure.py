"""Another configuration in the place of the running one: ranks come and go, nothing charged is lost, nothing is renumbered."""

import pytest

from gateway.core.effects import RankRemoved, RankStateChanged
from gateway.core.errors import GatewayError, Reason
from gateway.core.events import RankDrained, RankJoined, RankLost, RankUndrained, SendBlocked, SendFailed
from gateway.core.ranks import RankState
from gateway.core.reconfigure import KEPT, REMOVED, with_leaving_ranks
from tests.support.core import Bench, make_config, make_info, wire_id
from tests.support.reconfigure import finish_all, groups, reconfigure

ABSENT, READY, DRAINING, LOST = (RankState[name] for name in ("ABSENT", "READY", "DRAINING", "LOST"))


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
