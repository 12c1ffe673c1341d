"""What ranks report and what the gateway makes of it, over real sockets with ranks that the test plays by hand."""

import asyncio
import random

import pytest

from engine_stub.faults import Faults, WireForm
from engine_stub.wire.codec import Load
from tests.support.by_hand import held, report
from tests.support.calls import Generation, generate, make_prompt, make_request, many_stream
from tests.support.engine_edge import PROTOS
from tests.support.stack import expected, running_gateway, stub_config, until

FIRST = expected([1, 2, 3], 1)
STALE = Load(30, 20, 300, 400)
"""A report that is heavy on the queue, with three quarters of the KV in use."""


def by_hand(protocol, **settings):
    return running_gateway(protocol, auto_step=False, **settings)


def counts(stack, rank):
    """(running, waiting) as the core keeps them."""
    return stack.table.reported_running[rank], stack.table.reported_waiting[rank]


async def test_a_snapshot_is_kept_verbatim_and_shown_beside_its_normal_form(protocol):
    async with by_hand(protocol) as stack:
        generation, wire_id = await held(stack, 0)
        await report(stack, 0, [(wire_id, FIRST, "")], Load(5, 2, 100, 400))
        reported, silent = await stack.list_ranks()
        assert (reported.reported_running, reported.reported_waiting, reported.kv_usage) == (5, 2, 0.25)
        # TokenSpeed counts the waiting ones among the running.
        running = 3 if protocol == "tokenspeed" else 5
        assert (reported.running, reported.waiting, reported.in_flight) == (running, 2, 1)
        assert reported.foreign == running + 2 - 1
        assert reported.snapshot_age_ms >= 0
        for field in ("reported_running", "reported_waiting", "running", "waiting", "kv_usage", "snapshot_age_ms"):
            assert not silent.HasField(field)
        loads = (await stack.engine_client().GetLoads(PROTOS[protocol].GetLoadsRequest())).loads
        assert (loads[0].num_running_reqs, loads[0].num_waiting_reqs, loads[0].token_usage) == (5, 2, 0.25)
        await report(stack, 0, [(wire_id, [9], "length")], None)
        assert (await generation.done()).text == [*FIRST, 9]


async def test_no_kv_pages_mean_no_report_and_cost_no_token():
    async with by_hand("tokenspeed") as stack:
        generation, wire_id = await held(stack, 0)
        await report(stack, 0, [(wire_id, FIRST, "")], Load(5, 2, 0, 0))
        assert not (await stack.list_ranks())[0].HasField("kv_usage")
        assert counts(stack, 0) == (0, 0)
        assert stack.router.counters.snapshots == [0, 0]
        await report(stack, 0, [(wire_id, [9], "length")], Load(5, 2, 0, 0))
        assert (await generation.done()).text == [*FIRST, 9]


@pytest.mark.parametrize("size", [9, 10])
async def test_short_batches_of_older_ranks_are_no_report_and_no_mismatch(size):
    stub = stub_config(wire=WireForm(tokenspeed_batch=size))
    async with by_hand("tokenspeed", stub=stub) as stack:
        generation, wire_id = await held(stack, 1)
        await report(stack, 1, [(wire_id, FIRST, "")], Load(5, 2, 100, 400))
        assert not (await stack.list_ranks())[1].HasField("reported_running")
        link = stack.gateway.link.counters
        assert (link.index_mismatch, link.load_faults) == (0, {})
        await report(stack, 1, [(wire_id, [9], "stop")], Load(5, 2, 100, 400))
        assert (await generation.done()).text == [*FIRST, 9]


@pytest.mark.parametrize("fault", ["negative", "float", "text", "short"])
async def test_a_bad_load_costs_the_snapshot_and_never_a_token(protocol, fault):
    async with running_gateway(protocol, stub=stub_config(faults=Faults(load=fault))) as stack:
        requests = [make_request(make_prompt(4, n), 9) for n in range(6)]
        for request, outcome in zip(
            requests, await asyncio.gather(*(generate(stack.client(), each) for each in requests)), strict=True
        ):
            outcome.assert_complete(request)
        # A TokenSpeed batch that stops short is an older rank's, not a fault.
        is_fault = (protocol, fault) != ("tokenspeed", "short")
        assert (sum(stack.gateway.link.counters.load_faults.values()) > 0) is is_fault
        assert stack.router.counters.snapshots == [0, 0]


