"""`rankgate explain`, offline and against a server."""

import json
from concurrent import futures

import grpc
import pytest
from click.testing import CliRunner
from google.protobuf import struct_pb2

from gateway.cli import cli
from gateway.v1 import admin_pb2, admin_pb2_grpc
from tests.support.config_cases import BASE


@pytest.fixture
def files(tmp_path):
    (tmp_path / "g.yaml").write_text(BASE)
    (tmp_path / "s.yaml").write_text("ranks: [{rank: 0, in_flight: 2, queued_tokens: 40}]\n")
    (tmp_path / "r.yaml").write_text("{prompt_tokens: 10, max_tokens: 5}\n")
    return tmp_path


def explain(*arguments, **options):
    return CliRunner().invoke(cli, ["explain", *map(str, arguments)], **options)


def offline(files, *arguments, **options):
    return explain("-c", files / "g.yaml", "--snapshot", files / "s.yaml", *arguments, **options)


TABLE = """\
policy   lmetric: argmin of (queued_tokens + new_tokens) * (in_flight + 1)
request  10 + 5 tokens at most
chosen   rank 1

   RANK  COST  queued_tokens  in_flight  REASON
      0   150             40          2  eligible
*     1    10              0          0  eligible
"""


def test_offline_table(files):
    result = offline(files, "--request", files / "r.yaml")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == TABLE


def test_request_from_stdin_or_flags(files):
    assert offline(files, "--request", "-", input="prompt_tokens: 10\nmax_tokens: 5\n").stdout == TABLE
    assert offline(files, "--prompt-tokens", 10, "--max-tokens", 5).stdout == TABLE


def test_pin_ties_and_refusal_are_said(files):
    assert "pinned   to rank 0\nchosen   rank 0\n" in offline(files, "--prompt-tokens", 10, "--rank", 0).stdout
    (files / "s.yaml").write_text("ranks: []")
    assert "chosen   rank 0, one of 2 equals (random)\n" in offline(files, "--prompt-tokens", 10).stdout
    (files / "s.yaml").write_text("ranks: [{rank: 0, state: LOST}, {rank: 1, state: ABSENT}]")
    result = offline(files, "--prompt-tokens", 10)
    assert result.exit_code == 0
    assert "refused  NO_ELIGIBLE_RANK\n" in result.stdout
    (files / "s.yaml").write_text("ranks: [{rank: 0, in_flight: 1, kv_usage: 1}, {rank: 1, in_flight: 1, kv_usage: 1}]")
    assert "relaxed  kv_usage\n" in offline(files, "--prompt-tokens", 10).stdout


@pytest.mark.parametrize("from_environment", [False, True])
def test_without_a_snapshot_every_rank_is_idle(files, from_environment):
    path = files / "g.yaml"
    named = [] if from_environment else ["-c", path]
    result = explain(*named, "--prompt-tokens", 10, env={"RANKGATE_CONFIG": str(path)} if from_environment else {})
    assert (result.exit_code, result.stderr) == (0, "note: without --snapshot, every rank is READY and idle\n")
    (files / "s.yaml").write_text("ranks: []")
    assert result.stdout == offline(files, "--prompt-tokens", 10).stdout


def test_policy_without_a_cost(files):
    (files / "g.yaml").write_text(BASE + "policy: {preset: round_robin}\n")
    output = offline(files, "--prompt-tokens", 10).stdout
    assert output.startswith("policy   round_robin: round_robin\n")
    assert "RANK  COST  REASON" in output


GATED = """\
policy   lmetric: argmin of (queued_tokens + new_tokens) * (in_flight + 1)
request  10 + 5 tokens at most
prefill  5.25 ms predicted
chosen   rank 1

   RANK  COST  queued_tokens  in_flight  GATE            REASON
      0   150             40          2  unstarted_work  eligible
*     1    10              0          0  open            eligible
"""


