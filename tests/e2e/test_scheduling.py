"""The installed commands with batches, preserved order and a response cache; and a drain while requests wait for ranks.

tests/e2e/test_grpcurl_scheduling.py has the modes direct and queue.
"""

import asyncio
import json
import signal

import pytest

from gateway.v1.gateway_pb2_grpc import GatewayServiceStub
from tests.support.calls import generate, make_prompt, make_request
from tests.support.deployment import Deployment, expected, health
from tests.support.engine_edge import SERVICE_NAMES
from tests.support.processes import ROOT, WAIT_S, run, wait_until
from tests.support.refusals import (
    assert_refused,
    by_rank,
    decision_of,
    documented,
    explained,
    holding,
    silent,
    trailers,
)

pytestmark = pytest.mark.e2e

PROMPT = [11, 22, 33]
MAX_AGE_S = 3.0
GREEDY = {"temperature": 0.0}


def request(max_tokens=2, *, n=1, sampling=None, **fields):
    return {"prompt_token_ids": PROMPT, "sampling": {"max_tokens": max_tokens, "n": n} | (sampling or {})} | fields


@pytest.fixture(scope="module")
def batched():
    """One rank that takes one batch at a time; answers leave in order, and may be stored."""
    with Deployment(
        "tokenspeed",
        ranks=1,
        scheduling={
            "mode": "batch",
            "queue": {"order": "fcfs"},
            "batch": {"max_requests": 4, "max_in_flight_batches": 1, "release_at": "finish"},
        },
        group={"min_ready": 1, "budget": {"max_prompt_tokens": 1500}},
        ordering="preserve",
        preserve={"domain": "tenant", "max_places": 3, "max_held_bytes": 4000},
        limits={"default_deadline_s": 1.5},
        response_cache={"max_bytes": 1_000_000, "coalesce": True},
        predictor={"prefill_ms": "2 + 0.1 * total_new_tokens"},
    ) as site:
        yield site.start()


# --- batches ---------------------------------------------------------------------------------


def test_what_goes_together_says_so(batched):
    """Six sequences at an idle rank: four fill a batch at once, the other two wait until it is over."""
    text = batched.call("Generate", request(4, n=6), options=("-v",)).text
    first = decision_of(batched, trailers(text))
    decisions = batched.call("AdminService/ListDecisions", {"limit": 6}).message["decisions"][::-1]
    assert decisions[0] == first
    sizes = [(decision["batch"]["size"], decision["batch"]["reason"]) for decision in decisions]
    assert sizes[:4] == [(4, "batch_full")] * 4
    assert sizes[4:] == [(2, "idle_rank")] * 2
    numbers = [decision["batch"]["number"] for decision in decisions]
    assert len(set(numbers)) == 2
    assert numbers == sorted(numbers)
    assert {decision["queue"]["reason"] for decision in decisions[:4]} == {"batch_full"}
    # Four prompts were prefilled before the other two could go, and what that took is known.
    assert decisions[4]["queue"]["queued_ms"] > max(decision["queue"]["queued_ms"] for decision in decisions[:4])
    assert {decision["prediction"]["predicted_ms"] for decision in decisions} == {2.3}
    # A rank's time is given to one of those that start together.
    for batch in (decisions[:4], decisions[4:]):
        assert sum(decision["prediction"]["actual_ms"] > 0 for decision in batch) >= 1
    (ended,) = batched.gateway.ends(1, decision_id=first["id"])
    assert ended["batch"] == numbers[-1]


def test_explain_shows_a_rank_that_has_its_batches(batched):
    with silent(batched), holding(batched, make_request(), timeout_s=WAIT_S):
        decision = explained(batched, request())
        assert by_rank(decision, "gate") == ["batches"]
        assert decision["queue"]["depth"] == 0
    assert by_rank(explained(batched, request()), "gate") == ["open"]


def test_a_prompt_that_no_group_s_budget_allows(batched):
    answer = batched.call("Generate", request(prompt_token_ids=make_prompt(1600)))
    metadata = assert_refused(answer, "PROMPT_TOO_LONG", retryable=False)
    assert by_rank(decision_of(batched, metadata), "reason") == ["group_budget"]


# --- order -----------------------------------------------------------------------------------


def test_a_full_order_says_which_bound(batched):
    with silent(batched), holding(batched, make_request(), timeout_s=WAIT_S):
        # The first of an order streams live and is charged nothing; 1001 tokens behind it may take 4004 bytes, more
        # than there are even when nobody else waits.
        metadata = assert_refused(batched.call("Generate", request(1001)), "ORDER_FULL", retryable=False, bound="bytes")
        assert (metadata["places"], metadata["held_bytes"]) == ("1", "0")
        with holding(batched, make_request(), make_request(), timeout_s=WAIT_S):
            answer = batched.call("Generate", request())
            assert_refused(answer, "ORDER_FULL", retryable=True, bound="places", places=3, held_bytes=32)
    assert batched.metric("rankgate_ordering_places") == batched.metric("rankgate_ordering_held_bytes") == 0


def test_the_default_deadline_ends_what_is_queued(batched):
    without_deadline = ("-max-time", "0")
    with silent(batched), holding(batched, make_request(), timeout_s=WAIT_S, x_tenant_id="other"):
        answer = batched.call("Generate", request(request_id="late"), options=without_deadline)
    assert_refused(answer, "DEADLINE_EXCEEDED", retryable=False)
    (ended,) = batched.gateway.ends(1, request_id="late")
    assert (ended["outcome"], ended["rank"]) == ("DEADLINE_EXCEEDED", None)
    assert ended["e2e_ms"] >= 1500


