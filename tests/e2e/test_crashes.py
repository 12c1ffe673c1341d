"""Processes that die without a word: a rank's, the gateway's, a client's. Only what was theirs is lost."""

import asyncio

import grpc
import pytest

from gateway.core.errors import Reason
from gateway.v1 import gateway_pb2
from gateway.v1.gateway_pb2_grpc import GatewayServiceStub
from tests.support.calls import Generation, generate, make_prompt, make_request
from tests.support.deployment import MAX_CONTEXT_TOKENS, Deployment, expected, health
from tests.support.grpcurl import json_documents
from tests.support.processes import WAIT_S, wait_until

pytestmark = pytest.mark.e2e

ENDLESS = MAX_CONTEXT_TOKENS - 100


async def waited(condition, what):
    await asyncio.to_thread(wait_until, condition, what)


async def started(client, requests):
    """The requests' streams, each with its first tokens."""
    generations = [Generation(client, request) for request in requests]
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(generation.first_token() for generation in generations))
    return generations


async def ranks_of(client):
    return list((await client.ListRanks(gateway_pb2.ListRanksRequest(), timeout=WAIT_S)).ranks)


async def test_a_killed_rank_takes_only_its_own_requests_along(connect):
    """Ranks 0 and 1 live in one process, rank 2 in another that is killed."""
    with Deployment("tokenspeed", ranks=3) as site:
        site.start_gateway()
        others, doomed = site.start_ranks(2), site.start_ranks(1, start_index=2)
        await asyncio.to_thread(site.wait_ready)
        client = GatewayServiceStub(connect(site))
        requests = [
            make_request(make_prompt(9, number), ENDLESS if number % 3 == 2 else 150, data_parallel_rank=number % 3)
            for number in range(12)
        ]
        generations = await started(client, requests)
        doomed.kill()
        for request, generation in zip(requests, generations, strict=True):
            outcome = await generation.done()
            if request.data_parallel_rank != 2:
                outcome.assert_complete(request)
                continue
            outcome.assert_prefix(request)
            assert outcome.text
            assert (outcome.code, outcome.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.RANK_LOST)
            assert outcome.facts["rank"] == "2"
            assert outcome.facts["retryable"] == "true"

        assert [rank.state for rank in await ranks_of(client)] == [
            *[gateway_pb2.RANK_STATE_READY] * 2,
            gateway_pb2.RANK_STATE_LOST,
        ]
        adds = others.total("adds_received")
        for number in range(6):
            unpinned = make_request(make_prompt(4, number))
            (await generate(client, unpinned)).assert_complete(unpinned)
        assert others.total("adds_received") == adds + 6
        pinned = make_request(data_parallel_rank=2)
        refused = await generate(client, pinned)
        assert (refused.code, refused.reason) == (grpc.StatusCode.FAILED_PRECONDITION, Reason.PINNED_RANK_UNAVAILABLE)

        site.start_ranks(1, start_index=2)
        await asyncio.to_thread(wait_until, lambda: site.states()[2] == "READY", "the rank to come back")
        back = (await ranks_of(client))[2]
        assert (back.incarnation, back.in_flight, back.state) == (2, 0, gateway_pb2.RANK_STATE_READY)
        assert not back.HasField("kv_usage"), "a new incarnation starts without a report"
        outcome = await generate(client, pinned)
        outcome.assert_complete(pinned)
        assert outcome.finish.rank == 2
        assert [rank.incarnation for rank in await ranks_of(client)] == [1, 1, 2]


