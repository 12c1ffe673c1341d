"""The virtual-time harness itself: that its clock, its ranks and its figures are what they claim to be."""

from dataclasses import dataclass
from itertools import pairwise

import pytest

from engine_stub.scheduler import SchedulerConfig
from gateway.types import EngineRequest, Sampling
from tests.bench.virtual.engine import SCHEDULER, STEP_TIME, VirtualRank, unloaded_prefill_s
from tests.bench.virtual.metrics import compare, percentile, summarise, unloaded_ttft
from tests.bench.virtual.policies import SATURATING
from tests.bench.virtual.workloads import Offer, azure_conv, bursty, two_tenants
from tests.bench.virtual.world import EngineModel, World, configured

ENGINE = EngineModel()
LMETRIC = {"policy": {"preset": "lmetric"}}


def run(offers, engine=ENGINE, seed=0, **settings):
    return World(configured(engine, **(settings or LMETRIC)), tuple(offers), engine, seed).run()


def decode_s(context_tokens, rows=1):
    """One step of `rows` decoding sequences."""
    ms = STEP_TIME.fixed_ms + STEP_TIME.per_decode_row_us * rows / 1e3
    return (ms + STEP_TIME.per_context_token_ns * context_tokens / 1e6) / 1e3


def test_a_lone_request_takes_what_the_formula_says():
    prompt, output = 1000, 5
    (record,) = run([Offer(0.25, prompt, output)]).records
    assert record.error == ""
    prefill_s = unloaded_prefill_s(prompt)
    assert record.first_token_at == pytest.approx(0.25 + prefill_s + ENGINE.output_s, abs=1e-12)
    steps_s = sum(decode_s(prompt + generated) for generated in range(output - 1))
    assert record.ended_at == pytest.approx(record.first_token_at + steps_s, abs=1e-9)


@pytest.mark.parametrize("prompt", [1, 8191, 8192, 8193, 20_000])
def test_the_unloaded_time_of_a_chunked_prompt_is_that_of_an_empty_rank(prompt):
    (record,) = run([Offer(1.0, prompt, 1)]).records
    assert record.first_token_at - 1.0 == pytest.approx(unloaded_ttft(ENGINE)(prompt), abs=1e-12)


def test_a_send_delay_counts_once():
    engine = EngineModel(send_s=0.003)
    (record,) = run([Offer(1.0, 100, 1)], engine).records
    assert record.first_token_at - 1.0 == pytest.approx(0.003 + unloaded_prefill_s(100) + 0.0005, abs=1e-12)
    assert unloaded_ttft(engine)(100) == pytest.approx(record.first_token_at - 1.0, abs=1e-12)


def test_a_request_that_arrives_in_a_step_waits_for_the_next():
    engine = EngineModel(ranks=1)
    first, second = run([Offer(0.0, 4000, 2), Offer(0.001, 10, 1)], engine).records
    first_step_s = unloaded_prefill_s(4000)
    assert first.first_token_at == pytest.approx(first_step_s + engine.output_s, abs=1e-12)
    own_s = (STEP_TIME.per_prefill_token_us * 10 + STEP_TIME.per_prefill_context_ns * 10 * 5.5 / 1e3) / 1e6
    assert second.first_token_at == pytest.approx(first_step_s + decode_s(4000) + own_s + engine.output_s, abs=1e-9)


def test_what_reaches_an_idle_rank_at_one_moment_is_in_one_step():
    engine = EngineModel(ranks=1)
    first, second = run([Offer(1.0, 100, 1), Offer(1.0, 100, 1)], engine).records
    assert first.first_token_at == second.first_token_at


def test_the_core_learns_of_a_step_only_after_its_output_has_travelled():
    engine = EngineModel(ranks=1, output_s=0.1)
    (record,) = run([Offer(0.0, 100, 1)], engine).records
    assert record.ended_at == pytest.approx(unloaded_prefill_s(100) + 0.1, abs=1e-12)


def engine_request(wire_id, prompt=100):
    return EngineRequest(
        wire_id=wire_id, prompt_token_ids=bytes(prompt), sampling=Sampling(max_tokens=4, temperature=0.0)
    )


def test_an_abort_acts_at_once_wherever_the_request_is():
    rank = VirtualRank()
    rank.receive(engine_request("waits"))
    rank.receive(engine_request("runs"))
    rank.abort("waits")
    assert rank.begin() == pytest.approx(unloaded_prefill_s(100))
    rank.abort("runs")
    rank.abort("unknown")
    assert rank.finish().ids == []
    assert rank.begin() is None


def test_a_rank_reports_what_waits_for_a_slot():
    rank = VirtualRank(SchedulerConfig(max_active=1, kv_tokens=1600, prefix_cache=False))
    for name in ("a", "b", "c"):
        rank.receive(engine_request(name, 160))
    rank.begin()
    load = rank.finish().load
    assert (load.running, load.waiting, load.kv_usage) == (1, 2, pytest.approx(0.1))


def test_an_idle_rank_is_silent():
    world = run([Offer(0.0, 10, 1), Offer(30.0, 10, 1)])
    assert sum(rank.steps for rank in world.ranks) == 2
    # 4 joins, 2 arrivals, 2 batches; the rest are ticks, one every 50 ms.
    assert world.events - 8 == pytest.approx(30.0 / 0.05, abs=2)


def test_the_load_report_is_taken_after_the_commit():
    world = run([Offer(0.0, 1000, 1)])
    table = world.router.ranks
    assert table.reported_running == table.reported_waiting == [0] * 4
    assert table.kv_usage == [0.0] * 4
    assert table.snapshot_at.count(None) == 3, "only the rank that worked has reported"