def test_a_gateway_that_queues_shows_its_gates_and_its_prediction(files):
    settings = (
        "predictor: {prefill_ms: 5 + 0.025 * batch_size * total_new_tokens}\n"
        "scheduling: {mode: queue, queue: {gate_ms: 0.5}}\n"
    )
    (files / "g.yaml").write_text(BASE + settings)
    (files / "s.yaml").write_text(
        "ranks: [{rank: 0, in_flight: 2, in_flight_prefill: 1, queued_tokens: 40, pending_ms: 1}]\n"
    )
    assert offline(files, "--request", files / "r.yaml").stdout == GATED


SHUT = "queued   no gate is open ({}); {} if it were\n"
QUEUED = "scheduling: {mode: queue, queue: {max_in_flight_per_rank: 1}}\n"


@pytest.mark.parametrize(
    ("ranks", "arguments", "line"),
    [
        ("{rank: 0, in_flight: 2}, {rank: 1, in_flight: 1}", [], SHUT.format("2 in_flight", "rank 1")),
        ("{rank: 0, in_flight: 2}, {rank: 1, state: LOST}", [], SHUT.format("1 in_flight", "rank 0")),
        ("{rank: 0, in_flight: 2}", ["--rank", 0], SHUT.format("1 in_flight", "rank 0")),
        ("{rank: 0, in_flight: 1, queued_tokens: 9}, {rank: 1, queued_tokens: 90}", [], "chosen   rank 0 if its gate"),
        ("{rank: 0, in_flight: 2}", [], "chosen   rank 1\n"),
        ("{rank: 0, state: LOST}, {rank: 1, state: LOST}", [], "refused  NO_ELIGIBLE_RANK\n"),
    ],
)
def test_a_choice_whose_gate_is_shut_is_no_choice_yet(files, ranks, arguments, line):
    (files / "g.yaml").write_text(BASE + QUEUED)
    (files / "s.yaml").write_text(f"ranks: [{ranks}]\n")
    output = offline(files, "--prompt-tokens", 10, *arguments).stdout
    assert line in output
    if "if its gate" in line:
        assert "chosen   rank 0 if its gate were open (in_flight); now to one whose gate is open: 1\n" in output


def test_equals_are_said_of_a_choice_that_waits(files):
    (files / "g.yaml").write_text(BASE + QUEUED)
    (files / "s.yaml").write_text("ranks: [{rank: 0, in_flight: 1}, {rank: 1, in_flight: 1}]\n")
    line = SHUT.format("2 in_flight", "rank 0, one of 2 equals (random)")
    assert line in offline(files, "--prompt-tokens", 10).stdout


def test_json(files):
    decision = json.loads(offline(files, "--request", files / "r.yaml", "--json").stdout)
    assert decision["rank"] == 1
    assert [row["cost"] for row in decision["ranks"]] == [150, 10]


def test_bad_files_exit_with_2_and_the_place(files):
    (files / "s.yaml").write_text("ranks: [{rank: 5}]")
    result = offline(files, "--prompt-tokens", 1)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"{files}/s.yaml:1:16: there is no rank 5")
    result = offline(files, "--request", "-", input="prompt_tokns: 1")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("<stdin>:1:1: unknown key 'prompt_tokns'")
    assert offline(files, "--request", files / "absent").exit_code == 2