async def test_a_killed_gateway_comes_back_to_its_running_ranks(protocol, connect):
    """It binds the recorded addresses, takes the ranks up without a handshake and clears what its past left there.

    The ranks are strict, as real ones: an id that is used twice would end them.
    """
    with Deployment(protocol, stub={"strict_vllm": True}, keeps_state=True) as site:
        site.start()
        (engine,) = site.engines
        names = [f"client-{number}" for number in range(4)]
        requests = [make_request(make_prompt(5, n), ENDLESS, request_id=name) for n, name in enumerate(names)]
        client = GatewayServiceStub(connect(site))
        generations = await started(client, requests)
        orphans = {wire_id for state in engine.ask("state") for wire_id in state["live"]}
        assert len(orphans) == 4
        registrations = len(engine.events("rank_registered"))
        site.gateway.kill()
        for generation in generations:
            outcome = await generation.done()
            outcome.assert_prefix(generation.request)
            assert outcome.code is grpc.StatusCode.UNAVAILABLE
        assert engine.total("live") == 4, "ranks don't notice"

        site.start_gateway()
        await asyncio.to_thread(site.wait_ready)
        changes = site.gateway.events("rank_state")
        assert [(change["cause"], change["incarnation"]) for change in changes] == [("reattached", 2)] * 2
        assert not site.gateway.events("rank_joining")
        await waited(lambda: engine.total("live") == 0, "the orphans to be aborted")
        assert engine.total("aborts_received") >= len(orphans)
        assert site.metric("rankgate_orphan_rows_total") > 0

        # The same clients come back with the same names.
        client = GatewayServiceStub(connect(site))
        again = [make_request(make_prompt(5, n), 20, request_id=name) for n, name in enumerate(names)]
        for request, outcome in zip(again, await asyncio.gather(*(generate(client, r) for r in again)), strict=True):
            outcome.assert_complete(request)
        assert engine.is_running
        states = engine.ask("state")
        assert [(state["phase"], state["fate"], state["incarnation"]) for state in states] == [
            ("serving", "alive", 1)
        ] * 2
        assert [state["bad_inputs"]["count"] for state in states] == [0, 0]
        assert len(engine.events("rank_registered")) == registrations
        ended = site.gateway.ends(len(names))
        assert sorted((event["request_id"], event["outcome"]) for event in ended) == [(name, "ok") for name in names]
        assert await asyncio.to_thread(site.gateway.stop) == 0


async def test_without_a_state_directory_ranks_have_to_dial_again(connect):
    with Deployment("vllm", ranks=1) as site:
        site.start()
        site.gateway.kill()
        site.start_gateway()
        await waited(lambda: site.gateway.events("started"), "the start")
        client = GatewayServiceStub(connect(site))
        assert [rank.state for rank in await ranks_of(client)] == [gateway_pb2.RANK_STATE_ABSENT]
        assert health(site.ports.grpc, "readiness") == "NOT_SERVING"
        assert health(site.ports.grpc, "liveness") == "SERVING"
        request = make_request()
        refused = await generate(client, request)
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.NO_ELIGIBLE_RANK)
        assert refused.retry_after_s
        site.engines[0].ask("restart", 0)
        await asyncio.to_thread(site.wait_ready)
        (await generate(client, request)).assert_complete(request)
        assert await asyncio.to_thread(site.engines[0].stop) == 0
        await waited(lambda: site.states() == ["LOST"], "the loss")
        assert await asyncio.to_thread(site.gateway.stop) == 0


async def test_a_killed_client_frees_its_rank(protocol, site):
    data = '{"prompt_token_ids": [5, 6, 7], "request_id": "killed", "sampling": {"max_tokens": 16000}}'
    arguments = ["-plaintext", "-d", data, site.ports.grpc, "gateway.v1.GatewayService/Generate"]
    (engine,) = site.engines
    aborts, repeated = engine.total("aborts_received"), site.metric("rankgate_repeated_aborts_total")
    client = site.process("killed-client", "grpcurl", *arguments)
    await waited(lambda: client.output.count("token_ids") > 2, "tokens at the client")
    assert engine.total("live") == 1
    client.kill()
    await waited(lambda: engine.total("live") == 0, "the rank to drop the request")
    assert engine.total("aborts_received") == aborts + 1
    # The last message may be cut off; everything before it is exact.
    whole = client.output[: client.output.rindex("\n}\n") + 3]
    tokens = [token for message in json_documents(whole) for token in message["token_ids"]]
    assert tokens == expected([5, 6, 7], len(tokens))
    await waited(lambda: site.metric("rankgate_live_requests") == 0, "the charges to be gone")
    ranks = site.call("ListRanks").message["ranks"]
    assert [rank["in_flight"] for rank in ranks] == [0, 0, 0]
    ends = site.gateway.ends(1, request_id="killed")
    assert [event["outcome"] for event in ends] == ["CANCELLED"]
    assert site.metric("rankgate_double_releases_total") == 0
    # At once, and not because the rank went on and its rows had no owner.
    assert site.metric("rankgate_repeated_aborts_total") == repeated
