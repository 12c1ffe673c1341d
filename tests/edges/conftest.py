"""Certificates of the gateway's own, where a test of the listeners wants them."""

import pytest

from tests.support.certificates import Authority


@pytest.fixture
def authority(tmp_path):
    """The CA that signs the gateway and its clients."""
    return Authority(tmp_path)


@pytest.fixture
def served(authority):
    """The gateway's certificate and key, in files."""
    return authority.files("gateway")