def test_refused_request_exits_with_1(files):
    result = offline(files, "--prompt-tokens", 5000)
    assert result.exit_code == 1
    assert result.stderr.startswith("refused: PROMPT_TOO_LONG: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-tokens", "1"], "with -c FILE or RANKGATE_CONFIG (offline), or a running gateway with --address"),
        (["--prompt-tokens", "1", "--snapshot", "s", "--address", "a:1"], "either --snapshot"),
        (["--address", "a:1"], "either --request"),
        (["--address", "a:1", "--prompt-tokens", "1", "--request", "r"], "either --request"),
        (["--address", "a:1", "--request", "r", "--rank", "1"], "go with --prompt-tokens"),
        (["--snapshot", "s", "--prompt-tokens", "1"], "RANKGATE_CONFIG"),
        (["--address", "a:1", "--prompt-tokens", "0"], "x>=1"),
    ],
)
def test_usage_errors(arguments, message):
    result = explain(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


class Servicer(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, decision):
        self.decision = decision
        self.requests = []

    def Explain(self, request, context):
        self.requests.append(request.request)
        if request.request.data_parallel_rank == 9:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no rank 9")
        decision = struct_pb2.Struct()
        decision.update(self.decision)
        return admin_pb2.ExplainResponse(decision=decision)


@pytest.fixture
def admin(files):
    """A server that answers with the offline decision, as the live gateway does: through a protobuf Struct."""
    servicer = Servicer(json.loads(offline(files, "--request", files / "r.yaml", "--json").stdout))
    server = grpc.server(futures.ThreadPoolExecutor(2))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    server.stop(None).wait()


def test_online_prints_the_same_table(admin, files):
    assert explain("--address", admin.address, "--prompt-tokens", 10, "--max-tokens", 5, "--rank", 1).stdout == TABLE
    (request,) = admin.requests
    assert len(request.prompt_token_ids) == 10
    assert request.sampling.max_tokens == 5
    assert request.data_parallel_rank == 1


def test_online_leaves_out_what_was_not_given(admin, files):
    (files / "r.yaml").write_text("{prompt_token_ids: [7, 8]}")
    assert explain("--address", admin.address, "--request", files / "r.yaml").exit_code == 0
    (request,) = admin.requests
    assert list(request.prompt_token_ids) == [7, 8]
    assert not request.HasField("data_parallel_rank")
    assert not request.HasField("model")
    assert not request.sampling.HasField("max_tokens")


def test_online_refusal_exits_with_1(admin):
    result = explain("--address", admin.address, "--prompt-tokens", 10, "--rank", 9)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"error: {admin.address}: INVALID_ARGUMENT: no rank 9\n"


ADVICE = "name the gateway's listen.admin with --address or RANKGATE_ADMIN_ADDRESS\n"


def test_a_listener_that_is_not_the_operators():
    server = grpc.server(futures.ThreadPoolExecutor(1))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    result = explain("--address", address, "--prompt-tokens", 10)
    server.stop(None).wait()
    what = "UNIMPLEMENTED: Method not found!; ranks asks listen.grpc, explain listen.admin: "
    assert (result.exit_code, result.stderr) == (1, f"error: {address}: {what}{ADVICE}")
    result = explain("--address", address, "--prompt-tokens", 10)
    assert "Connection refused" in result.stderr
    assert result.stderr.endswith(f"; {ADVICE}")


def test_the_address_from_the_environment_and_flags_go_before_it(admin, files):
    environment = {"RANKGATE_ADMIN_ADDRESS": admin.address}
    assert explain("--prompt-tokens", 10, "--max-tokens", 5, env=environment).stdout == TABLE
    assert len(admin.requests) == 1
    assert offline(files, "--prompt-tokens", 10, "--max-tokens", 5, env=environment).stdout == TABLE
    assert len(admin.requests) == 1, "--snapshot asks no gateway"
    result = offline(files, "--prompt-tokens", 10, "--address", admin.address)
    assert (result.exit_code, len(admin.requests)) == (2, 1)
    assert explain("-c", files / "g.yaml", "--prompt-tokens", 10, env=environment).exit_code == 0
    assert len(admin.requests) == 1, "nor does -c"
    environment["RANKGATE_CONFIG"] = str(files / "g.yaml")
    assert explain("--prompt-tokens", 10, "--max-tokens", 5, env=environment).stdout == TABLE
    assert len(admin.requests) == 2, "of two variables, the gateway's counts"


def test_a_stray_variable_pins_nothing(files):
    stray = {"RANKGATE_EXPLAIN_RANK": "0", "RANKGATE_RANK": "0", "RANKGATE_JSON": "1", "RANKGATE_EXPLAIN_JSON": "1"}
    assert offline(files, "--prompt-tokens", 10, "--max-tokens", 5, env=stray).stdout == TABLE
