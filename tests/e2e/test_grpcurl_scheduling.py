"""What a caller and an operator see of every reason that turns a request away, with the real grpcurl.

Two kinds of deployment, each started once: mode direct for both families, as what a rank registers decides there, and
mode queue. tests/e2e/test_scheduling.py has the rest: order, batches, cache, drain.
"""

import time

import pytest

from tests.support.calls import make_prompt, make_request
from tests.support.deployment import Deployment, expected
from tests.support.engine_edge import SERVICE_NAMES
from tests.support.processes import wait_until
from tests.support.refusals import assert_refused, by_rank, decision_of, explained, holding, silent, trailers

pytestmark = pytest.mark.e2e

DEADLINE_EXCEEDED = 4
PROMPT = [11, 22, 33]
KV_TOKENS = 2048
REUSE_AFTER_S = 3.0
ACTIVE_S = 0.1


def request(prompt_tokens=3, max_tokens=2, *, n=1, **fields):
    prompt = PROMPT if prompt_tokens == len(PROMPT) else make_prompt(prompt_tokens)
    return {"prompt_token_ids": prompt, "sampling": {"max_tokens": max_tokens, "n": n}} | fields


def held(prompt_tokens=3, max_tokens=2, *, n=1, **fields):
    return make_request(make_prompt(prompt_tokens), max_tokens, sampling={"n": n}, **fields)


def assert_served(site, data=None, **options):
    answer = site.call("Generate", data or request(), **options)
    assert answer.status is None, answer.status
    assert [token for each in answer.messages for token in each["token_ids"]] == expected(PROMPT, 2)


@pytest.fixture(scope="module", params=["vllm", "tokenspeed"])
def direct(request):
    """Two ranks with 2048 KV tokens each; each bound can be reached without reaching another one."""
    admission = {
        "max_in_flight": 20,
        "max_in_flight_per_rank": 8,
        "max_prompt_tokens": 4000,
        "max_kv_tokens": 8000,
        "id_reuse_after_s": REUSE_AFTER_S,
        "tenants": {
            "active_s": 0.1,
            # Light ones: while they count as active, calls without a tenant keep most of the gateway.
            "named": {
                "small": {"weight": 0.05, "max_in_flight": 2, "max_prompt_tokens": 40, "max_kv_tokens": 100},
                "big": {"weight": 0.05},
                "other": {"weight": 0.05},
            },
        },
    }
    # `single`: the engine itself takes any prompt, so its registered context is the model's.
    stub = {"scheduler": {"kv_tokens": KV_TOKENS, "kv_admission": "single"}}
    with Deployment(request.param, admission=admission, stub=stub, group={"min_ready": 2}) as site:
        yield site.start()


@pytest.fixture(scope="module")
def queued():
    """Two ranks that take one request each; everything else waits in the gateway."""
    scheduling = {
        "mode": "queue",
        "queue": {
            "order": "fcfs",
            "max_in_flight_per_rank": 1,
            "no_rank_wait_s": 0.5,
            "timeout_s": 60.0,
            "levels": [{"priority": 5, "max_depth": 2}, {"priority": 7, "timeout_s": 0.3}],
        },
    }
    with Deployment(
        "vllm",
        scheduling=scheduling,
        admission={
            "max_queue_depth": 24,
            "tenants": {"active_s": ACTIVE_S, "named": {"small": {"max_queue_depth": 2}}},
        },
        predictor={"prefill_ms": "0.5 * total_new_tokens", "step_ms": "5"},
        slo={"mode": "enforce", "ttft": [{"max_prompt_tokens": 100, "ttft_ms": 600_000}, {"ttft_ms": 500}]},
        group={"min_ready": 2},
    ) as site:
        yield site.start()


# --- what can never be taken -----------------------------------------------------------------


def test_a_prompt_that_no_kv_cache_can_hold(direct):
    answer = direct.call("Generate", request(KV_TOKENS + 10))
    decision = decision_of(direct, assert_refused(answer, "KV_TOO_SMALL", retryable=False))
    assert (decision["refusal"], decision["rank"]) == ("KV_TOO_SMALL", None)
    assert by_rank(decision, "reason") == ["kv_capacity"] * 2
    assert by_rank(explained(direct, request(KV_TOKENS + 10)), "reason") == ["kv_capacity"] * 2


