"""The protos, what was generated from them, and what a user's grpcurl shows."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from gateway.v1 import admin_pb2, gateway_pb2
from tests.support.grpc_core import serve_core

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def buf(*arguments):
    return subprocess.run([BIN / "buf", *arguments], cwd=ROOT, check=False, capture_output=True)


def test_lint_and_format_are_clean():
    for arguments in (("lint",), ("format", "--exit-code", "--diff", "--path", "protos/gateway")):
        result = buf(*arguments)
        assert result.returncode == 0, result.stdout.decode() + result.stderr.decode()


def test_generated_code_is_current():
    """`make protos` was run after the last change: same descriptors, whatever the generator's version."""
    result = buf("build", "--exclude-source-info", "-o", "-#format=binpb")
    assert result.returncode == 0, result.stderr.decode()
    files = {file.name: file for file in descriptor_pb2.FileDescriptorSet.FromString(result.stdout).file}
    for module in (gateway_pb2, admin_pb2):
        generated = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(generated)
        written = files[generated.name]
        # What buf adds: its own bookkeeping, and the JSON names that follow from the names.
        written.DiscardUnknownFields()
        for message in written.message_type:
            for field in message.field:
                field.ClearField("json_name")
        assert written == generated


# The published numbers: adding to this table is fine, changing it is not.
NUMBERS = {
    "GenerateRequest": {
        "request_id": 1,
        "prompt_token_ids": 2,
        "sampling": 3,
        "data_parallel_rank": 4,
        "priority": 5,
        "session_id": 6,
        "no_cache": 7,
        "model": 8,
        "allow_resume": 9,
    },
    "GenerateResponse": {"request_id": 1, "index": 2, "token_ids": 3, "logprobs": 4, "finish": 5},
    "GenerateManyRequest": {"start": 1, "abort_request_id": 2},
    "GenerateManyResponse": {"outputs": 1, "errors": 2},
    "RequestError": {"request_id": 1, "status": 2},
    "Sampling": {
        "max_tokens": 1,
        "temperature": 2,
        "top_p": 3,
        "top_k": 4,
        "min_p": 5,
        "frequency_penalty": 6,
        "presence_penalty": 7,
        "repetition_penalty": 8,
        "min_tokens": 9,
        "seed": 10,
        "n": 11,
        "logprobs": 12,
        "stop_token_ids": 13,
        "ignore_eos": 14,
    },
    "Finish": {
        "reason": 1,
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "cached_tokens": 4,
        "rank": 5,
        "attempts": 6,
    },
    "TokenLogprob": {"logprob": 1, "top": 2},
    "TopLogprob": {"token_id": 1, "logprob": 2},
    "Rank": {
        "rank": 1,
        "group": 2,
        "group_rank": 3,
        "state": 4,
        "incarnation": 5,
        "in_flight": 6,
        "reported_running": 7,
        "reported_waiting": 8,
        "running": 9,
        "waiting": 10,
        "foreign": 11,
        "kv_usage": 12,
        "snapshot_age_ms": 13,
        "cost": 14,
    },
}


@pytest.mark.parametrize("name", NUMBERS)
def test_field_numbers_never_change(name):
    fields = gateway_pb2.DESCRIPTOR.message_types_by_name[name].fields
    assert {field.name: field.number for field in fields} == NUMBERS[name]


@pytest.mark.parametrize("name", ["GenerateResponse", "Finish", "Rank", "TokenLogprob", "TopLogprob"])
def test_a_zero_that_is_a_fact_prints(name):
    """Scalars that operators look at have explicit presence; JSON leaves out the zeros of others."""
    message = gateway_pb2.DESCRIPTOR.message_types_by_name[name]
    hidden = {
        field.name
        for field in message.fields
        if not field.is_repeated and not field.has_presence and field.enum_type is None
    }
    assert hidden <= {"request_id"}


