"""Runs on the loop that `rankgate serve` runs on."""

import pytest
import uvloop


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories():
    return {"uvloop": uvloop.new_event_loop}