def test_a_prompt_that_leaves_no_room_in_the_context(direct):
    answer = direct.call("Generate", request(16_384))
    assert_refused(answer, "PROMPT_TOO_LONG", retryable=False, prompt_tokens=16_384, limit_tokens=16_383)


# --- budgets ---------------------------------------------------------------------------------


GATEWAY_BUDGETS = {
    "sequences": ({"n": 16}, {"n": 5}, {"n": 21}, 20),
    "prompt_tokens": ({"prompt_tokens": 1500, "n": 2}, {"prompt_tokens": 600, "n": 2}, {"prompt_tokens": 4001}, 4000),
    "kv_tokens": ({"max_tokens": 1900, "n": 4}, {"max_tokens": 1900}, {"max_tokens": 1900, "n": 5}, 8000),
}
"""What is held, what is refused for now, what is refused for ever, and the limit."""


@pytest.mark.parametrize("budget", GATEWAY_BUDGETS)
def test_a_full_gateway_names_the_budget(direct, budget):
    hold, refused_now, refused_ever, limit = GATEWAY_BUDGETS[budget]
    facts = {"budget": budget, "limit": limit}
    counted = direct.metric("rankgate_rejections_total")
    lines = int(direct.metric("rankgate_requests_accepted_total"))
    with silent(direct), holding(direct, held(**hold)):
        answer = direct.call("Generate", request(**refused_now))
        metadata = assert_refused(answer, "GATEWAY_FULL", retryable=True, **facts)
        assert int(metadata["in_flight"]) + int(metadata["wanted"]) > limit >= int(metadata["wanted"])
        assert_refused(direct.call("Generate", request(**refused_ever)), "GATEWAY_FULL", retryable=False, **facts)
    assert direct.metric("rankgate_rejections_total") == counted + 2
    assert_served(direct)
    # Refused requests have no terminal line: what was held and what was served have theirs.
    direct.gateway.ends(lines + 2)


def test_the_standard_service_says_the_same(direct):
    key = "max_tokens" if direct.protocol == "vllm" else "max_new_tokens"
    data = {"tokenized": {"input_ids": PROMPT}, "sampling_params": {key: 2, "n": 5}}
    with silent(direct), holding(direct, held(n=16)):
        answer = direct.call(f"{SERVICE_NAMES[direct.protocol]}/Generate", data)
        assert_refused(answer, "GATEWAY_FULL", retryable=True, budget="sequences", in_flight=16, wanted=5, limit=20)


TENANT_BUDGETS = {
    "sequences": ({"n": 2}, {}, {"n": 3}, 2),
    "prompt_tokens": ({"prompt_tokens": 30}, {"prompt_tokens": 20}, {"prompt_tokens": 41}, 40),
    "kv_tokens": ({"max_tokens": 80}, {"max_tokens": 30}, {"max_tokens": 98}, 100),
}


@pytest.mark.parametrize("budget", TENANT_BUDGETS)
def test_a_tenant_at_its_limit_is_told_which_and_others_are_served(direct, budget):
    hold, refused_now, refused_ever, limit = TENANT_BUDGETS[budget]
    facts = {"budget": budget, "limit": limit, "tenant": "small"}
    own = {"x-tenant-id": "small"}
    with silent(direct, 0), holding(direct, held(**hold, data_parallel_rank=0), x_tenant_id="small"):
        answer = direct.call("Generate", request(**refused_now), headers=own)
        assert_refused(answer, "TENANT_LIMIT", retryable=True, **facts)
        answer = direct.call("Generate", request(**refused_ever), headers=own)
        assert_refused(answer, "TENANT_LIMIT", retryable=False, **facts)
        assert_served(direct, request(data_parallel_rank=1), headers={"x-tenant-id": "other"})
        assert_served(direct, request(data_parallel_rank=1))


def test_a_tenant_may_not_take_the_share_of_another_active_one(direct):
    with silent(direct), holding(direct, held()), holding(direct, held(n=10), x_tenant_id="big"):
        answer = direct.call("Generate", request(), headers={"x-tenant-id": "big"})
        assert_refused(answer, "TENANT_LIMIT", retryable=True, budget="share", tenant="big", in_flight=10, limit=1)


# --- ranks -----------------------------------------------------------------------------------


