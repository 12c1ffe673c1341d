"""Fixtures of the whole-gateway tests."""

import pytest
import uvloop

from tests.support import stack
from tests.support.stack import PROTOCOLS


@pytest.fixture(params=PROTOCOLS)
def protocol(request):
    """Every test that takes it runs once per engine family."""
    return request.param


@pytest.fixture(params=["grpcio", "fast"])
def transport(request, monkeypatch):
    """Every test of a module that uses it runs once per gRPC server."""
    monkeypatch.setattr(stack, "TRANSPORT", request.param)
    return request.param


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories():
    """The loop that `rankgate serve` runs on; tests of single parts run on the standard library's."""
    return {"uvloop": uvloop.new_event_loop}
