"""How `ranks` and `explain` connect to a gateway that wants TLS, certificates or tokens."""

import importlib
from concurrent import futures

import grpc
import pytest
from click.testing import CliRunner

from gateway.cli import cli
from gateway.v1 import admin_pb2_grpc, gateway_pb2, gateway_pb2_grpc
from tests.support.certificates import NAME, Authority, token, write, write_tokens

common = importlib.import_module("gateway.cli.common")


class Gateway(gateway_pb2_grpc.GatewayServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """Notes the tokens that calls bring."""

    def __init__(self):
        self.seen = []

    def note(self, context):
        self.seen.append(dict(context.invocation_metadata()).get("authorization"))

    def ListRanks(self, request, context):
        self.note(context)
        return gateway_pb2.ListRanksResponse()

    def WatchRanks(self, request, context):
        self.note(context)
        yield gateway_pb2.WatchRanksResponse()

    def Explain(self, request, context):
        self.note(context)
        context.abort(grpc.StatusCode.NOT_FOUND, "seen")


class Site:
    def __init__(self, gateway, port):
        self.gateway = gateway
        self.address = f"127.0.0.1:{port}"
        self.port = port


@pytest.fixture
def serve():
    """Starts a server with the given credentials; they all end with the test."""
    servers = []

    def start(credentials=None):
        server = grpc.server(futures.ThreadPoolExecutor(2))
        gateway = Gateway()
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(gateway, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(gateway, server)
        place = "127.0.0.1:0"
        port = server.add_insecure_port(place) if credentials is None else server.add_secure_port(place, credentials)
        server.start()
        servers.append(server)
        return Site(gateway, port)

    yield start
    for server in servers:
        server.stop(None).wait()


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def server_credentials(authority, *names, wants_client=False):
    pair = authority.issue(*names)
    roots = authority.pem if wants_client else None
    return grpc.ssl_server_credentials([(pair.key, pair.certificates)], roots, wants_client)


def run(*arguments, **env):
    return CliRunner().invoke(cli, list(map(str, arguments)), env=env, prog_name="rankgate")


COMMANDS = [("ranks",), ("ranks", "--watch"), ("explain", "--prompt-tokens", "1")]


def is_done(command, result):
    """Whether the call reached the gateway: `explain` is answered with an error there."""
    return "NOT_FOUND: seen" in result.stderr if command[0] == "explain" else result.exit_code == 0


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
class TestEachCommand:
    def test_a_token_goes_with_the_call(self, serve, tmp_path, command):
        mine = token()
        path = write_tokens(tmp_path / "t", mine, token())
        site = serve()
        assert is_done(command, run(*command, "--address", site.address, "--token-file", path))
        assert is_done(command, run(*command, "--address", site.address, RANKGATE_TOKEN_FILE=str(path)))
        assert is_done(command, run(*command, "--address", site.address))
        assert site.gateway.seen == [f"Bearer {mine}", f"Bearer {mine}", None]

    def test_tls_with_a_ca(self, serve, authority, tmp_path, command):
        mine = token()
        path = write_tokens(tmp_path / "t", mine)
        site = serve(server_credentials(authority))
        more = ("--ca-file", authority.path, "--token-file", path)
        assert is_done(command, run(*command, "--address", site.address, *more))
        assert site.gateway.seen == [f"Bearer {mine}"]
        assert is_done(command, run(*command, "--address", site.address, RANKGATE_CA_FILE=str(authority.path)))

    def test_another_ca_gets_no_connection(self, serve, authority, tmp_path, command):
        stranger = Authority(tmp_path, "stranger")
        site = serve(server_credentials(authority))
        result = run(*command, "--address", site.address, "--ca-file", stranger.path, *_soon(command))
        assert result.exit_code == 1
        assert result.stderr.startswith(f"error: {site.address}: ")
        assert site.gateway.seen == []

    def test_a_certificate_of_its_own(self, serve, authority, command):
        mine = authority.client()
        site = serve(server_credentials(authority, wants_client=True))
        ca = ("--ca-file", authority.path)
        assert not is_done(command, run(*command, "--address", site.address, *ca, *_soon(command)))
        more = (*ca, "--cert-file", mine.cert, "--key-file", mine.key)
        assert is_done(command, run(*command, "--address", site.address, *more))

    def test_a_name_that_is_not_the_address_s(self, serve, authority, command):
        site = serve(server_credentials(authority, NAME))
        ca = ("--ca-file", authority.path)
        assert not is_done(command, run(*command, "--address", site.address, *ca, *_soon(command)))
        assert is_done(command, run(*command, "--address", site.address, *ca, "--server-name", NAME))


def _soon(command):
    return ("--timeout", "1") if command[0] == "ranks" else ()


PLAIN = ("ranks", "--address", "127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cert-file", "c"), "--cert-file and --key-file go together"),
        (("--tls", "--key-file", "k"), "--cert-file and --key-file go together"),
        (("--key-file", "k"), "--key-file and --server-name need --tls, --ca-file or --cert-file"),
        (("--server-name", "n"), "--key-file and --server-name need --tls, --ca-file or --cert-file"),
        (("--ca-file", "/nowhere"), "/nowhere: No such file or directory"),
        (("--token-file", "/nowhere"), "/nowhere: No such file or directory"),
    ],
)
def test_bad_options_exit_with_2(arguments, message):
    result = run(*PLAIN, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("text", [b"", b"# nothing\n", b"short-canary\n"])
def test_a_file_without_a_token_exits_with_2_and_shows_none_of_it(tmp_path, text):
    path = write(tmp_path / "t", text)
    result = run(*PLAIN, "--token-file", path)
    assert result.exit_code == 2
    assert str(path) in result.stderr
    assert "canary" not in result.output


@pytest.mark.parametrize("address", ["10.0.0.1:1", "gateway.test:1", "nonsense"])
def test_a_token_goes_to_another_host_over_tls_only(tmp_path, monkeypatch, address):
    mine = token()
    path = write_tokens(tmp_path / "t", mine)
    result = run("ranks", "--address", address, "--token-file", path)
    assert result.exit_code == 2
    assert f"{address} is another host" in result.stderr
    assert common._metadata(address, common.Access(tls=True, token_file=path)) == (("authorization", f"Bearer {mine}"),)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:1", "[::1]:1"])
def test_on_this_host_plaintext_is_as_good(tmp_path, address):
    path = write_tokens(tmp_path / "t", token())
    assert len(common._metadata(address, common.Access(token_file=path))) == 1