def test_the_same_run_twice_is_the_same_to_the_last_bit():
    offers = bursty(3, 200).at_rate(20).offers
    outcomes = []
    for _ in range(2):
        world = run(offers, seed=3)
        times = [(record.first_token_at, record.ended_at) for record in world.records]
        outcomes.append((times, [(rank.steps, rank.busy_s) for rank in world.ranks]))
    assert outcomes[0] == outcomes[1]


def test_every_offer_ends_and_the_core_is_empty():
    world = run(bursty(1, 300).at_rate(200).offers)
    assert all(record.ended_at is not None for record in world.records)
    assert world.router.live_count == world.router.in_flight == 0
    assert all(not rank.scheduler.live_count and not rank.scheduler.pool.used for rank in world.ranks)


def test_a_refusal_is_recorded_with_its_reason():
    offers = [Offer(0.0, 100, 50), Offer(0.001, 100, 50), Offer(0.002, 100, 50)]
    records = run(offers, admission={"max_in_flight": 2}).records
    assert [record.error for record in records] == ["", "", "GATEWAY_FULL"]
    assert records[2].first_token_at is None


def test_what_the_core_ends_is_aborted_on_its_rank():
    world = run([Offer(0.0, 100, 1000)], limits={"max_request_age_s": 0.5})
    (record,) = world.records
    assert record.error == "MAX_AGE_EXCEEDED"
    assert record.ended_at == pytest.approx(0.5, abs=0.06)
    assert sum(rank.busy_s for rank in world.ranks) == pytest.approx(record.ended_at, abs=0.02)


def test_nothing_is_refused_in_the_measurement_of_capacity():
    engine = EngineModel(scheduler=SchedulerConfig(max_active=4, kv_tokens=8000, prefix_cache=False))
    offers = [Offer(0.0, 1500, 20)] * 60
    world = run(offers, engine, **SATURATING)
    assert all(record.error == "" for record in world.records)
    assert max(record.ended_at for record in world.records) > 1.0


def test_a_scaled_workload_keeps_its_pattern():
    workload = azure_conv(2, 1000)
    fast = workload.at_rate(workload.rate * 4)
    assert fast.rate == pytest.approx(4 * workload.rate)
    assert [(o.prompt_tokens, o.output_tokens) for o in fast.offers] == [
        (o.prompt_tokens, o.output_tokens) for o in workload.offers
    ]
    assert fast.offers[500].at_s == pytest.approx(workload.offers[500].at_s / 4)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("make", [azure_conv, bursty])
def test_offers_are_in_order_of_time(make, seed):
    times = [offer.at_s for offer in make(seed, 1500).offers]
    assert times == sorted(times)
    assert times[0] >= 0


def test_the_trace_goes_round_without_a_gap():
    offers = azure_conv(3, 2000).offers
    gaps = [later.at_s - earlier.at_s for earlier, later in pairwise(offers)]
    assert max(gaps) < 2.0, "no longer than the gaps of the trace itself"
    assert offers[0].at_s < 2.0


def test_seeds_differ_and_repeat():
    assert bursty(1, 100) == bursty(1, 100)
    assert bursty(1, 100).offers != bursty(2, 100).offers
    assert azure_conv(0, 100).offers != azure_conv(1, 100).offers


def test_tenants_are_drawn_by_share():
    offers = two_tenants(bursty(0, 2000), 0, 0.25).offers
    light = sum(1 for offer in offers if offer.tenant == "light")
    assert 400 < light < 600
    assert {offer.tenant for offer in offers} == {"light", "heavy"}


def test_percentiles_are_values_that_occurred():
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, share) for share in (0.01, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([3.0], 0.99) == 3.0


@dataclass
class FakeWorld:
    records: list


def test_the_figures_of_a_run_worked_out_by_hand():
    world = run([Offer(0.0, 100, 1), Offer(5.0, 6000, 11), Offer(10.0, 200, 3), Offer(15.0, 300, 2)])
    slow, refused = world.records[2], world.records[3]
    slow.first_token_at = slow.offer.at_s + 0.9
    slow.ended_at = slow.offer.at_s + 1.0
    refused.error = "QUEUE_FULL"
    summary = summarise(FakeWorld(world.records), ENGINE, warm_up=0.25)
    alone = unloaded_ttft(ENGINE)
    assert summary.offered == 3
    assert summary.finished == 2
    assert summary.refused == {"QUEUE_FULL": 1}
    assert summary.ttft_mean == pytest.approx((alone(6000) + 0.9) / 2)
    assert summary.ttft_max == pytest.approx(0.9)
    assert summary.slowdown_p99 == pytest.approx(0.9 / alone(200))
    assert summary.long_ttft_mean == pytest.approx(alone(6000)), "of two, the longer one"
    assert summary.goodput == pytest.approx(1 / 3), "slow and refused are misses"
    tpot = sum(decode_s(6000 + generated) for generated in range(10)) / 10
    assert summary.tpot_mean == pytest.approx((tpot + 0.05) / 2)


def test_ratios_are_per_seed_and_above_one_when_ours_is_better():
    world = run([Offer(float(at), 100, 2) for at in range(8)])
    ours = summarise(world, ENGINE)
    for record in world.records:
        record.first_token_at += 0.1
        record.ended_at += 0.1
    slower = summarise(world, ENGINE)
    ratio = compare([slower, ours], [ours, ours])["ttft_mean"]
    assert ratio.least == 1.0
    assert ratio.most == pytest.approx(slower.ttft_mean / ours.ttft_mean)
    assert ratio.middle == pytest.approx(ratio.most**0.5)


def test_the_stub_model_is_that_of_the_synthetic_backend():
    assert STEP_TIME.fixed_ms == 6.5
    assert SCHEDULER.token_budget == 8192
    assert SCHEDULER.capacity_tokens == 400_000
