"""What an operator gets wrong: a bad file is exit 2 with its place, an address that is taken is exit 1 with its name."""

import json
import socket
from contextlib import ExitStack

import pytest

from tests.support.deployment import Deployment, expected
from tests.support.processes import run, wait_until

pytestmark = pytest.mark.e2e

GOOD = """\
version: 1
model: {name: m, max_context_tokens: 4096, vocab_size: 32000}
groups:
  - {name: main, protocol: vllm, handshake: "tcp://127.0.0.1:29550", ranks: 8}
"""
BAD = {
    "a typing error": (GOOD + "polcy: {preset: smg}\n", "5:1", "polcy"),
    "a wrong type": (GOOD.replace("ranks: 8", "ranks: eight"), "4:77", "ranks"),
    "a key twice": (GOOD + "version: 1\n", "5:1", "version"),
    "a bad formula": (GOOD + "policy:\n  cost: in_flight + quued_tokens\n", "6:21", "quued_tokens"),
    "no YAML": (GOOD + "policy: [\n", "6:1", ""),
    "an open interface": (GOOD + 'listen: {grpc: "0.0.0.0:50051"}\n', "5:16", "0.0.0.0"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_with_its_place(tmp_path, case):
    text, place, named = BAD[case]
    path = tmp_path / "gateway.yaml"
    path.write_text(text)
    checked = run("rankgate", "check-config", path)
    assert checked.returncode == 2
    assert checked.stderr.startswith(f"{path}:{place}: ")
    assert named in checked.stderr


def test_serve_says_the_same(tmp_path):
    path = tmp_path / "gateway.yaml"
    path.write_text(BAD["a bad formula"][0])
    checked, served = run("rankgate", "check-config", path), run("rankgate", "serve", "-c", path)
    assert (served.returncode, served.stderr, served.stdout) == (2, checked.stderr, "")


def test_a_suggestion_comes_with_a_typing_error(tmp_path):
    path = tmp_path / "gateway.yaml"
    path.write_text(BAD["a typing error"][0])
    assert "policy" in run("rankgate", "check-config", path).stderr


def test_a_missing_file_and_missing_options_are_usage_errors(tmp_path):
    missing = tmp_path / "nowhere.yaml"
    for command in (["check-config", missing], ["serve", "-c", missing]):
        done = run("rankgate", *command)
        assert done.returncode == 2
        assert str(missing) in done.stderr
    assert run("rankgate", "serve").returncode == 2
    assert run("engine-stub", "serve", "--ranks", "2").returncode == 2


def failed_start(site):
    """The last log line of a gateway that could not start, which must be its only error."""
    assert site.gateway.wait() == 1
    errors = [event for event in site.gateway.events() if event["level"] in ("error", "critical")]
    assert errors == [site.gateway.events()[-1]]
    assert errors[0]["event"] == "start_failed"
    assert "Traceback" not in site.gateway.log
    return errors[0]["error"]


def test_a_taken_address_is_named():
    """All at once, since each takes a second of start."""
    with ExitStack() as cleanup:
        sites = {}
        for listener in ("grpc", "admin", "metrics", "handshake"):
            sites[listener] = site = cleanup.enter_context(Deployment("vllm", ranks=1))
            taken = cleanup.enter_context(socket.socket())
            host, _, port = getattr(site.ports, listener).rpartition(":")
            taken.bind((host, int(port)))
            taken.listen()
            site.start_gateway()
        for listener, site in sites.items():
            error = failed_start(site)
            assert getattr(site.ports, listener) in error
            assert "in use" in error
            assert listener == "handshake" or f"listen.{listener}" in error


def test_a_second_gateway_on_the_clients_port_is_refused_and_the_first_goes_on(shared_sites):
    first = shared_sites("vllm")
    with Deployment("vllm") as second:
        config = json.loads(second.config_path.read_text())
        config["listen"]["grpc"] = first.ports.grpc
        second.config_path.write_text(json.dumps(config))
        second.start_gateway()
        assert first.ports.grpc in failed_start(second)
    answer = first.call("Generate", {"prompt_token_ids": [8, 9], "sampling": {"max_tokens": 3}})
    assert [token for message in answer.messages for token in message["token_ids"]] == expected([8, 9], 3)


def test_a_second_gateway_with_the_same_file_is_refused(shared_sites):
    first = shared_sites("tokenspeed")
    again = first.process("second-gateway", "rankgate", "serve", "-c", first.config_path)
    assert again.wait() == 1
    assert "127.0.0.1:" in again.events("start_failed")[0]["error"]
    assert first.gateway.is_running
    assert {rank["state"] for rank in first.call("ListRanks").message["ranks"]} == {"RANK_STATE_READY"}


def test_one_gateway_owns_a_state_directory():
    with Deployment("vllm", keeps_state=True) as first, Deployment("vllm") as second:
        first.start_gateway()
        wait_until(lambda: first.gateway.events("started"), "the first to start")
        config = json.loads(second.config_path.read_text())
        config["state_dir"] = str(first.directory / "state")
        second.config_path.write_text(json.dumps(config))
        second.start_gateway()
        assert f"process {first.gateway.pid}" in failed_start(second)


def test_versions_agree():
    gateway, engine = run("rankgate", "version").stdout.split(), run("engine-stub", "version").stdout.split()
    assert gateway[0] == "rankgate"
    assert engine[0] == "engine-stub"
    assert gateway[1] == engine[1]
    assert run("rankgate", "--version").stdout.split() == gateway