async def test_the_load_is_stored_before_its_batch_releases(protocol):
    async with by_hand(protocol) as stack:
        generation, wire_id = await held(stack, 0)
        await report(stack, 0, [(wire_id, FIRST, "length")], STALE)
        await generation.done()
        # The other order would keep what the rank said while its last request still counted.
        assert counts(stack, 0) == (0, 0)
        assert stack.table.kv_usage[0] == 0.75
        assert stack.router.counters.clamped == [1, 0]


async def test_the_clamp_waits_for_the_last_request_of_the_rank(protocol):
    async with by_hand(protocol) as stack:
        first, first_id = await held(stack, 0)
        second, second_id = await held(stack, 0)
        await report(stack, 0, [(first_id, FIRST, "length"), (second_id, FIRST, "")], STALE)
        await first.done()
        assert counts(stack, 0) == (30, 20)
        await report(stack, 0, [(second_id, [9], "length")], STALE)
        await second.done()
        assert counts(stack, 0) == (0, 0)


@pytest.mark.parametrize("preset", ["smg", "vllm"])
async def test_an_emptied_rank_with_a_stale_snapshot_is_preferred_to_real_work(protocol, preset):
    async with by_hand(protocol, policy={"preset": preset}) as stack:
        busy, busy_id = await held(stack, 1)
        await report(stack, 1, [(busy_id, FIRST, "")], Load(1, 0, 10, 400))
        emptied, emptied_id = await held(stack, 0)
        await report(stack, 0, [(emptied_id, FIRST, "length")], STALE)
        await emptied.done()
        for _ in range(3):
            following, following_id = await held(stack, None)
            assert following_id in stack.ranks[0].live_ids
            ranks = await stack.list_ranks()
            assert (ranks[0].reported_running, ranks[0].reported_waiting, ranks[0].kv_usage) == (0, 0, 0.75)
            await report(stack, 0, [(following_id, FIRST, "length")], STALE)
            await following.done()
        await report(stack, 1, [(busy_id, [9], "length")], None)
        await busy.done()


async def test_late_rows_after_an_abort_are_clamped_and_reach_nobody(protocol):
    async with by_hand(protocol) as stack:
        generation, wire_id = await held(stack, 0)
        await report(stack, 0, [(wire_id, FIRST, "")], STALE)
        await generation.first_token()
        generation.call.cancel()
        await stack.ranks[0].wait_until(lambda: wire_id in stack.ranks[0].received_aborts)
        assert counts(stack, 0) == (0, 0)
        await report(stack, 0, [(wire_id, [9], "")], STALE)
        await report(stack, 0, [(wire_id, [9], "length")], STALE)
        assert counts(stack, 0) == (0, 0)
        assert stack.table.kv_usage[0] == 0.75
        assert stack.router.counters.late_rows == 2
        assert (await generation.done()).text == FIRST


@pytest.mark.parametrize(("settle_s", "kept"), [(3600.0, (0, 0)), (0.0, (4, 2))], ids=["settling", "settled"])
async def test_a_report_without_rows_is_clamped_while_an_abort_settles(protocol, settle_s, kept):
    load = {"abort_settle_s": settle_s, "foreign_ttl_s": 3600.0}
    async with by_hand(protocol, load=load) as stack:
        generation, wire_id = await held(stack, 0)
        generation.call.cancel()
        await generation.done()
        await stack.ranks[0].wait_until(lambda: wire_id in stack.ranks[0].received_aborts)
        await report(stack, 0, [], Load(4, 2, 100, 400))
        assert counts(stack, 0) == kept
        assert stack.table.kv_usage[0] == 0.25


async def test_foreign_load_counts_while_it_is_fresh(protocol):
    load = {"foreign_ttl_s": 3600.0}
    async with by_hand(protocol, policy={"preset": "smg"}, load=load) as stack:
        await report(stack, 0, [], Load(6, 2, 100, 400))
        assert counts(stack, 0) == (6, 2)
        assert (await stack.list_ranks())[0].foreign == (6 if protocol == "tokenspeed" else 8)
        generations = [await held(stack, None) for _ in range(4)]
        assert {wire_id for _, wire_id in generations} == stack.ranks[1].live_ids
        for generation, wire_id in generations:
            await report(stack, 1, [(wire_id, FIRST, "length")], None)
            await generation.done()
        # An engine that says it is idle is believed at once.
        await report(stack, 0, [], Load(0, 0, 0, 400))
        assert counts(stack, 0) == (0, 0)