# --- the response cache ----------------------------------------------------------------------


def test_a_stored_answer_is_told_apart_and_can_be_flushed(batched):
    greedy = request(5, n=2, sampling=GREEDY)
    adds = batched.engines[0].total("adds_received")
    miss, hit = (batched.call("Generate", greedy, options=("-v",)).text for _ in range(2))
    assert batched.engines[0].total("adds_received") == adds + 2
    assert "x-rankgate-cache" not in trailers(miss)
    assert trailers(hit)["x-rankgate-cache"] == "hit"
    assert not {"x-rankgate-rank", "x-rankgate-decision-id"} & trailers(hit).keys()
    answer = batched.call("Generate", greedy)
    for index in range(2):
        own = [message for message in answer.messages if message["index"] == index]
        assert [token for message in own for token in message["token_ids"]] == expected(PROMPT, 5)
        finish = own[-1]["finish"]
        assert (finish["attempts"], finish["completion_tokens"]) == (0, 5)
        assert "rank" not in finish
    for headers, fields in (({"x-cache-salt": "s"}, {}), ({"x-tenant-id": "t"}, {}), ({}, {"no_cache": True})):
        text = batched.call("Generate", greedy | fields, headers=headers, options=("-v",)).text
        assert "x-rankgate-cache" not in trailers(text), (headers, fields)
    entries = batched.metric("rankgate_response_cache_entries")
    flushed = batched.call("AdminService/FlushResponseCache").message
    assert flushed["enabled"] is True
    assert float(flushed["entries"]) == entries >= 3
    assert float(flushed["bytes"]) > 0
    assert batched.call("AdminService/FlushResponseCache").message == {"enabled": True, "entries": "0", "bytes": "0"}
    assert "x-rankgate-cache" not in trailers(batched.call("Generate", greedy, options=("-v",)).text)


async def test_identical_requests_at_once_cost_one(batched, connect):
    (engine,) = batched.engines
    adds = await asyncio.to_thread(engine.total, "adds_received")
    client = GatewayServiceStub(connect(batched))
    requests = [make_request(make_prompt(9, 1), 30, sampling=GREEDY) for _ in range(2)]
    outcomes = await asyncio.gather(*(generate(client, each) for each in requests))
    for each, outcome in zip(requests, outcomes, strict=True):
        outcome.assert_complete(each)
    assert await asyncio.to_thread(engine.total, "adds_received") == adds + 1
    assert sorted(outcome.finish.attempts for outcome in outcomes) == [0, 1]


# --- without ranks ---------------------------------------------------------------------------


async def test_what_waits_for_ranks_ends_by_age_and_a_drain_refuses_what_comes(connect):
    with Deployment(
        "vllm",
        scheduling={"mode": "queue", "queue": {"no_rank_wait_s": 600.0}},
        limits={"max_request_age_s": MAX_AGE_S},
    ) as site:
        await asyncio.to_thread(site.start_gateway)
        await asyncio.to_thread(wait_until, lambda: health(site.ports.grpc, "liveness") == "SERVING", "the gateway")
        channel = connect(site)
        await asyncio.wait_for(channel.channel_ready(), WAIT_S)
        assert health(site.ports.grpc, "readiness") == "NOT_SERVING"
        pinned = await asyncio.to_thread(site.call, "Generate", request(data_parallel_rank=0))
        metadata = assert_refused(pinned, "PINNED_RANK_UNAVAILABLE", retryable=True, rank=0)
        decision = await asyncio.to_thread(decision_of, site, metadata)
        assert by_rank(decision, "reason") == ["absent", "not_pinned"]

        waits = asyncio.create_task(asyncio.to_thread(site.call, "Generate", request(request_id="waits")))
        await asyncio.to_thread(wait_until, lambda: site.metric("rankgate_queue_depth") == 1, "it to be queued")
        shown = await asyncio.to_thread(explained, site, request())
        assert (shown["refusal"], shown["queue"]["depth"]) == ("NO_ELIGIBLE_RANK", 1)
        assert by_rank(shown, "gate") == ["not_open"] * 2

        site.gateway.send(signal.SIGTERM)
        await asyncio.to_thread(wait_until, lambda: site.gateway.events("draining"), "the drain")
        for service, data in (
            ("Generate", request()),
            (f"{SERVICE_NAMES['vllm']}/Generate", {"tokenized": {"input_ids": PROMPT}, "sampling_params": {}}),
        ):
            refused = await asyncio.to_thread(site.call, service, data)
            assert_refused(refused, "DRAINING", retryable=True, has_hint=False)
        assert_refused(await waits, "MAX_AGE_EXCEEDED", retryable=False)
        assert await asyncio.to_thread(site.gateway.wait) == 0
        (ended,) = site.gateway.events("request_ended")
        assert (ended["outcome"], ended["rank"]) == ("MAX_AGE_EXCEEDED", None)
        assert ended["e2e_ms"] >= 1e3 * MAX_AGE_S


# --- the shipped configurations and the documented reasons -----------------------------------


@pytest.mark.parametrize("name", ["queue", "batch"])
def test_the_shipped_configurations_are_accepted(name):
    done = run("rankgate", "check-config", ROOT / f"configs/{name}.yaml")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_table_of_reasons_is_read():
    assert len(documented()) > 25
    assert documented()["QUEUE_FULL"] == (8, "yes")
    assert json.dumps(documented()["SLO_UNATTAINABLE"]) == '[8, "depends"]'