def test_full_ranks(direct):
    with silent(direct), holding(direct, held(n=8, data_parallel_rank=0)):
        answer = direct.call("Generate", request(data_parallel_rank=0))
        decision = decision_of(direct, assert_refused(answer, "RANKS_FULL", retryable=True, rank=0))
        assert by_rank(decision, "reason") == ["full", "not_pinned"]
        assert explained(direct, request())["rank"] == 1
        with holding(direct, held(n=8)):
            metadata = assert_refused(direct.call("Generate", request()), "RANKS_FULL", retryable=True)
            assert by_rank(decision_of(direct, metadata), "reason") == ["full"] * 2
            assert explained(direct, request())["refusal"] == "RANKS_FULL"


def test_no_free_kv_tokens(direct):
    with silent(direct), holding(direct, held(1500, n=2)):
        metadata = assert_refused(direct.call("Generate", request(700)), "KV_FULL", retryable=True)
        decision = decision_of(direct, metadata)
        assert (decision["refusal"], by_rank(decision, "reason")) == ("KV_FULL", ["kv_fit"] * 2)
        assert explained(direct, request())["rank"] in (0, 1), "a short one still fits"


def test_lost_ranks(direct):
    (engine,) = direct.engines
    engine.ask("kill", 1)
    wait_until(lambda: direct.states()[1] == "LOST", "rank 1 to be lost")
    answer = direct.call("Generate", request(data_parallel_rank=1))
    decision = decision_of(direct, assert_refused(answer, "PINNED_RANK_UNAVAILABLE", retryable=True, rank=1))
    assert by_rank(decision, "reason") == ["not_pinned", "lost"]
    assert_served(direct)
    engine.ask("kill", 0)
    wait_until(lambda: direct.states()[0] == "LOST", "rank 0 to be lost")
    metadata = assert_refused(direct.call("Generate", request()), "NO_ELIGIBLE_RANK", retryable=True)
    assert by_rank(decision_of(direct, metadata), "reason") == ["lost"] * 2
    for rank in range(2):
        engine.ask("restart", rank)
    direct.wait_ready()
    assert_served(direct)


# --- ids -------------------------------------------------------------------------------------


def test_an_id_is_taken_while_it_lives_and_for_a_while_after(direct):
    mine = request(request_id="mine")
    with silent(direct), holding(direct, held(request_id="mine")):
        answer = direct.call("Generate", mine)
        assert_refused(answer, "DUPLICATE_REQUEST_ID", retryable=False, request_id="mine")
        assert "a live request" in answer.status["message"]
    answer = direct.call("Generate", mine)
    assert_refused(answer, "DUPLICATE_REQUEST_ID", retryable=False, request_id="mine")
    assert "ended less than 3 s ago" in answer.status["message"]
    wait_until(lambda: direct.call("Generate", mine).status is None, "the id to be free again")


def test_without_a_cache_there_is_nothing_to_flush(direct):
    assert direct.call("AdminService/FlushResponseCache").message == {"enabled": False, "entries": "0", "bytes": "0"}


# --- the queue -------------------------------------------------------------------------------


def test_the_queue_and_its_levels_and_tenants_are_bounded(queued):
    with silent(queued), holding(queued, held(n=2)):
        assert by_rank(explained(queued, request()), "gate") == ["in_flight"] * 2
        with holding(queued, held(n=24)):
            facts = {"queue_depth": 24, "limit": 24}
            assert_refused(queued.call("Generate", request()), "QUEUE_FULL", retryable=True, **facts)
            assert_refused(queued.call("Generate", request(n=25)), "QUEUE_FULL", retryable=False, limit=24)
        with holding(queued, held(n=2, priority=5)):
            answer = queued.call("Generate", request(priority=5))
            assert_refused(answer, "QUEUE_FULL", retryable=True, queue_depth=2, limit=2)
        small = {"x-tenant-id": "small"}
        with holding(queued, held(n=2), x_tenant_id="small"):
            answer = queued.call("Generate", request(), headers=small)
            assert_refused(answer, "TENANT_LIMIT", retryable=True, budget="queue_depth", tenant="small", limit=2)
        with holding(queued, held(n=1)), holding(queued, held(n=12), x_tenant_id="big"):
            answer = queued.call("Generate", request(), headers={"x-tenant-id": "big"})
            assert_refused(answer, "TENANT_LIMIT", retryable=True, budget="queue_share", tenant="big", in_flight=12)
    assert queued.metric("rankgate_queue_depth") == 0
    time.sleep(2 * ACTIVE_S)  # or the next test would find half of the queue reserved for "big"


