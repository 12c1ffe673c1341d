"""When a rank may be given more: slots, un-started work, and room for the prompt's KV."""

from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.scheduling import Predictor as PredictorSettings
from gateway.config.scheduling import Queue
from gateway.core.gate import GATE_REASONS, Gate
from gateway.core.predictor import Predictor
from gateway.core.ranks import RankState, RankTable
from tests.support.core import make_config, make_info

OPEN, NOT_OPEN, IN_FLIGHT, UNSTARTED, _ = range(len(GATE_REASONS))


class Ranks:
    """A table whose ranks are READY, and a gate over it."""

    def __init__(self, ranks=1, *, predictor=None, info=None, **settings):
        self.table = RankTable(make_config(ranks))
        for rank in range(ranks):
            self.join(rank, info)
        settings = msgspec.convert(settings, Queue, strict=False)
        self.gate = Gate(settings, self.table, Predictor(predictor))

    def join(self, rank, info=None):
        self.table.join(rank, self.table.incarnation[rank] + 1, info or make_info())
        self.table.state[rank] = RankState.READY
        self.table.refresh(rank)

    def load(self, rank=0, **columns):
        for name, value in columns.items():
            getattr(self.table, name)[rank] = value
        self.table.refresh(rank)

    def state(self, rank=0, now=0.0):
        return GATE_REASONS[self.gate.states(now)[rank]]


def model(prefill_ms="sum(0.1 * new_tokens)", **more):
    return PredictorSettings(prefill_ms=prefill_ms, **more)


def pending(head_us, *others_us, since=0.0):
    """Columns of a rank with these un-started attempts."""
    return {
        "in_flight": 1 + len(others_us),
        "in_flight_prefill": 1 + len(others_us),
        "pending_us": head_us + sum(others_us),
        "head_us": head_us,
        "head_since": since,
    }


def test_the_reasons_are_stable():
    assert GATE_REASONS == ("open", "not_open", "in_flight", "unstarted_work", "batches")


def test_each_rank_has_the_first_reason_that_applies():
    ranks = Ranks(5, max_in_flight_per_rank=4, gate_tokens=100)
    full = {"in_flight": 4, "in_flight_prefill": 2, "queued_tokens": 100}
    ranks.table.state[0] = RankState.LOST
    ranks.load(0, **full)
    ranks.load(1, **full)
    ranks.load(2, in_flight=3, in_flight_prefill=2, queued_tokens=100)
    ranks.load(3, in_flight=3, in_flight_prefill=2, queued_tokens=99)
    assert ranks.gate.states(0.0) == bytes([NOT_OPEN, IN_FLIGHT, UNSTARTED, OPEN, OPEN])


def test_a_blocked_rank_is_not_open():
    ranks = Ranks()
    ranks.load(is_blocked=True)
    assert ranks.state() == "not_open"


@pytest.mark.parametrize(("setting", "slots", "limit"), [(3, 8, 3), (None, 8, 8), (3, None, 3)])
def test_slots_are_the_setting_or_what_the_rank_said_of_itself(setting, slots, limit):
    ranks = Ranks(info=make_info(max_num_seqs=slots), max_in_flight_per_rank=setting)
    ranks.load(in_flight=limit - 1)
    assert ranks.state() == "open"
    ranks.load(in_flight=limit)
    assert ranks.state() == "in_flight"


@pytest.mark.parametrize("slots", [None, 0])
def test_without_a_number_of_slots_the_gate_sets_no_limit(slots):
    ranks = Ranks(info=make_info(max_num_seqs=slots))
    ranks.load(in_flight=1023)
    assert ranks.state() == "open"
    ranks.load(in_flight=1024)
    assert ranks.state() == "not_open", "admission's own limit per rank"


def test_another_incarnation_may_have_other_slots():
    ranks = Ranks(info=make_info(max_num_seqs=8))
    ranks.load(in_flight=4)
    assert ranks.state() == "open"
    ranks.join(0, make_info(max_num_seqs=2))
    ranks.load(in_flight=2)
    assert ranks.state() == "in_flight"


def test_a_rank_without_unstarted_work_is_open_whatever_the_columns_say():
    """So that no prediction can starve a rank."""
    ranks = Ranks(predictor=model(), gate_ms=1)
    ranks.load(in_flight=9, in_flight_decode=9, pending_us=10**12)
    assert ranks.state() == "open"


