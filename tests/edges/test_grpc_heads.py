"""Heads that calls share: what was found for one of them holds for all, as long as the credentials are the same."""

import grpc
import pytest

from gateway.config.security import Auth
from gateway.edges.auth import Authenticator, Role, TokenSet, watched_tokens
from gateway.edges.grpc_gate import CallGate
from gateway.edges.grpc_health import HealthService
from gateway.edges.grpc_methods import Method, Service
from gateway.edges.grpc_server import _Calls
from gateway.h2.rpc.heads import CallHead
from tests.support.certificates import token
from tests.support.grpc_edge import make_config

ONE, OTHER = token("one"), token("other")


async def nothing(data, context):
    pass


class World:
    def __init__(self, *tokens, **limits):
        self.gate = CallGate(make_config(limits=limits))
        self.tokens = watched_tokens(Auth(tokens_file="/nowhere"))
        self.put(*tokens)
        self.doors = Authenticator("grpc", Role.CLIENT, self.tokens) if tokens else None
        services = (Service("s", (Method("M", "server_stream", nothing, lambda gate: lambda data, call: None),)),)
        self.calls = _Calls(services, HealthService().service, self.doors, self.gate)

    def put(self, *tokens):
        self.tokens.value = TokenSet((each, Role.CLIENT) for each in tokens)

    def is_let_in(self, head):
        handler = self.calls.service(head)
        return handler is not None and hasattr(handler, "direct")


def head_of(*metadata, method="/s/M"):
    return CallHead(method, metadata, is_gzip=False)


def bearer(text):
    return head_of(("authorization", f"Bearer {text}"))


def test_a_head_that_was_let_in_is_not_looked_at_again(monkeypatch):
    world, head = World(ONE), bearer(ONE)
    assert world.is_let_in(head)
    monkeypatch.setattr(world.doors, "check", None)
    monkeypatch.setattr(world.gate, "check_metadata", None)
    assert world.is_let_in(head)


def test_other_credentials_are_another_question():
    world, head = World(ONE), bearer(ONE)
    assert world.is_let_in(head)
    world.put(OTHER)
    assert not world.is_let_in(head), "its token is no longer one"
    world.put(ONE)
    assert world.is_let_in(head)


def test_a_head_that_was_refused_is_asked_again_and_counted_each_time():
    world, head = World(ONE), bearer(OTHER)
    assert not world.is_let_in(head)
    world.put(OTHER)
    assert world.is_let_in(head)
    world, head = World(max_metadata_bytes=1024), head_of(("x", "y" * 1000))
    assert [world.is_let_in(head) for _ in range(2)] == [False, False]
    assert world.gate.hits["max_metadata_bytes"] == 2


@pytest.mark.parametrize("method", ["/s/None", "/grpc.health.v1.Health/Check"])
def test_what_is_not_of_a_service_is_not_kept(method):
    head = head_of(method=method)
    World().calls.service(head)
    assert head.memo is None


def test_the_librarys_details_are_answered_as_well():
    class Details(grpc.HandlerCallDetails):
        method = "/s/M"
        invocation_metadata = ()

    assert World().is_let_in(Details())
