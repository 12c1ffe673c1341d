"""Generate without a handler: what is pushed when, how calls end, and that nothing overtakes or stands still unseen."""

import gc
import weakref

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2

from gateway.core.errors import GatewayError, Reason
from gateway.core.events import RequestArrived
from gateway.edges.grpc_engine.encode import VLLM
from gateway.edges.grpc_engine.vllm import VllmService
from gateway.edges.grpc_engine.writer import EngineWriter, Wanted
from gateway.edges.grpc_gate import CallGate
from gateway.types import Sampling
from tests.edges.test_grpc_stream import settle
from tests.support.direct import FakeCall, World
from tests.support.driver_site import Site
from tests.support.fake_driver import FakeDriver
from tests.support.grpc_edge import make_config


@pytest.fixture
def world():
    world = World()
    yield world
    assert world.is_clear()


def flush(sequence, *tokens):
    sequence.append(tokens, None)
    sequence.sink.flush(sequence)


async def test_a_flush_pushes_by_itself_and_the_end_ends_the_call(world):
    call, request, writer = world.start(request_id="r")
    assert (world.gate.streams, world.gate.connections, len(world.gate.watch)) == (1, 1, 1)
    for token in (7, 8):
        flush(request.sequences[0], token)
        assert call.tokens[-1] == [token], "without any task's doing"
    world.driver.tokens(request, [9], finish="stop")
    await settle()
    assert call.tokens == [[7], [8], [9]]
    assert call.responses[-1].HasField("finish")
    assert (call.code, call.initial) == (0, None)
    assert call.trailing == {
        "x-request-id": b"r",
        "x-rankgate-rank": b"0",
        "x-rankgate-decision-id": b"1",
        "x-rankgate-queue-ms": b"0.000",
    }
    assert request.sequences == [], "nothing is left for the collector"
    assert writer._call is None


async def test_what_comes_while_it_is_not_ready_leaves_as_one_message(world):
    call, request, writer = world.start()
    call.is_shutting = True
    for token in range(5):
        world.driver.tokens(request, [token])
        await settle()
    assert call.tokens == [[0]]
    assert request.sequences[0].backlog_bytes, "the core counts what is not taken"
    assert writer.writes % 2, "a write is under way"
    call.open_up()
    assert call.tokens == [[0], [1, 2, 3, 4]]
    assert not writer.writes % 2
    world.driver.tokens(request, [5], finish="stop")
    await settle()
    assert call.tokens[2:] == [[5]]
    assert call.code == 0


async def test_sequences_keep_their_order_behind_one_that_waits(world):
    call, request, _ = world.start(sampling={"max_tokens": 9, "n": 3})
    call.is_shutting = True
    for index in (2, 0, 1):
        world.driver.tokens(request, [index], index=index, finish="stop")
    await settle()
    assert [message.index for message in call.responses] == [2]
    assert call.code is None, "its end waits for them"
    call.open_up()
    assert [message.index for message in call.responses] == [2, 0, 1]
    assert call.code == 0
    assert call.trailing["x-rankgate-rank"] == b"0,1,2"


async def test_nothing_overtakes_what_is_about_to_be_pushed(world):
    call, request, _ = world.start(sampling={"max_tokens": 9, "n": 2})
    call.is_shutting = True
    for index in (0, 1):
        world.driver.tokens(request, [index], index=index)
    await settle()
    call.is_shutting, call.is_ready = False, True  # and `on_ready` is about to be called
    flush(request.sequences[0], 2)
    assert call.tokens == [[0]]
    world.driver.end(request)
    await settle()
    assert call.tokens == [[0], [1], [2]]
    assert call.code == 0


async def test_the_end_waits_until_the_last_message_is_taken(world):
    """Only then has the client read everything: until then it can be ended for standing still."""
    call, request, writer = world.start()
    call.is_shutting = True
    world.driver.tokens(request, [1], finish="stop")
    await settle()
    assert call.code is None
    assert writer.writes % 2
    call.open_up()
    assert call.code == 0


@pytest.mark.parametrize("has_ended", [False, True])
async def test_a_client_that_stands_still_is_ended(world, has_ended):
    call, request, writer = world.start()
    call.is_shutting = True
    world.driver.tokens(request, [1])
    await settle()
    world.driver.tokens(request, [2], finish="stop" if has_ended else "")
    await settle()
    writer.end_stalled()
    assert (call.code, call.reason) == (8, "SLOW_READER")
    await settle()
    assert (None if request.error is None else request.error.reason) is (None if has_ended else Reason.SLOW_READER)
    assert request.sequences == []


async def test_a_client_that_the_core_finds_too_slow_learns_it_when_it_reads_again(world):
    world.driver.max_backlog_bytes = 40
    call, request, _ = world.start()
    call.is_shutting = True
    for token in range(20):
        world.driver.tokens(request, [token])
        await settle()
    assert call.code is None
    call.open_up()
    assert (call.tokens, call.code, call.reason) == ([[0]], 8, "SLOW_READER")


async def test_a_transport_that_says_ready_for_nothing_starts_no_write(world):
    call, request, writer = world.start()
    for token in (1, 2, 3):
        world.driver.tokens(request, [token])
        await settle()
        call.open_up()
        assert not writer.writes % 2, "nothing is under way"
    call.is_shutting = True
    world.driver.tokens(request, [4])
    await settle()
    assert writer.writes % 2
    call.open_up()
    call.open_up()
    assert not writer.writes % 2
    call.leave()
    await settle()


