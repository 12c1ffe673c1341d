"""Ranks that come, go and come back while requests are queued for them."""

import asyncio
import random

import pytest

from engine_stub.backend.synthetic import StepTime
from engine_stub.faults import Faults
from engine_stub.group import StubGroup
from gateway.core.errors import Reason
from gateway.core.ranks import RankState
from tests.support.by_hand import held, report
from tests.support.calls import Generation, Many, generate, make_prompt, make_request
from tests.support.stack import gateway_config, observed, running, running_gateway, stub_config, until

NO_RANKS_S = 3.0
TICKING = stub_config(time_scale=1.0, step_time=StepTime(fixed_ms=1.0))
MODES = {
    "queue": {"mode": "queue", "queue": {"max_in_flight_per_rank": 2, "no_rank_wait_s": 30.0}},
    "batch": {
        "mode": "batch",
        "queue": {"no_rank_wait_s": 30.0},
        "batch": {"max_requests": 4, "max_in_flight_batches": 1, "release_at": "finish"},
    },
}


def start(client, count, max_tokens=20, **fields):
    """Generate calls of one or two sequences."""
    return [
        Generation(
            client,
            make_request(make_prompt(5 + number % 20, number), max_tokens, sampling={"n": 1 + number % 2}, **fields),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("mode", MODES)
async def test_what_comes_before_any_rank_waits_for_them(protocol, mode):
    """Three seconds without a rank, as at a start or in a rolling restart: everything is served."""
    async with running(gateway_config(protocol, 2, scheduling=MODES[mode])) as stack:
        client = stack.client()
        calls = start(client, 30)
        await until(lambda: stack.router.queue_depth == 45, "all of them to be queued")
        stream = Many(client)
        requests = [make_request(make_prompt(9, number), 6) for number in range(10)]
        futures = [stream.start(request) for request in requests]
        await asyncio.sleep(NO_RANKS_S)
        assert not any(call.task.done() for call in calls)
        async with StubGroup(protocol, stack.gateway.link.handshake_addresses[0], ranks=2, config=TICKING) as group:
            await group.ready()
            for call in calls:
                (await call.done()).assert_complete(call.request)
                assert float(call.outcome.trailing["x-rankgate-queue-ms"]) >= 1e3 * NO_RANKS_S
            for request, future in zip(requests, futures, strict=True):
                (await future).assert_complete(request)
            await stream.end()
            async with observed(stack, group):
                pass


async def test_it_waits_no_longer_than_it_may(protocol):
    """`no_rank_wait_s` runs from each request's own arrival; one that came later waits longer."""
    scheduling = {"mode": "queue", "queue": {"no_rank_wait_s": 0.5}}
    async with running_gateway(protocol, ranks=1, scheduling=scheduling) as stack:
        client = stack.client()
        await stack.ranks[0].kill()
        await until(lambda: not stack.ready_ranks(), "the loss")
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        for _ in range(2):
            outcome = await generate(client, make_request())
            assert outcome.reason is Reason.NO_ELIGIBLE_RANK
            assert outcome.facts["waited_s"] == "0.5"
            assert outcome.retry_after_s > 0
        assert loop.time() - began_at >= 1.0
        await stack.ranks[0].restart()
        request = make_request()
        (await generate(client, request)).assert_complete(request)


async def test_without_patience_it_is_refused_at_once(protocol):
    scheduling = {"mode": "queue", "queue": {"no_rank_wait_s": 0}}
    async with running_gateway(protocol, ranks=1, scheduling=scheduling) as stack:
        await stack.ranks[0].kill()
        await until(lambda: not stack.ready_ranks(), "the loss")
        outcome = await generate(stack.client(), make_request())
        assert outcome.reason is Reason.NO_ELIGIBLE_RANK
        assert "decision_id" in outcome.facts
        assert not stack.logged("request_ended"), "it was never accepted"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reroute", [True, False])
async def test_a_lost_rank_costs_only_what_it_had(protocol, mode, reroute):
    """What is queued goes elsewhere, down to the last rank. What had no token does too, where that is wanted."""
    stub = stub_config(faults=Faults(silent=True))
    async with running_gateway(
        protocol, ranks=3, stub=stub, scheduling=MODES[mode], failure={"reroute": reroute}
    ) as stack:
        calls = start(stack.client(), 60)
        await until(lambda: stack.router.live_count == 60, "all to be accepted")
        assert stack.router.queue_depth > 45
        lost = set()
        for rank in (0, 1):
            had = {
                attempt.sequence.request.arrived.request_id for attempt in stack.router._attempts.ledger.of_rank(rank)
            }
            assert had
            lost |= set() if reroute else had
            await stack.ranks[rank].kill()
            await until(lambda rank=rank: stack.table.state[rank] is RankState.LOST, "the loss")
        await until(lambda: len(stack.logged("request_ended")) == len(lost), "the log lines")
        assert {entry["request_id"] for entry in stack.logged("request_ended")} == lost
        stack.ranks[2].set_faults(silent=False)
        outcomes = [await call.done() for call in calls]
        assert {e["request_id"] for e in stack.logged("request_ended") if e["outcome"] != "ok"} == lost
        assert [outcome.reason for outcome in outcomes if outcome.status is not None] == [Reason.RANK_LOST] * len(lost)
        for call, outcome in zip(calls, outcomes, strict=True):
            if outcome.status is None:
                outcome.assert_complete(call.request)
                assert {finish.rank for finish in outcome.finishes.values()} == {2}
            else:
                assert (outcome.messages, outcome.facts["retryable"]) == (0, "true")


@pytest.mark.parametrize("mode", MODES)
async def test_a_rolling_restart_under_load_serves_all_that_waited(protocol, mode):
    """One rank after the other goes and comes back while clients retry what the rank took with it."""
    source = random.Random(3)
    async with running_gateway(protocol, ranks=2, stub=TICKING, scheduling=MODES[mode]) as stack:
        client = stack.client()
        is_over = asyncio.Event()
        served = retried = 0

        async def caller(number):
            nonlocal served, retried
            while not is_over.is_set():
                request = make_request(make_prompt(8, source.randrange(1000)), source.randrange(1, 25))
                outcome = await generate(client, request)
                if outcome.status is None:
                    outcome.assert_complete(request)
                    served += 1
                    continue
                # SEND_FAILED: it was on its way when the rank went.
                assert outcome.reason in (Reason.RANK_LOST, Reason.SEND_FAILED), outcome.status
                outcome.assert_prefix(request)
                retried += 1

        async with asyncio.TaskGroup() as callers:
            for number in range(24):
                callers.create_task(caller(number))
            for rank in (0, 1, 0, 1):
                await until(lambda: all(stack.table.in_flight), "both ranks to be busy")
                await stack.ranks[rank].kill()
                await until(lambda rank=rank: stack.table.state[rank] is RankState.LOST, "the loss")
                if rank == 1:
                    # For a moment there is none at all.
                    await stack.ranks[0].kill()
                    await until(lambda: not stack.ready_ranks(), "no rank to be left")
                    ended = sum(stack.router.counters.ended.values())
                    await asyncio.sleep(0.1)
                    assert sum(stack.router.counters.ended.values()) == ended, "nobody is refused, nobody is served"
                    assert stack.router.queue_depth > 0
                    await stack.ranks[0].restart()
                await stack.ranks[rank].restart()
                await stack.all_ready()
                goal = served + 30
                await until(lambda goal=goal: served >= goal, "callers to be served again")
            is_over.set()
        # Each loss takes what the rank had in flight, and nothing of the queue.
        assert 0 < retried <= 6 * 4


async def test_the_queued_requests_of_a_lost_pin_are_told_at_once(protocol):
    """A pin is never re-routed, and its rank may never come back: the caller decides."""
    stub = stub_config(faults=Faults(silent=True))
    async with running_gateway(protocol, ranks=2, stub=stub, scheduling=MODES["queue"]) as stack:
        client = stack.client()
        pinned = [Generation(client, make_request(max_tokens=3, data_parallel_rank=0)) for _ in range(5)]
        await until(lambda: stack.router.live_count == 5, "the pinned ones to be accepted")
        free = [Generation(client, make_request(max_tokens=3)) for _ in range(5)]
        await until(lambda: stack.router.live_count == 10 and stack.table.in_flight == [2, 2], "both ranks to be full")
        await stack.ranks[0].kill()
        for call in pinned:
            outcome = await call.done()
            assert (outcome.reason, outcome.facts["rank"]) == (Reason.RANK_LOST, "0")
        stack.ranks[1].set_faults(silent=False)
        for call in free:
            (await call.done()).assert_complete(call.request)


@pytest.mark.parametrize("with_sentinel", [True, False], ids=["announced", "silently"])
async def test_a_dying_rank_draws_nothing_more_from_the_queue(protocol, with_sentinel):
    """Its last rows free its slot while its end is known but not yet announced."""
    queue = {"order": "fcfs", "max_in_flight_per_rank": 1}
    async with running_gateway(
        protocol, ranks=2, auto_step=False, scheduling={"mode": "queue", "queue": queue}
    ) as stack:
        (busy, busy_id), (last, last_id) = [await held(stack, rank) for rank in range(2)]
        client = stack.client()
        calls = [Generation(client, make_request(max_tokens=1)) for _ in range(50)]
        await until(lambda: stack.router.queue_depth == 50, "all of them to be queued")
        for _ in range(40):
            stack.ranks[1].send_rows([(last_id, [7], "")])
        stack.ranks[1].send_rows([(last_id, [7], "length")])
        stack.ranks[1]._serving._die(with_sentinel=with_sentinel)
        await until(lambda: stack.table.state[1] is RankState.LOST, "the loss")
        assert (await last.done()).text == [7] * 41
        # One or two may have left before the gateway could know.
        lost = 0
        assert stack.router.queue_depth >= 47
        await report(stack, 0, [(busy_id, [7], "length")], None)
        await busy.done()
        while not all(call.task.done() for call in calls):
            await stack.ranks[0].step()
            await asyncio.sleep(0)
        for call in calls:
            if call.outcome.status is None:
                call.outcome.assert_complete(call.request)
            else:
                assert call.outcome.reason in (Reason.RANK_LOST, Reason.SEND_FAILED)
                lost += 1
        assert lost <= 3
