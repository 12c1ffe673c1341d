"""Every setting of the listeners reaches the server: as an option of its own, or as what a caller sees."""

import resource

import grpc
import pytest

from gateway.edges.grpc_options import MAX_ADMIN_CONNECTIONS, max_connections, server_options
from gateway.types import TokenLogprob
from tests.support.grpc_edge import generate_request, make_config, serve


def options(**sections):
    config = make_config(**sections)
    found = server_options(config, max_connections(config))
    names = [name for name, _ in found]
    assert len(names) == len(set(names)), "an option given twice"
    return dict(found)


def keepalive(**values):
    return {"listen": {"keepalive": values}}


def limits(**values):
    return {"limits": values}


DEFAULT_CONNECTIONS = int(resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 0.75)


@pytest.mark.parametrize(
    ("sections", "option", "expected", "by_default"),
    [
        (keepalive(time_s=7.5), "grpc.keepalive_time_ms", 7500, 60_000),
        (keepalive(timeout_s=0.25), "grpc.keepalive_timeout_ms", 250, 20_000),
        (keepalive(timeout_s=0.25), "grpc.http2.ping_timeout_ms", 250, 20_000),
        (keepalive(min_client_ping_s=3), "grpc.http2.min_ping_interval_without_data_ms", 3000, 10_000),
        (keepalive(max_connection_age_s=9), "grpc.max_connection_age_ms", 9000, None),
        (
            keepalive(max_connection_age_s=9, max_connection_age_grace_s=4),
            "grpc.max_connection_age_grace_ms",
            4000,
            None,
        ),
        (keepalive(max_connection_age_s=9), "grpc.max_connection_age_grace_ms", 600_000, None),
        ({"listen": {"max_message_bytes": 1234}}, "grpc.max_receive_message_length", 1234, 2 << 20),
        ({"listen": {"max_message_bytes": 1234}}, "grpc.max_send_message_length", 1234, 64 << 20),
        ({"limits": {"max_streams_per_connection": 17}}, "grpc.max_concurrent_streams", 17, 1024),
        (limits(max_request_bytes=1234), "grpc.max_receive_message_length", 2468, 2 << 20),
        (limits(max_metadata_bytes=2000), "grpc.max_metadata_size", 4000, 32 << 10),
        (limits(max_metadata_bytes=2000), "grpc.absolute_max_metadata_size", 4000, 32 << 10),
        (limits(handshake_timeout_s=1.5), "grpc.server_handshake_timeout_ms", 1500, 20_000),
        (limits(idle_connection_timeout_s=7), "grpc.max_connection_idle_ms", 7000, 1_800_000),
        (limits(max_connections=12), "grpc.max_allowed_incoming_connections", 12, DEFAULT_CONNECTIONS),
        ({}, "grpc.so_reuseport", 0, 0),
    ],
)
def test_the_setting_is_an_option_of_the_server(sections, option, expected, by_default):
    assert options(**sections)[option] == expected
    assert options().get(option) == by_default


def test_what_is_switched_off_is_no_option():
    assert "grpc.max_connection_idle_ms" not in options(**limits(idle_connection_timeout_s=None))


@pytest.mark.parametrize(
    ("files", "connections"), [(1024, 768), (20_000, 15_000), (1, 1), (resource.RLIM_INFINITY, 16_384)]
)
def test_connections_leave_files_for_the_ranks(monkeypatch, files, connections):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert max_connections(make_config()) == connections
    assert max_connections(make_config(**limits(max_connections=7))) == 7
    assert MAX_ADMIN_CONNECTIONS < 16_384


async def answered(edge, prompt, tokens):
    """The status of a call whose request and only response have about these sizes."""
    call = edge.stub.Generate(generate_request((1,) * prompt, sampling={"max_tokens": tokens}))
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()
    return await call.code(), ""


def all_at_once(driver, request):
    """Engine: every token in one turn, with log probabilities, so that one message holds them all."""
    count = request.arrived.sampling.max_tokens
    driver.tokens(request, [1] * count, logprobs=[TokenLogprob(-1.0)] * count, finish="length")


@pytest.mark.parametrize(("prompt", "tokens"), [(1, 1), (3000, 1)])
async def test_messages_within_the_bound_pass(prompt, tokens):
    async with serve(all_at_once, listen={"max_message_bytes": 4000}) as edge:
        assert await answered(edge, prompt, tokens) == (grpc.StatusCode.OK, "")


async def test_a_request_over_the_bound_is_refused():
    async with serve(all_at_once, listen={"max_message_bytes": 4000}) as edge:
        code, details = await answered(edge, 5000, 1)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        # The gRPC library has its own words for it.
        assert "larger than max" in details.lower() or "at most 4000 are taken" in details
        assert not edge.driver.requests
    async with serve(all_at_once, model={"max_context_tokens": 9000}) as edge:
        assert await answered(edge, 5000, 1) == (grpc.StatusCode.OK, "")


@pytest.mark.parametrize("tokens", [1000, 4000])  # less than a frame of HTTP/2, and more
async def test_a_response_over_the_bound_ends_its_call(tokens):
    async with serve(all_at_once, listen={"max_message_bytes": 4000}) as edge:
        code, _ = await answered(edge, 1, tokens)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not edge.driver.live
    async with serve(all_at_once) as edge:
        assert await answered(edge, 1, tokens) == (grpc.StatusCode.OK, "")