async def grpcurl(*arguments):
    process = await asyncio.create_subprocess_exec(
        str(BIN / "grpcurl"), "-plaintext", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, error = await process.communicate()
    return process.returncode, out.decode(), error.decode()


def documents(text):
    """The JSON documents that grpcurl printed one after another."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        document, at = decoder.raw_decode(text, at)
        found.append(document)
    return found


class TestGrpcurl:
    async def test_list_and_describe(self):
        async with serve_core() as core:
            code, out, _ = await grpcurl(core.edge.servers.grpc_address, "list")
            assert code == 0
            assert {"gateway.v1.GatewayService", "grpc.health.v1.Health"} <= set(out.split())
            code, out, _ = await grpcurl(core.edge.servers.admin_address, "list")
            assert "gateway.v1.AdminService" in out.split()
            code, out, _ = await grpcurl(core.edge.servers.grpc_address, "describe", "gateway.v1.Rank")
            assert code == 0
            assert "reported_waiting = 8" in out

    async def test_health(self):
        async with serve_core() as core:
            data = '{"service": "readiness"}'
            _, out, _ = await grpcurl("-d", data, core.edge.servers.grpc_address, "grpc.health.v1.Health/Check")
            assert json.loads(out) == {"status": "SERVING"}

    async def test_generate_on_rank_zero_prints_the_zeros(self):
        async with serve_core() as core:
            data = json.dumps(
                {"request_id": "me", "prompt_token_ids": [5], "sampling": {"max_tokens": 3}, "data_parallel_rank": 0}
            )
            method = "gateway.v1.GatewayService/Generate"
            code, out, _ = await grpcurl("-v", "-d", data, core.edge.servers.grpc_address, method)
            assert code == 0
            assert "x-request-id: me" in out
            assert "x-rankgate-rank: 0" in out
            code, out, _ = await grpcurl("-d", data, core.edge.servers.grpc_address, method)
            messages = documents(out)
            assert [token for message in messages for token in message.get("token_ids", message.get("tokenIds"))] == [
                6,
                7,
                8,
            ]
            assert {message["index"] for message in messages} == {0}
            finish = messages[-1]["finish"]
            assert (finish["reason"], finish["rank"]) == ("FINISH_REASON_LENGTH", 0)

    async def test_list_ranks_prints_rank_zero(self):
        async with serve_core(ready=1) as core:
            _, out, _ = await grpcurl(core.edge.servers.grpc_address, "gateway.v1.GatewayService/ListRanks")
            ranks = json.loads(out)["ranks"]
            assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3]
            assert [rank["state"].removeprefix("RANK_STATE_") for rank in ranks] == ["READY"] + ["ABSENT"] * 3
            assert 0 in (ranks[0].get("in_flight"), ranks[0].get("inFlight"))
            assert "kv_usage" not in ranks[0]

    async def test_an_error_shows_its_details(self):
        async with serve_core() as core:
            data = '{"prompt_token_ids": [5], "data_parallel_rank": -1}'
            code, _, error = await grpcurl(
                "-d", data, core.edge.servers.grpc_address, "gateway.v1.GatewayService/Generate"
            )
            assert code == 64 + 3  # grpcurl's own 64 + INVALID_ARGUMENT
            assert "INVALID_RANK" in error
            assert "rankgate" in error
            assert "valid_max" in error

    async def test_a_deadline_that_expires(self):
        async with serve_core() as core:
            data = '{"prompt_token_ids": [9999]}'
            address, method = core.edge.servers.grpc_address, "gateway.v1.GatewayService/Generate"
            code, _, error = await grpcurl("-max-time", "0.3", "-d", data, address, method)
            assert code == 64 + 4
            assert "DeadlineExceeded" in error

    async def test_effective_config(self):
        async with serve_core() as core:
            method = "gateway.v1.AdminService/GetEffectiveConfig"
            code, out, _ = await grpcurl(core.edge.servers.admin_address, method)
            assert code == 0
            assert json.loads(out)["config"]["admission"]["max_in_flight"] == 16384
