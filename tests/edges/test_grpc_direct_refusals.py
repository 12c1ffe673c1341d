"""Generate without a handler: what is refused before its request is accepted, and what a defect of ours ends in."""

import pytest
from structlog.testing import capture_logs

from gateway.core.errors import GatewayError, Reason
from gateway.edges.grpc_request import RequestReader
from tests.edges.test_grpc_stream import settle
from tests.support.direct import FakeCall, World
from tests.support.grpc_edge import generate_request


@pytest.fixture
def world():
    world = World()
    yield world
    assert world.is_clear()


class TestRefusals:
    @pytest.mark.parametrize(
        ("metadata", "fields", "reason"),
        [
            ([("x-data-parallel-rank", "x")], {}, "INVALID_RANK"),
            ([], {"prompt": (1,) * 4096}, "PROMPT_TOO_LONG"),
            ([], {"request_id": " r"}, "INVALID_REQUEST"),
        ],
    )
    def test_what_the_request_says(self, world, metadata, fields, reason):
        call = FakeCall(metadata)
        world.serve(generate_request(**fields).SerializeToString(), call)
        assert call.reason == reason
        assert world.gate.rejection_durations.cumulative()[-1][1] == 1

    def test_garbage(self, world):
        call = FakeCall()
        world.serve(b"\xff\xff\xff", call)
        assert (call.code, call.reason) == (3, "INVALID_REQUEST")

    def test_what_the_core_says_comes_with_the_id(self, world):
        world.driver.refusal = GatewayError(Reason.GATEWAY_FULL, "full")
        call = FakeCall()
        world.serve(generate_request(request_id="r").SerializeToString(), call)
        assert (call.code, call.reason, call.trailing["x-request-id"]) == (8, "GATEWAY_FULL", b"r")

    def test_a_message_that_is_too_large(self, world):
        call = FakeCall()
        world.serve(bytes(world.gate.max_request_bytes + 1), call)
        assert call.reason == "MESSAGE_TOO_LARGE"
        assert world.gate.hits["max_request_bytes"] == 1

    async def test_too_many_calls(self):
        world = World(limits={"max_streams": 1})
        first, _, _ = world.start()
        call = FakeCall()
        world.serve(generate_request().SerializeToString(), call)
        assert call.reason == "TOO_MANY_STREAMS"
        assert world.gate.streams == 1
        first.leave()
        await settle()
        assert world.is_clear()


class TestDefects:
    """Each is answered and logged, and nothing stays live."""

    def check(self, world, call, log):
        assert (call.code, call.reason) == (13, "INTERNAL")
        assert call.details == "Generate failed inside the gateway; its log has the details"
        assert "rpc_failed" in [line["event"] for line in log]

    async def test_before_the_request_is_submitted(self, world, monkeypatch):
        monkeypatch.setattr(RequestReader, "generate", None)
        call = FakeCall()
        with capture_logs() as log:
            world.serve(generate_request().SerializeToString(), call)
        self.check(world, call, log)

    async def test_in_the_making_of_a_message_that_waited(self, world, monkeypatch):
        call, request, writer = world.start()
        call.is_shutting = True
        world.driver.tokens(request, [1])
        world.driver.tokens(request, [2])
        await settle()
        world.driver.tokens(request, [3])
        await settle()
        writer.send = None
        with capture_logs() as log:
            call.open_up()
        self.check(world, call, log)
        await settle()
        assert request.error.reason is Reason.INTERNAL

    @pytest.mark.parametrize("has_waited", [False, True])
    async def test_at_the_end(self, world, monkeypatch, has_waited):
        call, request, _ = world.start()
        monkeypatch.setattr("gateway.edges.grpc_writer.trailing_block", None)
        call.is_shutting = has_waited
        with capture_logs() as log:
            world.driver.tokens(request, [1], finish="stop")
            await settle()
            if has_waited:
                call.open_up()
        self.check(world, call, log)


class TestHeads:
    async def test_what_headers_say_is_read_once(self, world, monkeypatch):
        calls = []
        read = RequestReader.headers
        monkeypatch.setattr(RequestReader, "headers", lambda self, metadata: calls.append(1) or read(self, metadata))
        first, again = FakeCall([("x-tenant-id", "a")]), FakeCall()
        again.head = first.head
        for call in (first, again):
            world.serve(generate_request().SerializeToString(), call)
        assert [arrived.tenant for arrived in world.driver.arrivals] == ["a", "a"]
        assert len(calls) == 1
        for call in (first, again):
            call.leave()
        await settle()

    async def test_a_deadline_is_the_calls_own(self, world):
        calls = first, again, plain = FakeCall(remaining=5.0), FakeCall(remaining=500.0), FakeCall()
        again.head = plain.head = first.head
        for call in calls:
            world.serve(generate_request().SerializeToString(), call)
        one, other, none = (arrived.deadline_at for arrived in world.driver.arrivals)
        assert 490 < other - one < 500
        assert none is None
        for call in calls:
            call.leave()
        await settle()
