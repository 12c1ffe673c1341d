"""Filters: which rank passes, the reason that each other shows, what is relaxed, what is refused."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config.schema import Filters
from gateway.core.eligibility import REASONS, Eligibility
from gateway.core.errors import Reason
from gateway.core.ranks import RankState
from gateway.types import RankInfo
from tests.support.policies import charge, join, make_table, report


def reasons(screened):
    return [REASONS[code] for code in screened.codes]


def screen(table, prompt_tokens=100, filters=None):
    return Eligibility(filters or Filters(), table).screen(prompt_tokens, 1)


def set_state(table, rank, state):
    table.state[rank] = state
    table.refresh(rank)


def block(table, rank):
    table.is_blocked[rank] = True
    table.refresh(rank)


def test_each_filter_shows_its_reason():
    table = make_table(9, max_in_flight_per_rank=2)
    set_state(table, 1, RankState.ABSENT)
    set_state(table, 2, RankState.LOST)
    block(table, 3)
    charge(table, 4)
    charge(table, 4)
    join(table, 5, RankInfo(max_model_len=100, kv_capacity_tokens=200_000))
    join(table, 6, RankInfo(max_model_len=32768, kv_capacity_tokens=100))
    charge(table, 7, prompt_tokens=199_950)
    charge(table, 8)
    report(table, 8, kv=0.96)
    screened = screen(table, 100)
    assert reasons(screened) == [
        "eligible",
        "absent",
        "lost",
        "blocked",
        "full",
        "context_length",
        "kv_capacity",
        "kv_fit",
        "kv_usage",
    ]
    assert screened.eligible == [0]
    assert screened.relaxed == ()
    assert screened.refusal is None


@pytest.mark.parametrize(("prompt", "fits"), [(98, True), (99, True), (100, False)])
def test_context_leaves_room_for_one_token(prompt, fits):
    table = make_table(1, info=RankInfo(max_model_len=100))
    assert (screen(table, prompt).refusal is None) is fits
    assert Eligibility(Filters(), table).is_everyone(prompt, 1) is fits


def test_an_unknown_context_length_is_no_limit():
    table = make_table(1, info=RankInfo(max_model_len=0))
    assert screen(table, 10**6).eligible == [0]


@pytest.mark.parametrize("kv_fit", ["hard", "soft", "off"])
def test_capacity_is_hard_always(kv_fit):
    table = make_table(1, info=RankInfo(max_model_len=32768, kv_capacity_tokens=1000))
    filters = Filters(kv_fit=kv_fit)
    assert screen(table, 999, filters).eligible == [0]
    assert screen(table, 1000, filters).refusal is Reason.KV_TOO_SMALL
    assert Eligibility(filters, table).is_everyone(999, 1)
    assert not Eligibility(filters, table).is_everyone(1000, 1)


def test_fit_uses_the_larger_of_report_and_own_tokens():
    table = make_table(2, info=RankInfo(max_model_len=32768, kv_capacity_tokens=1000))
    charge(table, 0, prompt_tokens=10)
    report(table, 0, kv=0.6)
    charge(table, 1, prompt_tokens=700)
    report(table, 1, kv=0.1)
    assert screen(table, 300).eligible == [0, 1]
    assert reasons(screen(table, 301)) == ["eligible", "kv_fit"]
    assert reasons(screen(table, 401)) == ["kv_fit", "kv_fit"]
    assert screen(table, 401).refusal is Reason.KV_FULL


def test_soft_fit_is_relaxed_after_kv_usage():
    table = make_table(3, info=RankInfo(max_model_len=32768, kv_capacity_tokens=1000))
    filters = Filters(kv_fit="soft", max_kv_usage=0.95)
    charge(table, 0)
    report(table, 0, kv=0.97)
    charge(table, 1)
    report(table, 1, kv=0.9)
    charge(table, 2)
    report(table, 2, kv=0.5)
    assert screen(table, 10, filters).eligible == [1, 2]
    for rank in (1, 2):
        block(table, rank)
    screened = screen(table, 10, filters)
    assert screened.eligible == [0]
    assert screened.relaxed == ("kv_usage",)
    assert reasons(screened) == ["eligible", "blocked", "blocked"]
    screened = screen(table, 500, filters)
    assert screened.eligible == [0]
    assert screened.relaxed == ("kv_fit",)


def test_both_soft_filters_can_be_relaxed_together():
    table = make_table(2, info=RankInfo(max_model_len=32768, kv_capacity_tokens=1000))
    filters = Filters(kv_fit="soft")
    charge(table, 0)
    report(table, 0, kv=0.99)
    charge(table, 1)
    report(table, 1, kv=0.99)
    table.free_kv_tokens[1] = 500
    screened = screen(table, 100, filters)
    assert (screened.eligible, screened.relaxed) == ([1], ("kv_usage",))
    table.free_kv_tokens[1] = 50
    screened = screen(table, 100, filters)
    assert (screened.eligible, screened.relaxed) == ([0, 1], ("kv_fit",))


def test_off_ignores_free_tokens():
    table = make_table(1, info=RankInfo(max_model_len=32768, kv_capacity_tokens=1000))
    charge(table, 0, prompt_tokens=950)
    filters = Filters(kv_fit="off")
    assert screen(table, 500, filters).eligible == [0]
    assert Eligibility(filters, table).is_everyone(500, 1)
    assert screen(table, 500).refusal is Reason.KV_FULL


def test_an_idle_rank_passes_with_a_full_last_snapshot():
    table = make_table(2)
    report(table, 0, kv=0.98)
    charge(table, 1)
    report(table, 1, kv=0.97)
    screened = screen(table)
    assert reasons(screened) == ["eligible", "kv_usage"]
    assert screen(table, filters=Filters(max_kv_usage=0.95)).eligible == [0]


def test_no_usage_limit():
    filters = Filters(max_kv_usage=None)
    table = make_table(1, filters=filters)
    charge(table, 0)
    report(table, 0, kv=0.999)
    assert screen(table, filters=filters).relaxed == ()
    assert screen(table, filters=filters).eligible == [0]


def lose(table, rank):
    set_state(table, rank, RankState.LOST)


def fill(table, rank):
    table.in_flight[rank] = table.max_in_flight[rank]
    table.refresh(rank)


def eat_kv(table, rank):
    charge(table, rank, prompt_tokens=200_000)


def shrink(table, rank):
    join(table, rank, RankInfo(max_model_len=50))


def shrink_kv(table, rank):
    join(table, rank, RankInfo(max_model_len=32768, kv_capacity_tokens=100))


@pytest.mark.parametrize(
    ("spoilers", "refusal"),
    [
        ((lose, lose, lose), Reason.NO_ELIGIBLE_RANK),
        ((shrink, shrink, shrink), Reason.PROMPT_TOO_LONG),
        ((shrink, shrink, shrink_kv), Reason.PROMPT_TOO_LONG),
        ((shrink_kv, shrink_kv, shrink_kv), Reason.KV_TOO_SMALL),
        ((shrink, lose, lose), Reason.NO_ELIGIBLE_RANK),
        ((shrink_kv, shrink_kv, lose), Reason.NO_ELIGIBLE_RANK),
        ((shrink_kv, shrink_kv, fill), Reason.RANKS_FULL),
        ((shrink, fill, lose), Reason.RANKS_FULL),
        ((fill, fill, lose), Reason.RANKS_FULL),
        ((block, lose, lose), Reason.RANKS_FULL),
        ((eat_kv, lose, lose), Reason.KV_FULL),
        ((eat_kv, fill, shrink), Reason.KV_FULL),
    ],
)
def test_refusal(spoilers, refusal):
    table = make_table(3)
    for rank, spoil in enumerate(spoilers):
        spoil(table, rank)
    screened = screen(table)
    assert screened.eligible == []
    assert screened.refusal is refusal


@pytest.mark.parametrize(
    ("spoil", "reason", "refusal"),
    [
        (lose, "lost", Reason.PINNED_RANK_UNAVAILABLE),
        (fill, "full", Reason.RANKS_FULL),
        (block, "blocked", Reason.RANKS_FULL),
        (shrink, "context_length", Reason.PROMPT_TOO_LONG),
        (shrink_kv, "kv_capacity", Reason.KV_TOO_SMALL),
        (eat_kv, "kv_fit", Reason.KV_FULL),
    ],
)
@pytest.mark.parametrize("size", [1, 3])
def test_refusal_of_a_pin(spoil, reason, refusal, size):
    table = make_table(size)
    spoil(table, size - 1)
    screened = Eligibility(Filters(), table).screen_pinned(100, 1, size - 1)
    assert reasons(screened) == ["not_pinned"] * (size - 1) + [reason]
    assert (screened.eligible, screened.refusal) == ([], refusal)


def test_a_pin_to_a_rank_over_its_kv_usage_is_honoured():
    table = make_table(2)
    charge(table, 1)
    report(table, 1, kv=0.99)
    screened = Eligibility(Filters(), table).screen_pinned(100, 1, 1)
    assert (screened.eligible, screened.relaxed) == ([1], ("kv_usage",))


@st.composite
def any_table(draw):
    table = make_table(draw(st.integers(1, 6)), max_in_flight_per_rank=4)
    for rank in range(table.size):
        join(
            table,
            rank,
            RankInfo(
                max_model_len=draw(st.sampled_from([0, 50, 100, 5000])),
                kv_capacity_tokens=draw(st.sampled_from([None, 100, 1000, 5000])),
            ),
        )
        table.in_flight[rank] = draw(st.integers(0, 5))
        table.own_tokens[rank] = draw(st.sampled_from([0, 0, 30, 900, 6000]))
        table.is_blocked[rank] = draw(st.integers(0, 5)) == 0
        table.state[rank] = draw(st.sampled_from([RankState.READY] * 4 + [RankState.LOST, RankState.ABSENT]))
        report(table, rank, kv=draw(st.sampled_from([0.0, 0.5, 0.95, 0.96, 1.0])))
    return table


def passes_hard(table, rank, prompt, kv_fit):
    capacity = table.kv_capacity_tokens[rank]
    used = max(table.kv_usage[rank] * capacity, table.own_tokens[rank]) if table.in_flight[rank] else 0
    return (
        table.state[rank] is RankState.READY
        and not table.is_blocked[rank]
        and table.in_flight[rank] < table.max_in_flight[rank]
        and (table.max_model_len[rank] == 0 or prompt + 1 <= table.max_model_len[rank])
        and prompt < capacity
        and (kv_fit != "hard" or capacity == math.inf or prompt <= capacity - used)
    )


@settings(deadline=None)
@given(any_table(), st.sampled_from([1, 49, 50, 99, 100, 500]), st.sampled_from(["hard", "soft", "off"]))
def test_nothing_ineligible_gets_through(table, prompt, kv_fit):
    eligibility = Eligibility(Filters(kv_fit=kv_fit), table)
    screened = eligibility.screen(prompt, 1)
    able = [rank for rank in range(table.size) if passes_hard(table, rank, prompt, kv_fit)]
    assert set(screened.eligible) <= set(able)
    assert bool(screened.eligible) == bool(able)
    assert (screened.refusal is None) == bool(able)
    if not screened.relaxed:
        shunned = [rank for rank in screened.eligible if table.in_flight[rank] and table.kv_usage[rank] > 0.95]
        assert shunned == []
    assert [rank for rank, reason in enumerate(reasons(screened)) if reason == "eligible"] == screened.eligible
    if eligibility.is_everyone(prompt, 1):
        assert (screened.eligible, screened.relaxed) == (list(range(table.size)), ())
    for rank in range(table.size):
        pinned = eligibility.screen_pinned(prompt, 1, rank)
        assert pinned.eligible == ([rank] if rank in able else [])
