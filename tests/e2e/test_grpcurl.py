"""What an operator types: the real grpcurl against a running gateway of each engine family."""

import json

import pytest

from tests.support.deployment import expected, health
from tests.support.engine_edge import SERVICE_NAMES
from tests.support.grpcurl import grpcurl
from tests.support.processes import wait_until

pytestmark = pytest.mark.e2e

HEALTH = "grpc.health.v1.Health"
REFLECTION = "grpc.reflection.v1alpha.ServerReflection"
GATEWAY, ADMIN = "gateway.v1.GatewayService", "gateway.v1.AdminService"
INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, UNIMPLEMENTED = 3, 4, 5, 12
PROMPT = [11, 22, 33]


def request(max_tokens=4, **fields):
    return {"prompt_token_ids": PROMPT, "sampling": {"max_tokens": max_tokens}} | fields


def engine_request(protocol, max_tokens=4, **fields):
    key = "max_tokens" if protocol == "vllm" else "max_new_tokens"
    return {"tokenized": {"input_ids": PROMPT}, "sampling_params": {key: max_tokens}} | fields


def tokens_of(answer, index=0):
    assert answer.status is None, answer.status
    return [token for message in answer.messages if message["index"] == index for token in message["token_ids"]]


def trailers(text):
    """The trailers that `grpcurl -v` printed."""
    lines = text.partition("Response trailers received:\n")[2].splitlines()
    return dict(line.split(": ", 1) for line in lines if ": " in line)


# --- what is there ---------------------------------------------------------------------------


def test_list_names_every_service_of_each_listener(site):
    grpc, admin = grpcurl(site.ports.grpc, "list").text.split(), grpcurl(site.ports.admin, "list").text.split()
    assert sorted(grpc) == sorted([GATEWAY, SERVICE_NAMES[site.protocol], HEALTH, REFLECTION])
    assert sorted(admin) == sorted([ADMIN, HEALTH, REFLECTION])


def test_describe_shows_services_and_messages(site):
    whole = grpcurl(site.ports.grpc, "describe").text
    for method in ("Generate", "GenerateMany", "Abort", "ListRanks", "WatchRanks"):
        assert f"rpc {method} ( " in whole
    message = grpcurl(site.ports.grpc, "describe", "gateway.v1.GenerateRequest").text
    assert "repeated uint32 prompt_token_ids = 2;" in message
    assert "optional int32 data_parallel_rank = 4;" in message
    family = SERVICE_NAMES[site.protocol].rpartition(".")[0]
    assert "data_parallel_rank" in grpcurl(site.ports.grpc, "describe", f"{family}.GenerateRequest").text
    admin = grpcurl(site.ports.admin, "describe", ADMIN).text
    for method in ("GetEffectiveConfig", "Explain", "GetDecision", "ListDecisions"):
        assert f"rpc {method} ( " in admin


def test_every_health_name_is_serving(site):
    for address in (site.ports.grpc, site.ports.admin):
        assert grpcurl(address, f"{HEALTH}/Check").message == {"status": "SERVING"}
    for name in ("readiness", "liveness", GATEWAY, ADMIN, SERVICE_NAMES[site.protocol]):
        assert health(site.ports.grpc, name) == "SERVING"
    assert health(site.ports.grpc, "nobody") == "NOT_FOUND"


def test_the_health_service_lists_its_names(site):
    statuses = grpcurl(site.ports.grpc, f"{HEALTH}/List").message["statuses"]
    assert statuses.keys() == {"", "readiness", "liveness", GATEWAY, ADMIN, SERVICE_NAMES[site.protocol]}
    assert {status["status"] for status in statuses.values()} == {"SERVING"}


def test_operators_methods_are_not_on_the_clients_port(site):
    answer = grpcurl(site.ports.grpc, f"{ADMIN}/ListDecisions")
    assert answer.status["code"] == UNIMPLEMENTED or "does not expose service" in answer.status["message"]


# --- generate --------------------------------------------------------------------------------


