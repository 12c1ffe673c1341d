"""`rankgate serve`: how it gets its configuration, and how it exits."""

import sys
from types import ModuleType

import pytest
from click.testing import CliRunner

from gateway.cli import cli
from gateway.config.errors import ConfigError
from gateway.edges.reload import file_identity
from tests.support.config_cases import BASE


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "g.yaml"
    path.write_text(BASE)
    return path


@pytest.fixture
def started(monkeypatch):
    """What the gateway was started with; stands in for the gateway itself."""
    calls = []
    module = ModuleType("gateway.process")

    def run(config, path, load, identity):
        assert load() == config
        assert identity == file_identity(path)
        calls.append((config, path))
        return 7

    module.run = run
    monkeypatch.setitem(sys.modules, "gateway.process", module)
    return calls


def serve(*arguments, **options):
    return CliRunner().invoke(cli, ["serve", *map(str, arguments)], **options)


@pytest.mark.parametrize("flag", [["-c"], []])
def test_runs_the_file_and_exits_with_the_gateways_code(path, started, flag):
    assert serve(*flag, path).exit_code == 7
    ((config, given),) = started
    assert given == path
    assert config.listen.grpc == "127.0.0.1:50051"


@pytest.mark.parametrize("with_flags", [True, False])
def test_flags_and_environment_override_the_file(path, started, with_flags):
    if with_flags:
        serve("--config", path, "--log-level", "debug", "--grpc", "127.0.0.1:0")
    else:
        serve(
            env={
                "RANKGATE_CONFIG": str(path),
                "RANKGATE_LOG_LEVEL": "debug",
                "RANKGATE_GRPC": "127.0.0.1:0",
            }
        )
    ((config, _),) = started
    assert config.observability.log_level == "debug"
    assert config.listen.grpc == "127.0.0.1:0"
    assert config.listen.admin == "127.0.0.1:50052"


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nonsense", "expected HOST:PORT"),
        ("0.0.0.0:50051", "opens every network interface"),
        ("127.0.0.1:5570", "already taken by $.listen.grpc"),
    ],
)
def test_bad_address_flag_is_a_usage_error(path, started, address, message):
    result = serve("-c", path, "--grpc", address)
    assert result.exit_code == 2
    assert "Invalid value for --grpc" in result.stderr
    assert message in " ".join(result.stderr.split())
    assert not started


def test_a_reload_goes_by_the_flags_of_the_start(path, monkeypatch):
    loads = []
    module = ModuleType("gateway.process")
    module.run = lambda config, path, load, identity: loads.append(load) or 0
    monkeypatch.setitem(sys.modules, "gateway.process", module)
    serve("-c", path, "--log-level", "debug", "--grpc", "127.0.0.1:6000")
    (load,) = loads
    path.write_text(BASE + "gateways: 2\n")
    config = load()
    assert (config.gateways, config.observability.log_level, config.listen.grpc) == (2, "debug", "127.0.0.1:6000")
    path.write_text(BASE.replace("5570", "6000"))
    with pytest.raises(ConfigError, match=r"--grpc: .*already taken"):
        load()
    path.write_text(BASE.replace("version: 1", "version: 2"))
    with pytest.raises(ConfigError, match=r"g\.yaml:1:10: "):
        load()


@pytest.mark.parametrize("flag", [["--processes", "3"], []])
def test_several_processes_have_a_supervisor(path, started, monkeypatch, flag):
    text = BASE + ("" if flag else "processes: 3\n")
    path.write_text(text)
    calls = []
    monkeypatch.setattr("gateway.processes.supervisor.run", lambda *arguments: calls.append(arguments) or 5)
    assert serve("-c", path, "--log-level", "debug", *flag).exit_code == 5
    ((config, source, given, identity),) = calls
    assert (config.processes, given, identity) == (3, text, file_identity(path))
    assert source.parse(text) == config
    assert not started


def test_a_flag_can_make_it_one_process(path, started):
    path.write_text(BASE + "processes: 3\n")
    assert serve("-c", path, "--processes", "1").exit_code == 7
    assert started[0][0].processes == 1


def test_processes_that_the_transport_can_not_have_are_a_usage_error(path, started):
    path.write_text(BASE + "listen: {transport: grpcio}\n")
    result = serve("-c", path, "--processes", "2")
    assert result.exit_code == 2
    assert "Invalid value for --processes" in result.stderr
    assert not started


def test_no_file_is_a_usage_error(started):
    result = serve()
    assert result.exit_code == 2
    assert "Error: name FILE, or set RANKGATE_CONFIG\n" in result.stderr
    assert not started


def test_bad_file_is_refused_as_check_config_does(path, started):
    path.write_text(BASE + "policy: {}\n")
    result = serve("-c", path)
    assert (result.exit_code, result.stderr) == (2, f"{path}:8:1: set 'preset' or 'cost' (at $.policy)\n")
    assert not started
