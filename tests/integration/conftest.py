"""Fixtures of the whole-gateway tests."""

import pytest

from tests.support.stack import PROTOCOLS


@pytest.fixture(params=PROTOCOLS)
def protocol(request):
    """Every test that takes it runs once per engine family."""
    return request.param
