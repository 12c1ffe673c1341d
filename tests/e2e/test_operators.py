"""What operators ask a running gateway, with the real grpcurl and with its own commands; and how errors look."""

import asyncio
import hashlib
import json

import pytest

from tests.support.processes import free_port, run, wait_until

pytestmark = pytest.mark.e2e

INVALID_ARGUMENT, NOT_FOUND = 3, 5


def request(max_tokens=4, **fields):
    return {"prompt_token_ids": [11, 22, 33], "sampling": {"max_tokens": max_tokens}} | fields


def test_explain_decides_without_sending(site):
    adds = site.engines[0].total("adds_received")
    decision = site.call("AdminService/Explain", {"request": request()}).message["decision"]
    assert [row["rank"] for row in decision["ranks"]] == [0, 1, 2]
    assert all({"cost", "reason", "variables"} <= row.keys() for row in decision["ranks"])
    assert decision["rank"] in range(3)
    refused = site.call("AdminService/Explain", {"request": request(data_parallel_rank=7)})
    assert refused.refused() == (INVALID_ARGUMENT, "INVALID_RANK")
    assert site.engines[0].total("adds_received") == adds


def test_decisions_are_listed_newest_first(site):
    pins = [2, 0, 1]
    for rank in pins:
        site.call("Generate", request(1, data_parallel_rank=rank))
    decisions = site.call("AdminService/ListDecisions", {"limit": 3}).message["decisions"]
    assert [decision["rank"] for decision in decisions] == pins[::-1]
    one = site.call("AdminService/GetDecision", {"decision_id": decisions[1]["id"]}).message["decision"]
    assert one == decisions[1]
    unknown = site.call("AdminService/GetDecision", {"decision_id": 10**9})
    assert unknown.refused() == (NOT_FOUND, "DECISION_NOT_FOUND")
    for limit in (0, 1001):
        assert site.call("AdminService/ListDecisions", {"limit": limit}).refused()[1] == "INVALID_REQUEST"


def test_the_effective_configuration_is_complete_and_hashed(site):
    answer = site.call("AdminService/GetEffectiveConfig").message
    assert hashlib.sha256(answer["json"].encode()).hexdigest() == answer["sha256"]
    config = json.loads(answer["json"])
    assert config["listen"]["grpc"] == site.ports.grpc
    assert config["drain"] == {"delay_s": 0.0, "grace_s": 30.0}
    assert config["groups"][0]["ranks"] == answer["config"]["groups"][0]["ranks"] == 3


# --- error details ---------------------------------------------------------------------------


def test_a_bad_value_names_its_field_in_every_detail(site):
    answer = site.call("Generate", request() | {"sampling": {"temperature": -1}})
    assert answer.refused() == (INVALID_ARGUMENT, "INVALID_REQUEST")
    assert answer.info["metadata"] == {"field": "temperature", "retryable": "false"}
    (bad,) = [each for each in answer.status["details"] if each["@type"].endswith("/google.rpc.BadRequest")]
    assert bad["field_violations"][0]["field"] == "temperature"
    other = site.call("Generate", request(model="other"))
    assert other.refused() == (NOT_FOUND, "MODEL_NOT_FOUND")
    assert other.info["metadata"]["model"] == "m"


def test_error_details_are_readable_without_any_option(site):
    data = json.dumps(request(data_parallel_rank=3))
    done = run("grpcurl", "-plaintext", "-d", data, site.ports.grpc, "gateway.v1.GatewayService/Generate")
    assert done.returncode == 64 + INVALID_ARGUMENT
    assert "Message: data_parallel_rank 3 does not exist; valid ranks are 0..2" in done.stderr
    assert '"reason":"INVALID_RANK"' in done.stderr.replace(" ", "")
    assert '"valid_max":"2"' in done.stderr.replace(" ", "")


async def test_a_live_id_is_refused_and_abort_ends_it(site):
    held = asyncio.create_task(asyncio.to_thread(site.call, "Generate", request(16_000, request_id="twin")))
    await asyncio.to_thread(wait_until, lambda: site.engines[0].total("live") == 1, "the first of the two")
    twin = await asyncio.to_thread(site.call, "Generate", request(1, request_id="twin"))
    assert twin.refused()[1] == "DUPLICATE_REQUEST_ID"
    aborted = await asyncio.to_thread(site.call, "Abort", {"request_id": "twin"})
    assert aborted.message == {}
    assert (await held).refused()[1] == "ABORTED"
    await asyncio.to_thread(wait_until, lambda: site.engines[0].total("live") == 0, "the rank to drop it")


def test_the_ranks_command_lists_them(shared_sites):
    site = shared_sites("vllm")
    listed = json.loads(run("rankgate", "ranks", "--address", site.ports.grpc, "--json").stdout)["ranks"]
    assert [(rank["rank"], rank["state"], rank["incarnation"]) for rank in listed] == [
        (n, "READY", 1) for n in range(3)
    ]
    table = run("rankgate", "ranks", "--address", site.ports.grpc).stdout.splitlines()
    assert [line.split()[0] for line in table] == ["RANK", "0", "1", "2"]


def test_the_explain_command_asks_the_running_gateway(shared_sites):
    site = shared_sites("tokenspeed")
    done = run("rankgate", "explain", "--address", site.ports.admin, "--prompt-tokens", "40", "--rank", "2", "--json")
    decision = json.loads(done.stdout)
    assert (decision["rank"], decision["pinned_rank"], decision["request"]["prompt_tokens"]) == (2, 2, 40)
    refused = run("rankgate", "explain", "--address", site.ports.admin, "--prompt-tokens", "40", "--rank", "3")
    assert refused.returncode == 1
    assert "valid ranks are 0..2" in refused.stderr


@pytest.mark.parametrize("command", [["ranks"], ["explain", "--prompt-tokens", "1"]], ids=lambda words: words[0])
def test_a_gateway_that_is_not_there_is_named(command):
    address = f"127.0.0.1:{free_port()}"
    done = run("rankgate", *command, "--address", address)
    assert done.returncode == 1
    assert address in done.stderr
    assert "Traceback" not in done.stderr