def test_gate_ms_bounds_the_predicted_work_that_has_not_started():
    ranks = Ranks(predictor=model(), gate_ms=20)
    ranks.load(**pending(12_000, 7_999))
    assert ranks.state(now=0.0) == "open"
    ranks.load(**pending(12_000, 8_000))
    assert ranks.state(now=0.0) == "unstarted_work"


def test_the_time_since_the_head_became_head_counts_as_done_for_all_that_wait():
    ranks = Ranks(predictor=model(), gate_ms=20)
    ranks.load(**pending(30_000, 15_000, since=50.0))
    assert ranks.state(now=50.0) == "unstarted_work"
    assert ranks.state(now=50.0249) == "unstarted_work"
    assert ranks.state(now=50.0251) == "open"
    ranks.load(**pending(30_000, 20_000, since=50.0))
    assert ranks.state(now=50.0299) == "unstarted_work"
    assert ranks.state(now=50.0301) == "open", "an engine works on those behind the head too"


def test_a_head_from_the_future_is_no_credit_and_no_debt():
    ranks = Ranks(predictor=model(), gate_ms=20)
    ranks.load(**pending(19_000, since=50.0))
    assert ranks.state(now=40.0) == "open"
    ranks.load(**pending(20_000, since=50.0))
    assert ranks.state(now=40.0) == "unstarted_work"


def test_gate_steps_count_in_the_rank_s_predicted_decode_step():
    ranks = Ranks(predictor=model(step_ms="10 + 0.1 * in_flight_decode + 0.001 * ctx_tokens"), gate_steps=2)
    ranks.load(**pending(25_000), step_us=1)
    assert ranks.state(now=0.0) == "unstarted_work", "2 x 10 ms"
    ranks.load(in_flight_decode=20, ctx_tokens=1_000)
    assert ranks.state(now=0.0) == "open", "2 x 13 ms"


def test_without_a_step_formula_the_measured_step_counts():
    ranks = Ranks(predictor=model(), gate_steps=2)
    ranks.load(**pending(25_000), step_us=12_000)
    assert ranks.state(now=0.0) == "unstarted_work"
    ranks.load(step_us=13_000)
    assert ranks.state(now=0.0) == "open"


@pytest.mark.parametrize("predictor", [None, model()])
def test_without_a_known_step_or_a_model_tokens_count(predictor):
    ranks = Ranks(predictor=predictor, gate_steps=2, gate_tokens=2048)
    ranks.load(**pending(10**9), queued_tokens=2047)
    assert ranks.state(now=0.0) == "open"
    ranks.load(queued_tokens=2048)
    assert ranks.state(now=0.0) == "unstarted_work"


def test_gate_ms_without_a_model_falls_back_to_tokens():
    ranks = Ranks(gate_ms=1, gate_tokens=100)
    ranks.load(**pending(10**9), queued_tokens=99)
    assert ranks.state() == "open"


def test_kv_fits_up_to_the_limit_of_the_capacity():
    ranks = Ranks(info=make_info(kv_capacity_tokens=1000), kv_limit=0.9)
    ranks.load(in_flight=1, own_tokens=600)
    assert ranks.gate.kv_fits(0, 300)
    assert not ranks.gate.kv_fits(0, 301)


def test_prompts_that_have_not_started_take_room_too():
    """`ctx_tokens` knows them only from their first token on."""
    ranks = Ranks(info=make_info(kv_capacity_tokens=1000), kv_limit=1.0)
    ranks.load(in_flight=1, in_flight_prefill=1, ctx_tokens=0, own_tokens=600)
    assert not ranks.gate.kv_fits(0, 401)


def test_a_report_that_is_higher_than_the_own_count_is_believed_and_a_lower_one_is_not():
    ranks = Ranks(info=make_info(kv_capacity_tokens=1000), kv_limit=1.0)
    ranks.load(in_flight=1, own_tokens=200, kv_usage=0.7)
    assert ranks.gate.kv_fits(0, 300)
    assert not ranks.gate.kv_fits(0, 301)
    ranks.load(kv_usage=0.1)
    assert ranks.gate.kv_fits(0, 800)
    assert not ranks.gate.kv_fits(0, 801)


def test_a_rank_with_nothing_in_flight_takes_any_prompt():
    """One last report of a full cache must not shut an idle rank for ever."""
    ranks = Ranks(info=make_info(kv_capacity_tokens=1000), kv_limit=0.5)
    ranks.load(kv_usage=1.0)
    assert ranks.gate.kv_fits(0, 999)


