"""Families by name."""

from typing import get_args

import pytest

from gateway.types import FAMILIES, EngineRequest, Protocol, Sampling
from gateway.wire.registry import protocol_for
from tests.support.wire import unpack

REQUEST = EngineRequest(wire_id="r", prompt_token_ids=[1], sampling=Sampling(max_tokens=1))


def test_every_family_has_a_codec_and_a_row_in_the_table():
    assert set(FAMILIES) == set(get_args(Protocol))
    assert [protocol_for(name).name for name in FAMILIES] == list(FAMILIES)


@pytest.mark.parametrize(
    ("name", "semantics", "counts", "alternatives"),
    [("tokenspeed", "resident", True, False), ("vllm", "disjoint", False, True)],
)
def test_families_differ_in_what_the_core_needs_to_know(name, semantics, counts, alternatives):
    family = FAMILIES[name]
    assert (family.load_semantics, family.counts_completion_tokens) == (semantics, counts)
    assert family.has_logprob_alternatives is alternatives


def test_client_index_reaches_the_wire_of_the_family_that_has_one():
    assert unpack(protocol_for("vllm", client_index=3).encode_add(REQUEST)[1])[11] == 3
    assert protocol_for("tokenspeed", client_index=3).encode_add(REQUEST) == protocol_for("tokenspeed").encode_add(
        REQUEST
    )


def test_unknown_family():
    with pytest.raises(ValueError, match="one of tokenspeed, vllm"):
        protocol_for("sglang")