def test_generate_streams_the_expected_tokens(site):
    answer = site.call("Generate", request(9, request_id="typed-1"))
    assert tokens_of(answer) == expected(PROMPT, 9)
    assert len(answer.messages) > 1
    assert {message["request_id"] for message in answer.messages} == {"typed-1"}
    assert all("finish" not in message for message in answer.messages[:-1])
    finish = answer.messages[-1]["finish"]
    assert finish.pop("rank") in range(3)
    assert finish == {
        "reason": "FINISH_REASON_LENGTH",
        "prompt_tokens": 3,
        "completion_tokens": 9,
        "cached_tokens": 0,
        "attempts": 1,
    }


def test_generate_several_sequences_and_seeds(site):
    answer = site.call("Generate", request(5) | {"sampling": {"max_tokens": 5, "n": 2, "seed": 7}})
    # One seed for all would make them equal: each sequence gets the next one.
    assert [tokens_of(answer, index) for index in range(2)] == [expected(PROMPT, 5, seed=7 + n) for n in range(2)]


def test_generate_many_requests_on_one_stream(site):
    starts = [{"start": request(4, request_id=f"m{number}", data_parallel_rank=number)} for number in range(3)]
    bad = {"start": request(4, request_id="bad", data_parallel_rank=9)}
    answer = site.call("GenerateMany", "\n".join(map(json.dumps, [*starts, bad])))
    assert answer.status is None
    outputs = [output for message in answer.messages for output in message.get("outputs", ())]
    for number in range(3):
        own = [output for output in outputs if output["request_id"] == f"m{number}"]
        assert [token for output in own for token in output["token_ids"]] == expected(PROMPT, 4)
        assert own[-1]["finish"]["rank"] == number
    (error,) = [error for message in answer.messages for error in message.get("errors", ())]
    assert error["request_id"] == "bad"
    assert error["status"]["details"][0]["reason"] == "INVALID_RANK"


def test_abort_of_an_unknown_id_succeeds(site):
    assert site.call("Abort", {"request_id": "never seen"}).message == {}


def test_the_request_id_of_the_metadata_comes_back(site):
    text = site.call("Generate", request(2), headers={"x-request-id": "from-header"}, options=("-v",)).text
    headers = text.partition("Response headers received:\n")[2].partition("\n\n")[0]
    assert "x-request-id: from-header" in headers
    assert '"request_id": "from-header"' in text
    known = {"x-request-id", "x-rankgate-rank", "x-rankgate-decision-id", "x-rankgate-queue-ms"}
    assert trailers(text).keys() == known
    assert trailers(text)["x-request-id"] == "from-header"
    refused = site.call("Generate", request(data_parallel_rank=9), headers={"x-request-id": "no"}, options=("-v",))
    assert "x-request-id: no" in refused.text.partition("Response")[2]


def test_a_missing_request_id_is_made_up(site):
    (first, second) = [site.call("Generate", request(1)).message["request_id"] for _ in range(2)]
    assert first
    assert first != second


# --- ranks and pins --------------------------------------------------------------------------


def test_list_ranks_prints_every_rank_zero_included(site):
    answer = site.call("ListRanks")
    assert '"rank": 0,' in answer.text
    ranks = answer.message["ranks"]
    assert [(rank["rank"], rank["group_rank"], rank["group"]) for rank in ranks] == [(n, n, "main") for n in range(3)]
    assert {rank["state"] for rank in ranks} == {"RANK_STATE_READY"}
    assert {rank["incarnation"] for rank in ranks} == {"1"}
    assert site.call("WatchRanks", max_time_s=1).messages[0]["ranks"] != []


@pytest.mark.parametrize("rank", range(3))
def test_a_pin_is_honoured(site, rank):
    text = site.call("Generate", request(data_parallel_rank=rank), options=("-v",)).text
    assert f'"rank": {rank},' in text
    assert trailers(text)["x-rankgate-rank"] == str(rank)
    decision_id = int(trailers(text)["x-rankgate-decision-id"])
    decision = site.call("AdminService/GetDecision", {"decision_id": decision_id}).message["decision"]
    assert (decision["rank"], decision["pinned_rank"]) == (rank, rank)


