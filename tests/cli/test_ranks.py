"""`rankgate ranks` against a server that lists what a test wants."""

import importlib
import json
from concurrent import futures

import grpc
import pytest
from click.testing import CliRunner

from gateway.cli import cli
from gateway.v1 import gateway_pb2, gateway_pb2_grpc

# The package exports the command under the module's name.
ranks_module = importlib.import_module("gateway.cli.ranks")

IDLE = gateway_pb2.Rank(
    rank=0,
    group="main",
    group_rank=0,
    state=gateway_pb2.RANK_STATE_READY,
    incarnation=1,
    in_flight=0,
    running=0,
    waiting=0,
    foreign=0,
    kv_usage=0.0,
    snapshot_age_ms=12.4,
    cost=1.0,
)
SILENT = gateway_pb2.Rank(
    rank=1, group="main", group_rank=1, state=gateway_pb2.RANK_STATE_ABSENT, incarnation=0, in_flight=0
)


class Servicer(gateway_pb2_grpc.GatewayServiceServicer):
    def ListRanks(self, request, context):
        return gateway_pb2.ListRanksResponse(ranks=[IDLE, SILENT])

    def WatchRanks(self, request, context):
        yield gateway_pb2.WatchRanksResponse(ranks=[IDLE, SILENT])
        yield gateway_pb2.WatchRanksResponse(ranks=[SILENT])
        context.abort(grpc.StatusCode.UNAVAILABLE, "going away")


@pytest.fixture(scope="module")
def address():
    server = grpc.server(futures.ThreadPoolExecutor(2))
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def ranks(*arguments, **options):
    return CliRunner().invoke(cli, ["ranks", *arguments], **options)


TABLE = """\
RANK  GROUP  INDEX  STATE   JOINS  IN-FLIGHT  RUNNING  WAITING  FOREIGN    KV   AGE  COST
   0  main       0  READY       1          0        0        0        0  0.0%  12ms     1
   1  main       1  ABSENT      0          0        -        -        -     -     -     -
"""


def test_table_shows_rank_0_and_what_is_unknown(address):
    result = ranks("--address", address)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == TABLE


def test_address_from_the_environment(address):
    assert ranks(env={"RANKGATE_ADDRESS": address}).stdout == TABLE


def test_json_has_every_key(address):
    first, second = json.loads(ranks("--address", address, "--json").stdout)["ranks"]
    assert first["rank"] == 0
    assert first["state"] == "READY"
    assert first["kv_usage"] == 0.0
    assert second["kv_usage"] is None
    assert second["in_flight"] == 0
    assert first.keys() == second.keys() == {field.name for field in gateway_pb2.Rank.DESCRIPTOR.fields}


def test_watch_prints_every_state_and_fails_when_the_gateway_goes(address):
    result = ranks("--address", address, "--watch", "--json")
    assert [len(json.loads(line)["ranks"]) for line in result.stdout.splitlines()] == [2, 1]
    assert result.exit_code == 1
    assert result.stderr == f"error: {address}: UNAVAILABLE: going away\n"


def test_watch_as_a_table_has_no_control_characters_in_a_pipe(address):
    output = ranks("--address", address, "--watch").stdout
    assert "\x1b" not in output
    assert output.startswith(TABLE)


def test_watch_clears_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    ranks_module.print_ranks([SILENT], as_json=False, clear=True)
    assert capsys.readouterr().out.startswith("\x1b[H\x1b[2JRANK ")


def test_interrupting_watch_is_no_error(address, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(ranks_module, "print_ranks", interrupt)
    result = ranks("--address", address, "--watch")
    assert (result.exit_code, result.output) == (0, "")


ADVICE = "; name the gateway's listen.grpc with --address or RANKGATE_ADDRESS\n"


@pytest.mark.parametrize(
    ("flags", "message"), [([], "Connection refused"), (["--watch", "--timeout", "0.2"], "no answer within 0.2 s")]
)
def test_nobody_there(unused_address, flags, message):
    result = ranks("--address", unused_address, *flags)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {unused_address}: ")
    assert message in result.stderr
    assert result.stderr.endswith(ADVICE)


@pytest.mark.parametrize("flags", [[], ["--watch"]])
def test_the_listener_of_operators(flags):
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    result = ranks("--address", f"127.0.0.1:{port}", *flags)
    server.stop(None).wait()
    assert (result.exit_code, result.stdout) == (1, "")
    assert "UNIMPLEMENTED: Method not found!; ranks asks listen.grpc, explain listen.admin: name" in result.stderr
    assert result.stderr.endswith(ADVICE.removeprefix("; "))


@pytest.fixture
def unused_address():
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    server.stop(None).wait()
    return f"127.0.0.1:{port}"


def test_a_state_from_a_newer_gateway_is_shown_as_its_number():
    assert ranks_module.rank_row(gateway_pb2.Rank.FromString(b"\x20\x63"))["state"] == "99"