@pytest.mark.parametrize(
    ("fields", "headers", "wait_s"),
    [
        ({}, {"x-queue-timeout-ms": "200"}, 0.2),
        ({"priority": 7}, {}, 0.3),
        ({"priority": 7}, {"x-queue-timeout-ms": "60000"}, 0.3),
    ],
    ids=["asked for", "of the level", "cannot be lengthened"],
)
def test_waiting_too_long(queued, fields, headers, wait_s):
    adds = queued.engines[0].total("adds_received")
    with silent(queued), holding(queued, held(n=2)):
        answer = queued.call("Generate", request(**fields, request_id=f"waits-{fields}-{wait_s}"), headers=headers)
        metadata = assert_refused(answer, "QUEUE_TIMEOUT", retryable=True)
        assert wait_s * 1e3 <= float(metadata["waited_ms"]) < 20_000
    assert queued.engines[0].total("adds_received") == adds + 2, "no rank saw it"


def test_the_deadline_holds_in_the_queue(queued):
    adds = queued.engines[0].total("adds_received")
    with silent(queued), holding(queued, held(n=2)):
        answer = queued.call("Generate", request(request_id="late"), max_time_s=0.4)
        assert answer.status["code"] == DEADLINE_EXCEEDED
        wait_until(lambda: queued.metric("rankgate_queue_depth") == 0, "the late one to leave the queue")
    (ended,) = queued.gateway.ends(1, request_id="late")
    assert (ended["outcome"], ended["rank"], ended["attempts"]) == ("DEADLINE_EXCEEDED", None, 0)
    assert ended["queue_ms"] == ended["e2e_ms"] > 300
    assert queued.engines[0].total("adds_received") == adds + 2


def test_an_objective_that_can_t_be_met_now_or_ever(queued):
    with silent(queued), holding(queued, held(n=2)), holding(queued, held(100, n=20)):
        # 20 x 50 ms are queued before two ranks, and 100 ms are its own: 600 ms, of 500.
        answer = queued.call("Generate", request(200))
        metadata = assert_refused(answer, "SLO_UNATTAINABLE", retryable=True, objective_ms=500.0, predicted_ms=600.0)
        assert float(metadata["wait_ms"]) == 500.0
    answer = queued.call("Generate", request(1001))
    assert_refused(answer, "SLO_UNATTAINABLE", retryable=False, objective_ms=500.0, predicted_ms=500.5, wait_ms=0.0)
    assert queued.metric("rankgate_slo_rejections_total") >= 2


def test_no_rank_for_longer_than_a_restart_takes(queued):
    (engine,) = queued.engines
    for rank in range(2):
        engine.ask("kill", rank)
    wait_until(lambda: queued.states() == ["LOST"] * 2, "both ranks to be lost")
    answer = queued.call("Generate", request(data_parallel_rank=1))
    decision = decision_of(queued, assert_refused(answer, "PINNED_RANK_UNAVAILABLE", retryable=True, rank=1))
    assert by_rank(decision, "reason") == ["not_pinned", "lost"]
    assert_refused(queued.call("Generate", request()), "NO_ELIGIBLE_RANK", retryable=True, waited_s=0.5)
    for rank in range(2):
        engine.ask("restart", rank)
    queued.wait_ready()
    assert_served(queued)


def test_the_decision_tells_how_a_request_came_out_of_the_queue(queued):
    with silent(queued, 0), holding(queued, held(data_parallel_rank=0)):
        text = queued.call("Generate", request(data_parallel_rank=1), options=("-v",)).text
        decision = decision_of(queued, trailers(text))
        assert (decision["queue"]["reason"], by_rank(decision, "gate")) == ("idle_rank", ["in_flight", "open"])
        assert decision["batch"] is None
        assert decision["prediction"]["predicted_ms"] == 1.5
        # One step of the rank: 5 ms on an idle machine.
        assert decision["prediction"]["actual_ms"] >= 4
        shown = explained(queued, request())
        assert (shown["queue"]["depth"], shown["rank"], shown["prediction"]["actual_ms"]) == (0, 1, None)
    assert float(trailers(text)["x-rankgate-queue-ms"]) == pytest.approx(decision["queue"]["queued_ms"], abs=0.01)
