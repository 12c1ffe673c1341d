"""Families by name."""

import pytest

from gateway.types import EngineRequest, Sampling
from gateway.wire.registry import protocol_for
from tests.support.wire import unpack

REQUEST = EngineRequest(wire_id="r", prompt_token_ids=[1], sampling=Sampling(max_tokens=1))


def test_families_differ_in_what_the_core_needs_to_know():
    tokenspeed, vllm = protocol_for("tokenspeed"), protocol_for("vllm")
    assert (tokenspeed.name, tokenspeed.load_semantics, tokenspeed.counts_completion_tokens) == (
        "tokenspeed",
        "resident",
        True,
    )
    assert (vllm.name, vllm.load_semantics, vllm.counts_completion_tokens) == ("vllm", "disjoint", False)


def test_client_index_reaches_the_wire_of_the_family_that_has_one():
    assert unpack(protocol_for("vllm", client_index=3).encode_add(REQUEST)[1])[11] == 3
    assert protocol_for("tokenspeed", client_index=3).encode_add(REQUEST) == protocol_for("tokenspeed").encode_add(
        REQUEST
    )


def test_unknown_family():
    with pytest.raises(ValueError, match="one of tokenspeed, vllm"):
        protocol_for("sglang")
