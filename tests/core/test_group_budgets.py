"""Budgets of groups: a filter like any other, over sums that the ledger keeps."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config.schema import Filters
from gateway.core.counters import Counters
from gateway.core.eligibility import REASONS, Eligibility
from gateway.core.errors import Reason
from gateway.core.ledger import Ledger
from gateway.core.ranks import RankState, RankTable
from gateway.core.request import Attempt, Request
from tests.support.core import Bench, make_config, make_info


class Fleet:
    """Two groups, ranks 0 to 1 and 2 to 3, with budgets."""

    def __init__(self, first, second=None, ranks=2):
        groups = [
            {"name": name, "protocol": "vllm", "handshake": f"ipc:///{name}", "ranks": ranks, "budget": budget or {}}
            for name, budget in (("a", first), ("b", second))
        ]
        self.table = RankTable(make_config(groups=groups))
        for rank in range(self.table.size):
            self.table.state[rank] = RankState.READY
            self.table.join(rank, 1, make_info())
            self.table.refresh(rank)
        self.ledger = Ledger(self.table, Counters(self.table.size))
        self.eligibility = Eligibility(Filters(), self.table)
        self._bench = Bench(1)
        self._number = 0

    def charge(self, rank, prompt=10, out=5):
        self._number += 1
        request = Request(self._number, self._bench.arrived([1] * prompt, max_tokens=out), now=0.0)
        attempt = Attempt(request.sequences[0], f"id{self._number}", 1, rank, incarnation=1, sent_at=0.0)
        self.ledger.charge(attempt, 0.0)
        return attempt

    def reasons(self, prompt=10, out=5):
        screened = self.eligibility.screen(prompt, out)
        assert self.eligibility.is_everyone(prompt, out) is (set(screened.codes) == {0})
        return [REASONS[code] for code in screened.codes]

    def refusal(self, prompt=10, out=5):
        return self.eligibility.screen(prompt, out).refusal


FULL_A = ["group_full", "group_full", "eligible", "eligible"]


@pytest.mark.parametrize(
    ("budget", "closes"),
    [
        ({"max_requests": 2}, [False, False, True]),
        ({"max_prompt_tokens": 20}, [False, False, True]),
        ({"max_prompt_tokens": 19}, [False, True, True]),
        ({"max_kv_tokens": 30}, [False, False, True]),
        ({"max_kv_tokens": 29}, [False, True, True]),
        ({"max_requests": 9, "max_prompt_tokens": 900, "max_kv_tokens": 29}, [False, True, True]),
        ({}, [False, False, False]),
    ],
)
def test_a_group_takes_what_fits_its_budget_exactly(budget, closes):
    fleet = Fleet(budget)
    for number, is_closed in enumerate(closes):
        assert fleet.reasons() == (FULL_A if is_closed else ["eligible"] * 4), number
        fleet.charge(number % 2)


def test_every_end_makes_room_again():
    fleet = Fleet({"max_requests": 1})
    attempt = fleet.charge(1)
    assert fleet.reasons() == FULL_A
    fleet.ledger.release(attempt, 1.0)
    assert fleet.reasons() == ["eligible"] * 4


def test_a_smaller_request_may_still_fit():
    fleet = Fleet({"max_prompt_tokens": 100})
    fleet.charge(0, prompt=60)
    assert fleet.reasons(prompt=41) == FULL_A
    assert fleet.reasons(prompt=40) == ["eligible"] * 4


def test_tokens_that_may_be_generated_count_for_the_kv_budget_only():
    fleet = Fleet({"max_prompt_tokens": 100, "max_kv_tokens": 300})
    fleet.charge(0, prompt=10, out=190)
    assert fleet.reasons(prompt=10, out=90) == ["eligible"] * 4
    assert fleet.reasons(prompt=10, out=91) == FULL_A


def test_the_groups_are_told_apart():
    fleet = Fleet({"max_requests": 1}, {"max_requests": 2})
    fleet.charge(0)
    fleet.charge(2)
    assert fleet.reasons() == FULL_A
    assert fleet.refusal() is None
    fleet.charge(3)
    assert fleet.reasons() == ["group_full"] * 4
    assert fleet.refusal() is Reason.RANKS_FULL


@pytest.mark.parametrize(
    ("budget", "refusal"),
    [({"max_prompt_tokens": 50}, Reason.PROMPT_TOO_LONG), ({"max_kv_tokens": 55}, Reason.KV_TOO_SMALL)],
)
def test_what_exceeds_a_budget_alone_never_fits(budget, refusal):
    fleet = Fleet(budget, budget)
    assert fleet.reasons(prompt=50) == ["eligible"] * 4
    assert fleet.reasons(prompt=51) == ["group_budget"] * 4
    assert fleet.refusal(prompt=51) is refusal, "waiting would not help"


def test_a_group_without_a_budget_may_take_what_another_never_can():
    fleet = Fleet({"max_prompt_tokens": 50})
    assert fleet.reasons(prompt=51) == ["group_budget", "group_budget", "eligible", "eligible"]
    fleet.table.is_blocked[2] = True
    fleet.table.refresh(2)
    fleet.table.in_flight[3] = fleet.table.max_in_flight[3]
    fleet.table.refresh(3)
    assert fleet.refusal(prompt=51) is Reason.RANKS_FULL


def test_the_strongest_reason_is_shown():
    fleet = Fleet({"max_requests": 1})
    fleet.charge(0)
    table = fleet.table
    table.is_blocked[0] = True
    table.refresh(0)
    assert fleet.reasons()[:2] == ["blocked", "group_full"]
    assert fleet.reasons(prompt=4096)[:2] == ["context_length"] * 2
    table.state[1] = RankState.LOST
    table.refresh(1)
    assert fleet.reasons()[:2] == ["blocked", "lost"]
    table.is_blocked[0], table.in_flight[0] = False, table.max_in_flight[0]
    table.refresh(0)
    assert fleet.reasons()[0] == "group_full", "it says more than full"


def test_a_pin_obeys_the_budget_of_its_own_group():
    fleet = Fleet({"max_requests": 1})
    fleet.charge(0)
    assert fleet.eligibility.screen_pinned(10, 5, 1).refusal is Reason.RANKS_FULL
    assert fleet.eligibility.screen_pinned(10, 5, 2).eligible == [2]


def test_the_router_keeps_to_budgets():
    group = {"name": "g", "protocol": "vllm", "handshake": "ipc:///g", "ranks": 2, "budget": {"max_requests": 3}}
    bench = Bench(groups=[group])
    requests = [bench.request() for _ in range(3)]
    with pytest.raises(Exception, match="at its limit") as caught:
        bench.request()
    assert caught.value.reason is Reason.RANKS_FULL
    bench.finish(requests[1])
    bench.request()


LIMITS = st.sampled_from([None, 1, 3, 40, 100])


@settings(deadline=None)
@given(
    st.fixed_dictionaries(dict.fromkeys(("max_requests", "max_prompt_tokens", "max_kv_tokens"), LIMITS)),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50), st.integers(1, 50), st.booleans()), max_size=20),
)
def test_no_group_is_ever_over_its_budget(budget, requests):
    fleet = Fleet(budget, {"max_requests": 2})
    table = fleet.table
    live = []
    for rank, prompt, out, ends_one in requests:
        reasons = fleet.reasons(prompt, out)
        assert all(left == right for left, right in (reasons[:2], reasons[2:]))
        if reasons[rank] == "eligible":
            live.append(fleet.charge(rank, prompt, out))
        if ends_one and live:
            fleet.ledger.release(live.pop(0), 0.0)
        fleet.ledger.check()
        sums = {
            "max_requests": table.group_in_flight,
            "max_prompt_tokens": table.group_prompt_tokens,
            "max_kv_tokens": table.group_kv_tokens,
        }
        assert all(limit is None or sums[name][0] <= limit for name, limit in budget.items())
        assert table.group_in_flight[1] <= 2


def test_reasons_are_in_order_of_strength_for_groups_too():
    order = ["kv_fit", "full", "group_full", "blocked", "kv_capacity", "group_budget", "context_length"]
    assert all(REASONS.index(weaker) < REASONS.index(stronger) for weaker, stronger in pairwise(order))
