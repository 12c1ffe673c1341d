"""Which handler serves a call, however many were added and in whichever order."""

from types import SimpleNamespace

import pytest

from gateway.h2.rpc.heads import CallHead
from gateway.h2.rpc.status import Code, RpcError
from gateway.h2.server.handlers import Handlers


def generic(*methods):
    return SimpleNamespace(service=lambda head: head.method if head.method in methods else None)


def head(method):
    return CallHead(method, (), is_gzip=False)


def test_one_alone_is_asked_without_a_detour():
    handlers = Handlers()
    assert handlers.only is None
    handlers.add_generic([generic("/a/b")])
    assert handlers.only is not None
    assert handlers.only(head("/a/b")) == handlers.find(head("/a/b")) == "/a/b"
    assert handlers.only(head("/a/c")) is None


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_with_others_beside_it_all_are_asked(order):
    handlers = Handlers()
    steps = (lambda: handlers.add_generic([generic("/a/b")]), lambda: handlers.add_registered("s", {"m": "registered"}))
    for number in order:
        steps[number]()
    assert handlers.only is None
    assert [handlers.find(head(method)) for method in ("/a/b", "/s/m")] == ["/a/b", "registered"]
    with pytest.raises(RpcError) as caught:
        handlers.find(head("/a/c"))
    assert caught.value.code == Code.UNIMPLEMENTED


def test_of_several_the_first_that_knows_the_method_gets_it():
    handlers = Handlers()
    handlers.add_generic([generic("/a/b")])
    handlers.add_generic([generic("/c/d", "/a/b")])
    assert handlers.only is None
    assert [handlers.find(head(method)) for method in ("/a/b", "/c/d")] == ["/a/b", "/c/d"]
