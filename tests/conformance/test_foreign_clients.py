"""HTTP/2 clients that know nothing of gRPC, with requests made by hand, against the gateway's own services.

curl and nghttp show headers, bodies and trailers as they are; h2load (from the same package as nghttp, Debian's
nghttp2-client) makes many calls at once. A program that is not installed is skipped, by name.
"""

import asyncio
import contextlib
import re
import shutil
import subprocess

import pytest

from gateway.edges.grpc_status import CODES
from gateway.v1 import gateway_pb2
from tests.conformance.wire import prefixed
from tests.support.certificates import Authority
from tests.support.fake_driver import count_up
from tests.support.grpc_edge import generate_request, serve
from tests.support.secured_edge import secured

GENERATE = "/gateway.v1.GatewayService/Generate"
LIST_RANKS = "/gateway.v1.GatewayService/ListRanks"
FIELDS = ("-H", "content-type: application/grpc", "-H", "te: trailers")
CALLS = 300
WAIT_S = 60.0


def needs(program):
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


class Target:
    """A gateway's edge on our own transport, and what a request to it needs."""

    def __init__(self, url, edge, tmp_path, trust):
        self.url = url
        self.driver = edge.driver
        self.trust = trust
        self.directory = tmp_path

    def body(self, message):
        """A file with one message as a request's body."""
        path = self.directory / "body"
        path.write_bytes(prefixed(message.SerializeToString()))
        return str(path)

    def generate(self, tokens=4):
        return self.body(generate_request(sampling={"max_tokens": tokens}))


@pytest.fixture(params=["cleartext", "TLS"])
async def target(request, tmp_path):
    async with contextlib.AsyncExitStack() as cleanup:
        if request.param == "TLS":
            authority = Authority(tmp_path)
            files = authority.files("gateway")
            listen = {"tls": {"cert_file": str(files.cert), "key_file": str(files.key)}, "transport": "fast"}
            edge = await cleanup.enter_async_context(secured(count_up, **listen))
            yield Target(f"https://{edge.servers.grpc_address}", edge, tmp_path, ("--cacert", str(authority.path)))
        else:
            edge = await cleanup.enter_async_context(serve(count_up, listen={"transport": "fast"}))
            yield Target(f"http://{edge.servers.grpc_address}", edge, tmp_path, ("--http2-prior-knowledge",))


async def run(*command):
    """What the program wrote; it must succeed."""
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def messages(data):
    """The messages of a response's body, which must be whole."""
    found = []
    while data:
        assert data[0] == 0
        size = int.from_bytes(data[1:5])
        assert len(data) >= 5 + size
        found.append(data[5 : 5 + size])
        data = data[5 + size :]
    return found


async def curl(target, path, body, *options):
    """(messages, fields of headers and trailers)."""
    fields = target.directory / "fields"
    command = ["curl", "--silent", "--show-error", *target.trust, *FIELDS, *options, "--data-binary", f"@{body}"]
    out = await run(*command, "--dump-header", str(fields), "--output", "-", target.url + path)
    return messages(out), fields.read_bytes().decode()


@needs("curl")
class TestCurl:
    async def test_a_stream_of_tokens(self, target):
        found, fields = await curl(target, GENERATE, target.generate(5))
        answers = [gateway_pb2.GenerateResponse.FromString(each) for each in found]
        assert [token for each in answers for token in each.token_ids] == [3, 4, 5, 6, 7]
        assert fields.startswith("HTTP/2 200")
        assert "content-type: application/grpc\r\n" in fields
        assert "grpc-status: 0\r\n" in fields
        assert "x-rankgate-rank: " in fields
        assert fields.index("content-type") < fields.index("grpc-status")

    async def test_a_unary_call(self, target):
        found, fields = await curl(target, LIST_RANKS, target.body(gateway_pb2.ListRanksRequest()))
        (answer,) = found
        assert len(gateway_pb2.ListRanksResponse.FromString(answer).ranks) == 4
        assert "grpc-status: 0\r\n" in fields

    async def test_a_refusal(self, target):
        found, fields = await curl(target, GENERATE, target.generate(), "-H", "x-data-parallel-rank: 99x")
        assert found == []
        assert f"grpc-status: {CODES['INVALID_RANK'].value[0]}\r\n" in fields
        assert re.search(r"grpc-message: \S", fields)
        assert "grpc-status-details-bin: " in fields

    async def test_what_is_no_grpc(self, target):
        _, fields = await curl(target, "/", target.generate(), "-H", "content-type: text/plain")
        assert fields.startswith("HTTP/2 415")


@needs("nghttp")
async def test_nghttp_sees_headers_data_and_trailers(target):
    body = target.body(gateway_pb2.ListRanksRequest())
    out = await run("nghttp", "-v", "--no-dep", "-H", ":method: POST", *FIELDS, "-d", body, target.url + LIST_RANKS)
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.decode("latin-1"))
    kinds = re.findall(r"recv (\w+) frame <length=\d+, flags=0x(\w\w), stream_id=(\d+)>", text)
    response = [(kind, flags) for kind, flags, number in kinds if number != "0" and kind in ("HEADERS", "DATA")]
    assert response == [("HEADERS", "04"), ("DATA", "00"), ("HEADERS", "05")], text
    assert re.search(r"recv \(stream_id=\d+\) :status: 200", text)
    assert re.search(r"recv \(stream_id=\d+\) grpc-status: 0", text)
    assert "GOAWAY" not in text.partition("send GOAWAY")[0]


@needs("h2load")
class TestH2load:
    async def load(self, target, body, path):
        spread = ("-n", str(CALLS), "-c", "3", "-m", "20", "-t", "1")
        out = await run("h2load", *spread, *FIELDS, "-d", body, target.url + path)
        text = out.decode()
        assert f"{CALLS} done, {CALLS} succeeded, 0 failed, 0 errored, 0 timeout" in text, text
        assert f"status codes: {CALLS} 2xx" in text
        return int(re.search(r"\((\d+)\) data", text)[1])

    async def test_streams_of_tokens(self, target):
        """It does not look at grpc-status: whether the answers are whole is seen at the other end, and in their size."""
        size = await self.load(target, target.generate(8), GENERATE)
        requests = target.driver.requests
        assert len(requests) == CALLS
        assert all(request.is_ended for request in requests)
        assert not target.driver.live
        assert size > CALLS * 8 * 2

    async def test_unary_calls(self, target):
        size = await self.load(target, target.body(gateway_pb2.ListRanksRequest()), LIST_RANKS)
        assert size % CALLS == 0, "all answers are the same"
        assert size > CALLS * 4