def test_prompts_that_go_there_before_take_their_room():
    ranks = Ranks(info=make_info(kv_capacity_tokens=1000), kv_limit=0.9)
    ranks.load(in_flight=1, own_tokens=600)
    assert ranks.gate.kv_fits(0, 100, ahead=200)
    assert not ranks.gate.kv_fits(0, 101, ahead=200)
    ranks.load(in_flight=0, own_tokens=0, kv_usage=1.0)
    assert ranks.gate.kv_fits(0, 950), "alone, whatever the limit"
    assert ranks.gate.kv_fits(0, 400, ahead=500)
    assert not ranks.gate.kv_fits(0, 401, ahead=500)


RANK = st.tuples(
    st.sampled_from([None, 500, 1000, 7777]),
    st.integers(0, 2),
    st.integers(0, 1000),
    st.one_of(st.just(0.0), st.floats(0, 1)),
)


@given(
    ranks=st.lists(RANK, min_size=1, max_size=4),
    limit=st.one_of(st.sampled_from([0.1, 0.9, 0.95, 1.0]), st.floats(0.01, 1)),
    prompt=st.integers(1, 1000),
)
def test_the_look_at_all_ranks_is_never_wrong_when_it_says_yes(ranks, limit, prompt):
    fleet = Ranks(len(ranks), kv_limit=limit)
    for rank, (capacity, in_flight, own, usage) in enumerate(ranks):
        fleet.join(rank, make_info(kv_capacity_tokens=capacity))
        fleet.load(rank, in_flight=in_flight, own_tokens=own if in_flight else 0, kv_usage=usage)
    fleet.gate.states(0.0)
    if fleet.gate.kv_fits_everywhere(prompt):
        assert all(fleet.gate.kv_fits(rank, prompt) for rank in range(len(ranks)))


def test_the_look_at_all_ranks_says_yes_while_there_is_room():
    fleet = Ranks(2, info=make_info(kv_capacity_tokens=1000), kv_limit=0.9)
    fleet.load(1, in_flight=1, own_tokens=600)
    fleet.gate.states(0.0)
    assert fleet.gate.kv_fits_everywhere(290)
    assert not fleet.gate.kv_fits_everywhere(301)
    fleet.load(1, in_flight=1, own_tokens=10)
    assert fleet.gate.kv_fits_everywhere(301), "the lower bound rises again"
    fleet.join(1, make_info(kv_capacity_tokens=None))
    fleet.join(0, make_info(kv_capacity_tokens=None))
    fleet.gate.states(0.0)
    assert fleet.gate.kv_fits_everywhere(10**9)


def test_slots_are_the_smaller_of_the_gates_and_admissions():
    ranks = Ranks(2, max_in_flight_per_rank=2000)
    ranks.table.max_in_flight = [1024, 4096]
    ranks.gate.states(0.0)
    assert [ranks.gate.slots(rank) for rank in range(2)] == [1024, 2000]


@pytest.mark.parametrize("kv_usage", [0.0, 0.99])
def test_a_rank_of_unknown_capacity_takes_any_prompt(kv_usage):
    ranks = Ranks(info=make_info(kv_capacity_tokens=None))
    assert ranks.table.kv_capacity_tokens == [inf]
    ranks.load(in_flight=1, own_tokens=10**9, kv_usage=kv_usage)
    assert ranks.gate.kv_fits(0, 10**9)


@pytest.mark.parametrize("factor", [1, 4, 1000])
def test_predictions_that_are_too_high_never_starve_a_rank(factor):
    """A rank that prefills one prompt per 10 ms is given the next one in time, or at the latest when it has none."""
    ranks = Ranks(predictor=model(), gate_ms=15)
    predicted_us = 10_000 * factor
    now, sent, started = 0.0, 0, 0
    unstarted, since = 0, None
    for _ in range(1000):
        now += 0.001
        if unstarted and now - since >= 0.01 - 1e-9:
            unstarted -= 1
            started += 1
            since = now if unstarted else None
        ranks.load(
            in_flight=unstarted,
            in_flight_prefill=unstarted,
            pending_us=unstarted * predicted_us,
            head_us=predicted_us if unstarted else 0,
            head_since=since,
        )
        if ranks.state(now=now) == "open":
            sent += 1
            unstarted += 1
            since = now if unstarted == 1 else since
    assert started >= 90, f"of 100 that the rank could prefill, with {sent} sent"