def test_a_pin_by_metadata_is_honoured_by_both_services(site):
    pin = {"x-data-parallel-rank": "2"}
    assert site.call("Generate", request(), headers=pin).messages[-1]["finish"]["rank"] == 2
    service = f"{SERVICE_NAMES[site.protocol]}/Generate"
    for data, headers in (
        (engine_request(site.protocol), pin),
        (engine_request(site.protocol, data_parallel_rank=2), None),
    ):
        text = site.call(service, data, headers=headers, options=("-v",)).text
        assert trailers(text)["x-rankgate-rank"] == "2"


PINS = {
    "field -1": ({"data_parallel_rank": -1}, {}, "-1"),
    "field N": ({"data_parallel_rank": 3}, {}, "3"),
    "metadata -1": ({}, {"x-data-parallel-rank": "-1"}, "-1"),
    "metadata N": ({}, {"x-data-parallel-rank": "3"}, "3"),
    "metadata x": ({}, {"x-data-parallel-rank": "x"}, "x"),
    "field and metadata differ": ({"data_parallel_rank": 1}, {"x-data-parallel-rank": "2"}, "1"),
}


@pytest.mark.parametrize("case", PINS)
def test_a_bad_pin_is_refused_with_the_valid_range(site, case):
    fields, headers, named = PINS[case]
    adds = site.engines[0].total("adds_received")
    answers = [
        site.call("Generate", request(**fields), headers=headers),
        site.call(f"{SERVICE_NAMES[site.protocol]}/Generate", engine_request(site.protocol, **fields), headers=headers),
    ]
    for answer in answers:
        assert answer.refused() == (INVALID_ARGUMENT, "INVALID_RANK")
        assert "valid ranks are 0..2" in answer.status["message"]
        assert answer.info["domain"] == "rankgate"
        facts = {"rank": named, "valid_min": "0", "valid_max": "2", "retryable": "false"}
        assert answer.info["metadata"] == facts
        assert answer.messages == []
    assert site.engines[0].total("adds_received") == adds


# --- deadlines -------------------------------------------------------------------------------


def test_a_deadline_that_expires_ends_the_request_at_its_rank(site):
    aborts = site.engines[0].total("aborts_received")
    answer = site.call("Generate", request(16_000, request_id="late"), max_time_s=0.5)
    assert answer.status["code"] == DEADLINE_EXCEEDED
    received = tokens_of(answer._replace(status=None))
    assert received == expected(PROMPT, len(received))
    wait_until(lambda: site.engines[0].total("live") == 0, "the rank to drop the request")
    assert site.engines[0].total("aborts_received") == aborts + 1
    ended = site.gateway.ends(1, request_id="late")
    assert [event["outcome"] for event in ended] == ["DEADLINE_EXCEEDED"]


# --- the standard engine service -------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [True, False])
def test_the_standard_service_generates(site, is_stream):
    data = engine_request(site.protocol, 5, request_id="std", stream=is_stream)
    answer = site.call(f"{SERVICE_NAMES[site.protocol]}/Generate", data)
    assert answer.status is None
    chunks = [message["chunk"] for message in answer.messages if "chunk" in message]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == (expected(PROMPT, 5) if is_stream else [])
    complete = answer.messages[-1]["complete"]
    assert complete["output_ids"] == expected(PROMPT, 5)
    assert (complete["finish_reason"], complete["prompt_tokens"], complete["completion_tokens"]) == ("length", 3, 5)


def test_the_standard_service_shows_one_engine_with_all_ranks(site):
    service = SERVICE_NAMES[site.protocol]
    assert site.call(f"{service}/HealthCheck").message["healthy"] is True
    assert site.call(f"{service}/GetModelInfo").message["served_model_name"] == "m"
    server = site.call(f"{service}/GetServerInfo").message
    size = server["data_parallel_size"] if site.protocol == "vllm" else server["server_args"]["dp_size"]
    assert size == 3
    loads = site.call(f"{service}/GetLoads", options=("-emit-defaults",)).message
    assert [load["dp_rank"] for load in loads["loads"]] == [0, 1, 2]
    assert site.call(f"{service}/FlushCache").status["code"] == UNIMPLEMENTED
    aborted = {"request_ids": ["x"]} if site.protocol == "vllm" else {"request_id": "x"}
    assert site.call(f"{service}/Abort", aborted).status is None
