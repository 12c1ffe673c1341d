"""The metrics page with TLS and tokens, and with clients that say nothing."""

import http.client
import socket
import ssl
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from gateway.edges import metrics_server
from gateway.edges.security import Security
from tests.support.certificates import Authority, look, token, write
from tests.support.grpc_edge import make_config
from tests.support.metrics_world import World
from tests.support.secured_edge import Tokens

WAIT_S = 20


@contextmanager
def page(**listen):
    """A page that is served with keys of `listen` set; gives its port and what protects it."""
    security = Security(make_config(listen=listen).listen)
    security.load()
    world = World(1)
    world.metrics._security = security
    port = world.metrics.start("127.0.0.1", 0)
    try:
        yield port, security
    finally:
        world.metrics.stop()


def look_at_all(security):
    for watched in security._watched():
        look(watched)


def client_context(authority, files=None):
    context = ssl.create_default_context(cadata=authority.pem.decode())
    if files is not None:
        context.load_cert_chain(files.cert, files.key)
    return context


def fetch(port, context=None, authorization=None):
    """Status and text of the page. Raises OSError where there is no connection."""
    scheme = "http" if context is None else "https"
    request = urllib.request.Request(f"{scheme}://127.0.0.1:{port}/metrics")
    if authorization is not None:
        request.add_header("Authorization", authorization)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def is_served(port, context):
    try:
        status, text = fetch(port, context)
    except (OSError, http.client.HTTPException):
        return False
    assert status == 200
    assert "rankgate_build_info" in text
    return True


def test_with_certificates_the_page_speaks_tls_only(authority, served, tmp_path):
    with page(tls=served.settings) as (port, _):
        assert is_served(port, client_context(authority))
        assert not is_served(port, None)
        assert not is_served(port, client_context(Authority(tmp_path, "stranger")))


def test_with_a_client_ca_a_scraper_needs_a_certificate(authority, served, tmp_path):
    stranger = Authority(tmp_path, "stranger").client("other")
    with page(tls=served.settings | {"client_ca_file": str(authority.path)}) as (port, _):
        assert is_served(port, client_context(authority, authority.client()))
        assert not is_served(port, client_context(authority))
        assert not is_served(port, client_context(authority, stranger))


def test_a_renewed_certificate_is_for_new_connections_and_a_broken_one_is_not(authority, served, tmp_path):
    successor = Authority(tmp_path, "successor")
    with page(tls=served.settings) as (port, security):
        served.replace(successor.issue())
        look_at_all(security)
        assert is_served(port, client_context(successor))
        assert not is_served(port, client_context(authority))
        write(served.cert, b"junk")
        look_at_all(security)
        assert is_served(port, client_context(successor))


def test_the_page_wants_a_token_of_either_kind(tmp_path):
    tokens = Tokens(tmp_path)
    with page(auth=tokens.settings) as (port, security):
        for each in (tokens.client, tokens.operator):
            assert fetch(port, authorization=f"Bearer {each}")[0] == 200
        for header in (None, "", "Basic eDp5", f"Bearer {token()}", tokens.client):
            status, text = fetch(port, authorization=header)
            assert status == 401
            assert text == "a valid token is missing: send the header `Authorization: Bearer TOKEN`\n"
        authenticator = security.authenticator("metrics")
        assert authenticator.failures == {"missing": 1, "malformed": 3, "unknown": 1, "not_admin": 0}
        _, text = fetch(port, authorization=f"Bearer {tokens.client}")
        assert 'rankgate_auth_failures_total{listener="metrics",reason="malformed"} 3.0' in text
        assert 'rankgate_credential_loads_total{files="tokens",outcome="loaded"} 1.0' in text
        assert not [each for each in (tokens.client, tokens.operator) if each in text]


def test_a_refusal_names_its_scheme(tmp_path):
    with page(auth=Tokens(tmp_path).settings) as (port, _):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
        connection.close()


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/metrics", 200, "rankgate_build_info"),
        ("/metrics?x=1", 200, "rankgate_build_info"),
        ("/", 200, "rankgate: the metrics are at /metrics\n"),
        ("", 200, "rankgate: the metrics are at /metrics\n"),
        ("/metrics/", 404, "the metrics are at /metrics"),
        ("/metricsx", 404, "the metrics are at /metrics"),
        ("//metrics", 200, "rankgate_build_info"),  # the library makes one slash of several
        ("/healthz", 404, "the metrics are at /metrics"),
    ],
)
@pytest.mark.parametrize("has_tokens", [False, True])
def test_the_page_is_at_one_path_and_names_no_server(tmp_path, path, status, text, has_tokens):
    tokens = Tokens(tmp_path)
    with page(**({"auth": tokens.settings} if has_tokens else {})) as (port, _):
        for headers in ({}, {"Authorization": f"Bearer {tokens.client}"}):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            body = answer.read().decode()
            connection.close()
            is_refused = has_tokens and not headers
            assert answer.status == (401 if is_refused else status)
            assert is_refused or text in body
            assert answer.headers["Server"] is None


@pytest.mark.parametrize(
    ("request_line", "status"), [(b"GET /" + b"x" * (1 << 16), 414), (b"GET / HTTP/x", 400), (b"GET", 400)]
)
def test_what_is_no_request_is_refused_without_the_servers_name(request_line, status):
    with page() as (port, _), socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as client:
        client.sendall(request_line + b"\r\n\r\n")
        answer = client.makefile("rb").read()
        assert str(status).encode() in answer
        assert b"Server:" not in answer
        assert b"BaseHTTP" not in answer


@pytest.mark.parametrize("is_secure", [False, True], ids=["plaintext", "tls"])
def test_clients_that_say_nothing_keep_nobody_out_and_are_dropped(authority, served, monkeypatch, is_secure):
    monkeypatch.setattr(metrics_server, "_SILENCE_S", 0.2)
    context = client_context(authority) if is_secure else None
    with page(**({"tls": served.settings} if is_secure else {})) as (port, _):
        silent = [socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) for _ in range(3)]
        started = time.monotonic()
        assert is_served(port, context)
        assert time.monotonic() - started < WAIT_S / 2
        for client in silent:
            assert client.recv(1) == b""
            client.close()


def test_connections_are_bounded_and_come_free_again(monkeypatch):
    monkeypatch.setattr(metrics_server, "_MAX_CONNECTIONS", 2)
    with page() as (port, _):
        held = [socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) for _ in range(2)]
        # Sooner than any of them would be dropped for its silence.
        with socket.create_connection(("127.0.0.1", port), timeout=metrics_server._SILENCE_S / 2) as third:
            assert third.recv(1) == b""
        for client in held:
            client.close()
        # More often than there are places: a thread gives its place back after its answer has left.
        deadline = time.monotonic() + WAIT_S
        for _ in range(5):
            while not is_served(port, None):
                assert time.monotonic() < deadline


def test_a_client_without_tls_writes_nothing_to_stderr(served, capfd):
    with page(tls=served.settings) as (port, _):
        for _ in range(2):
            assert not is_served(port, None)
    assert capfd.readouterr().err == ""
