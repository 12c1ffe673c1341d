"""Everything about the server runs on both event loops that it is made for."""

import asyncio

import pytest
import uvloop

from tests.h2.site import serving


@pytest.fixture
async def site():
    """A server with default limits, and a client."""
    async with serving() as site:
        yield site


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories():
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