async def test_foreign_load_is_forgotten_when_nothing_confirms_it(protocol):
    async with by_hand(protocol, load={"foreign_ttl_s": 0.05}) as stack:
        await report(stack, 0, [], Load(6, 2, 100, 400))
        await until(lambda: counts(stack, 0) == (0, 0), "the foreign load to expire")
        assert stack.router.counters.foreign_expired == stack.router.counters.foreign_reports == 1
        assert (await stack.list_ranks())[0].kv_usage == 0.25


@pytest.mark.parametrize("used_pages", [392, 400])
@pytest.mark.parametrize("ranks", [1, 2])
async def test_an_idle_rank_whose_last_snapshot_had_full_kv_still_gets_work(protocol, ranks, used_pages):
    async with by_hand(protocol, ranks=ranks) as stack:
        others = [await held(stack, rank) for rank in range(1, ranks)]
        generation, wire_id = await held(stack, 0)
        await report(stack, 0, [(wire_id, FIRST, "length")], Load(1, 0, used_pages, 400))
        await generation.done()
        assert stack.table.kv_usage[0] == used_pages / 400
        following, following_id = await held(stack, None)
        assert following_id in stack.ranks[0].live_ids
        await report(stack, 0, [(following_id, FIRST, "length")], None)
        await following.done()
        for other, other_id in others:
            await report(stack, 1, [(other_id, FIRST, "length")], None)
            await other.done()


async def test_a_busy_rank_with_full_kv_gets_nothing_while_another_is_eligible(protocol):
    async with by_hand(protocol) as stack:
        full, full_id = await held(stack, 0)
        await report(stack, 0, [(full_id, FIRST, "")], Load(1, 0, 388, 400))
        loaded = [await held(stack, 1) for _ in range(5)]
        loaded += [await held(stack, None) for _ in range(10)]
        assert len(stack.ranks[1].live_ids) == 15
        assert stack.ranks[0].live_ids == {full_id}
        await report(stack, 1, [(wire_id, FIRST, "length") for _, wire_id in loaded], None)
        await report(stack, 0, [(full_id, [9], "length")], None)
        for generation, _ in (*loaded, (full, full_id)):
            await generation.done()


async def test_a_rank_that_never_reports_beside_one_that_does_leaks_nothing_in_1000_requests():
    stub = stub_config(rank_faults={1: Faults(wire=WireForm(tokenspeed_batch=9))})
    source = random.Random(4)
    async with (
        running_gateway("tokenspeed", stub=stub, policy={"preset": "smg"}) as stack,
        many_stream(stack.client()) as many,
    ):
        for _ in range(10):
            requests = [
                make_request(make_prompt(source.randrange(1, 40), n), source.randrange(1, 9)) for n in range(100)
            ]
            futures = [many.start(request) for request in requests]
            aborted = [request.request_id for request in requests if source.random() < 0.1]
            for request_id in aborted:
                many.abort(request_id)
            for request, outcome in zip(requests, await asyncio.gather(*futures), strict=True):
                if outcome.status is None:
                    outcome.assert_complete(request)
                else:
                    assert request.request_id in aborted
                    outcome.assert_prefix(request)
        counters = stack.router.counters
        assert counters.accepted == 1000
        assert min(counters.decisions) > 300
        assert counters.snapshots[0] > 0
        assert counters.snapshots[1] == 0
        await until(lambda: not any(stack.table.in_flight), "the ranks to empty")
        # Each of rank 0's reports, its last one included, was taken before the step that it came with.
        assert counts(stack, 0) == (0, 0)


@pytest.mark.parametrize("fault", ["drop_tokens_every", "duplicate_every"])
async def test_tokens_that_don_t_add_up_end_the_stream_with_an_exact_prefix(fault):
    stub = stub_config(rank_faults={0: Faults(**{fault: 7})})
    async with running_gateway("tokenspeed", stub=stub) as stack:
        client = stack.client()
        hit, fine = (
            [Generation(client, make_request((1, 2, n), 40, data_parallel_rank=rank)) for n in range(4)]
            for rank in (0, 1)
        )
        for generation in fine:
            (await generation.done()).assert_complete(generation.request)
        for generation in hit:
            outcome = await generation.done()
            assert outcome.reason == "DATA_LOSS"
            assert outcome.code.name == "DATA_LOSS"
            outcome.assert_prefix(generation.request)
            assert outcome.facts["delivered_tokens"] == str(len(outcome.text))
        counters = stack.router.counters
        assert (counters.lost_tokens if fault == "drop_tokens_every" else counters.duplicated_tokens) > 0
