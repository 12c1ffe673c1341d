"""Readers and ordered answers: who waits for his turn is not slow, whoever has it and doesn't read is."""

import asyncio

import grpc
import pytest

from engine_stub.backend.synthetic import StepTime
from gateway.core.errors import Reason
from tests.support.by_hand import held, report
from tests.support.calls import Generation, make_prompt, make_request
from tests.support.grpc_edge import error_info, stream_failure
from tests.support.stack import expected, running_gateway, stub_config, until

LIMIT_BYTES = 4096
BYTES_PER_TOKEN = 4
LONG = 4_000
"""Tokens that take some four times the limit."""
UNREAD = 12_000
"""More than the transport takes before its reader reads."""
QUICK = stub_config(time_scale=1.0, step_time=StepTime(fixed_ms=0.2, per_decode_row_us=0.0))
NO_READ_AHEAD = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
ORDERED = {
    "ordering": "preserve",
    "limits": {"default_deadline_s": 30.0, "max_stream_buffer_bytes": LIMIT_BYTES},
}
MODES = {
    "direct": {},
    "queue": {"scheduling": {"mode": "queue", "queue": {"order": "fcfs"}}},
    "batch": {"scheduling": {"mode": "batch", "queue": {"order": "fcfs"}}},
}


def outcome_of(stack, request_id):
    return [entry["outcome"] for entry in stack.logged("request_ended") if entry["request_id"] == request_id]


@pytest.mark.parametrize("mode", MODES)
async def test_an_answer_that_waits_for_its_turn_is_not_a_slow_reader_s(protocol, mode):
    """All of it is generated while the first one of the order stands still; then it leaves, whole."""
    async with running_gateway(protocol, ranks=2, stub=QUICK, **ORDERED, **MODES[mode]) as stack:
        stack.ranks[0].set_faults(silent=True)
        client = stack.client()
        head = Generation(client, make_request(make_prompt(3), 5, data_parallel_rank=0))
        await until(lambda: stack.router.ordering.places == 1, "the head's place")
        request = make_request(make_prompt(3, 1), LONG, data_parallel_rank=1, request_id="waits", sampling={"n": 2})
        waits = Generation(client, request)
        await until(lambda: stack.router.in_flight == 1 and stack.router.ordering.places == 2, "it to be generated")
        # What is charged is what it generated, and no more of what it might have.
        assert stack.router.ordering.held_bytes == 2 * LONG * BYTES_PER_TOKEN > 7 * LIMIT_BYTES
        assert waits.outcome.messages == 0
        stack.ranks[0].set_faults(silent=False)
        (await head.done()).assert_complete(head.request)
        (await waits.done()).assert_complete(request)
        assert outcome_of(stack, "waits") == ["ok"]


async def test_what_was_held_does_not_count_when_the_turn_comes_midway(protocol):
    """Half of it waits, the other half is generated while it is read."""
    async with running_gateway(protocol, ranks=2, stub=QUICK, **ORDERED) as stack:
        stack.ranks[0].set_faults(silent=True)
        client = stack.client()
        head = Generation(client, make_request(make_prompt(3), 5, data_parallel_rank=0))
        await until(lambda: stack.router.ordering.places == 1, "the head's place")
        waits = Generation(client, make_request(make_prompt(3, 1), LONG, data_parallel_rank=1))
        await until(lambda: stack.ranks[1].tokens_generated > LONG // 2, "half of it")
        assert waits.outcome.messages == 0
        stack.ranks[0].set_faults(silent=False)
        await head.done()
        await waits.first_token()
        assert stack.ranks[1].tokens_generated < LONG, "it is read while it grows"
        (await waits.done()).assert_complete(waits.request)


async def test_the_head_that_does_not_read_is_ended_and_the_next_ones_leave(protocol):
    async with running_gateway(protocol, ranks=2, stub=QUICK, **ORDERED) as stack:
        slow = stack.client(*NO_READ_AHEAD).Generate(
            make_request(make_prompt(3), UNREAD, data_parallel_rank=0, request_id="slow")
        )
        await until(lambda: stack.router.ordering.places == 1, "the head's place")
        client = stack.client()
        behind = [Generation(client, make_request(make_prompt(3, n), 2_000, data_parallel_rank=1)) for n in range(3)]
        for each in behind:
            (await each.done()).assert_complete(each.request)
        assert outcome_of(stack, "slow") == [Reason.SLOW_READER]
        await stack.ranks[0].wait_until(lambda: len(stack.ranks[0].received_aborts) == 1)
        error, responses = await stream_failure(slow)
        assert (error.code(), error_info(error).reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.SLOW_READER)
        received = [token for response in responses for token in response.token_ids]
        assert received == expected(make_prompt(3), len(received))


async def test_one_that_does_not_read_gets_its_turn_before_it_is_judged(protocol):
    """It doesn't read while it waits either; only what is generated from its turn on counts against it.

    Its first sequence fills the transport, so that what was held of the second one stays where it is.
    """
    async with running_gateway(protocol, ranks=2, auto_step=False, **ORDERED) as stack:
        head, head_id = await held(stack, 0)
        request = make_request([1, 2, 3], UNREAD, data_parallel_rank=1, request_id="slow", sampling={"n": 2})
        slow = stack.client(*NO_READ_AHEAD).Generate(request)
        await until(lambda: len(stack.ranks[1].live_ids) == 2, "the second one")
        # Ids end in the sequence's and the attempt's number.
        first, second = sorted(stack.ranks[1].live_ids, key=lambda wire_id: wire_id.split("-")[-2])
        tokens, sent = expected([1, 2, 3], UNREAD), 6_000
        await report(stack, 1, [(wire_id, tokens[:sent], "") for wire_id in (first, second)], None)
        await report(stack, 0, [(head_id, [7], "length")], None)
        await head.done()
        await until(lambda: stack.router.ordering.held_bytes == 0, "its turn")
        await asyncio.sleep(0.05)
        while stack.router.live_count and sent < UNREAD:
            await report(stack, 1, [(second, tokens[sent : sent + 200], "")], None)
            sent += 200
            # Nobody has read a byte of it, and 24 kB of it were paid for.
            assert stack.router.live_count == 1 or sent > 6_000 + LIMIT_BYTES // BYTES_PER_TOKEN
        assert sent < UNREAD, "it is ended in the end"
        await until(lambda: outcome_of(stack, "slow") == [Reason.SLOW_READER], "its end")
        error, responses = await stream_failure(slow)
        assert error_info(error).reason == Reason.SLOW_READER
        for index in range(2):
            received = [token for response in responses if response.index == index for token in response.token_ids]
            assert received == tokens[: len(received)]