async def test_a_farewell_that_is_not_taken_is_a_write_under_way(world):
    call, request, writer = world.start()
    call.is_shutting = True
    writer.farewell = lambda request: [b""]
    world.driver.end(request, GatewayError(Reason.ABORTED, "aborted"))
    await settle()
    assert (call.messages, call.code) == ([b""], None)
    assert writer.writes % 2
    call.open_up()
    assert (call.messages, call.code) == ([b""], 0)
    assert not writer.writes % 2


async def test_a_farewell_that_is_too_large_ends_the_call_and_lets_go_of_the_request(world, monkeypatch):
    call, request, writer = world.start()

    def push(_):
        closed = call.on_closed
        call.finish(8, "too large")
        closed(False)

    monkeypatch.setattr(call, "push", push)
    writer.farewell = lambda request: [b"large"]
    world.driver.end(request, GatewayError(Reason.ABORTED, "aborted"))
    await settle()
    assert (call.code, list(writer.pending), request.sequences) == (8, [], [])


async def test_an_error_comes_after_what_was_pushed(world):
    call, request, _ = world.start(request_id="r")
    world.driver.tokens(request, [1])
    world.driver.end(request, GatewayError(Reason.RANK_LOST, "lost"))
    await settle()
    assert (call.tokens, call.code, call.reason) == ([[1]], 14, "RANK_LOST")
    assert (call.trailing["x-request-id"], call.trailing["x-rankgate-rank"]) == (b"r", b"0")


@pytest.mark.parametrize(
    ("remaining", "is_late", "reason"),
    [(None, False, "CANCELLED"), (None, True, "DEADLINE_EXCEEDED"), (0.01, False, "DEADLINE_EXCEEDED")],
    ids=["client", "deadline", "the client's own deadline, a little earlier"],
)
async def test_a_call_that_ends_early_takes_its_request_along(world, remaining, is_late, reason):
    call, request, _ = world.start(FakeCall(remaining=5.0 if remaining else None))
    flush(request.sequences[0], 1)
    call.remaining = remaining
    call.leave(is_late=is_late)
    assert request.error.reason.value == reason
    flush(request.sequences[0], 2)
    await settle()
    assert call.tokens == [[1]]
    assert request.sequences == []


async def test_a_client_that_leaves_before_it_took_the_end_changes_nothing(world):
    call, request, _ = world.start()
    call.is_shutting = True
    world.driver.tokens(request, [1], finish="stop")
    await settle()
    call.leave()
    assert request.error is None
    assert request.sequences == []


async def test_a_finished_call_leaves_no_cycle(world):
    call, request, writer = world.start()
    gone = [weakref.ref(call), weakref.ref(writer)]
    world.driver.tokens(request, [1], finish="stop")
    await settle()
    world.driver.requests.clear()
    world.driver.arrivals.clear()
    gc.disable()
    try:
        del call, request, writer
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


async def test_callers_that_sent_their_id_as_metadata_get_it_as_a_header(world):
    call, request, _ = world.start(FakeCall([("x-request-id", "mine")]))
    assert call.initial == {"x-request-id": "mine"}
    world.driver.end(request)
    await settle()
    assert call.trailing["x-request-id"] == b"mine"


async def test_a_standard_service_says_farewell_after_an_abort():
    config, driver = make_config(), FakeDriver()
    gate = CallGate(config)
    service = VllmService(config, driver)
    (method,) = (each for each in service.service().methods if each.name == "Generate")
    pb = service.messages
    request = pb.GenerateRequest(
        request_id="r", tokenized=pb.TokenizedInput(input_ids=[1]), sampling_params=pb.SamplingParams(n=2), stream=True
    )
    call = FakeCall()
    method.direct(gate)(request.SerializeToString(), call)
    live = driver.requests[0]
    driver.tokens(live, [4])
    await settle()
    driver.cancel(live, Reason.ABORTED)
    await settle()
    responses = [pb.GenerateResponse.FromString(message) for message in call.messages]
    assert [response.WhichOneof("response") for response in responses] == ["chunk", "complete", "complete"]
    assert [(list(r.complete.output_ids), r.complete.finish_reason) for r in responses[1:]] == [
        ([4], "abort"),
        ([], "abort"),
    ]
    assert (call.code, gate.streams, len(gate.watch)) == (0, 0, 0)


@pytest.mark.parametrize("finish", ["", "stop"])
async def test_a_farewell_is_also_said_for_an_answer_that_is_complete_and_waits_for_its_turn(finish):
    site, gate = Site(ordering="preserve"), CallGate(make_config())
    calls, requests = [], []
    for request_id in ("first", "waits"):
        sampling = Sampling(max_tokens=4)
        sink = EngineWriter("Generate", VLLM, request_id, Wanted(request_id, [5], sampling, 1, None, True))
        arrived = RequestArrived(
            client_key="", request_id=request_id, prompt_token_ids=[5], sampling=sampling, sink=sink
        )
        requests.append(site.driver.submit(arrived))
        calls.append(FakeCall())
        gate.enter(calls[-1].peer(), 1)
        sink.attach(calls[-1], requests[-1], site.driver, gate, calls[-1].peer())
    attempt = requests[1].sequences[0].attempt
    site.batch(attempt.rank, (attempt.wire_id, (7, 8), finish))
    await settle()
    site.driver.cancel(requests[1], Reason.ABORTED)
    await settle()
    (message,) = calls[1].messages
    complete = vllm_engine_pb2.GenerateResponse.FromString(message).complete
    assert (calls[1].code, complete.finish_reason, list(complete.output_ids)) == (0, "abort", [])
