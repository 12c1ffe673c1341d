"""TokenSpeed ADD and ABORT against the golden bytes and a declaration of the engine's own structs."""

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.types import EngineRequest, Sampling
from gateway.wire.common import MAX_REMEMBERED_STOPS
from gateway.wire.tokenspeed import TokenSpeedProtocol, requests
from tests.support.wire import any_speed, tokenspeed_vectors, unpack
from tests.support.wire_structs import TokenizedGenerateReqInput, TokenSpeedSampling

ENGINE = msgspec.msgpack.Decoder(TokenizedGenerateReqInput)
PROTOCOL = TokenSpeedProtocol()


def request(**sampling):
    return EngineRequest(
        wire_id="vec-1", prompt_token_ids=[1, 2, 3], sampling=Sampling(**({"max_tokens": 8} | sampling))
    )


def engine_reads(frames):
    kind, payload = frames
    assert kind == b"\x00"
    return ENGINE.decode(payload)


def test_golden_add_field_by_field():
    """The vector's sender derived its sampling itself (`is_normalized`); we leave that to the engine."""
    golden = ENGINE.decode(tokenspeed_vectors()["add-11"])
    ours = engine_reads(
        PROTOCOL.encode_add(request(stop_token_ids=(2,), temperature=0.5, top_p=0.9, seed=42, logprobs=0))
    )
    theirs = golden.sampling_params
    assert (theirs.is_normalized, theirs.top_k, theirs.stop_strs) == (True, 2**30, [])
    theirs.is_normalized, theirs.top_k, theirs.stop_strs = False, -1, None
    for field in TokenSpeedSampling.__struct_fields__:
        assert getattr(ours.sampling_params, field) == getattr(theirs, field), field
    for field in TokenizedGenerateReqInput.__struct_fields__:
        assert getattr(ours, field) == getattr(golden, field), field


def test_golden_add_needs_no_other_bytes():
    ours = PROTOCOL.encode_add(request(stop_token_ids=(2,), temperature=0.5, top_p=0.9, seed=42, logprobs=0))[1]
    golden = unpack(tokenspeed_vectors()["add-11"])
    golden[5][5], golden[5][26], golden[5][28] = -1, None, False
    assert unpack(ours) == golden


def test_the_message_is_the_11_element_prefix():
    message = unpack(PROTOCOL.encode_add(request())[1])
    assert len(message) == 11
    assert message[0] == "TokenizedGenerateReqInput"
    assert len(message[5]) == 29


SAMPLING = st.builds(
    Sampling,
    max_tokens=st.integers(1, 2**31),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.01, 1),
    top_k=st.just(-1) | st.integers(1, 1000),
    min_p=st.floats(0, 1),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 2),
    min_tokens=st.integers(0, 100),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    logprobs=st.none() | st.integers(0, 20),
    stop_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
    ignore_eos=st.booleans(),
)


@any_speed
@given(SAMPLING, st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=30), st.text(min_size=1, max_size=40))
def test_every_parameter_arrives(sampling, prompt, wire_id):
    got = engine_reads(PROTOCOL.encode_add(EngineRequest(wire_id=wire_id, prompt_token_ids=prompt, sampling=sampling)))
    params = got.sampling_params
    assert (got.rid, got.input_ids, got.stream) == (wire_id, prompt, True)
    assert got.return_logprob is (sampling.logprobs is not None)
    assert got.top_logprobs_num == (sampling.logprobs or 0)
    assert got.logprob_start_len == -1
    assert params.max_new_tokens == sampling.max_tokens
    assert params.min_new_tokens == sampling.min_tokens
    assert (params.stop_token_ids or set()) == set(sampling.stop_token_ids)
    for field in ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"):
        assert getattr(params, field) == getattr(sampling, field)
    assert params.repetition_penalty == sampling.repetition_penalty
    assert (params.seed, params.ignore_eos) == (sampling.seed, sampling.ignore_eos)
    assert (params.n, params.stop, params.stop_strs, params.is_normalized) == (1, None, None, False)


@pytest.mark.parametrize("prompt", [(1, 2, 3), array("I", [1, 2, 3]), range(1, 4)])
def test_any_sequence_of_ids_is_a_prompt(prompt):
    frames = PROTOCOL.encode_add(
        EngineRequest(wire_id="vec-1", prompt_token_ids=prompt, sampling=Sampling(max_tokens=8))
    )
    assert frames == PROTOCOL.encode_add(request())


def test_abort():
    assert PROTOCOL.encode_abort(["req-1"]) == [b"\x01", tokenspeed_vectors()["abort-1"]]
    assert unpack(PROTOCOL.encode_abort(("a", "b"))[1]) == ["a", "b"]


def test_settings_that_came_before_are_encoded_as_if_they_had_not():
    for sampling in ({}, {"temperature": 0.0, "seed": 7}, {"stop_token_ids": (9, 4), "min_tokens": 2}, {"logprobs": 0}):
        first, second = (PROTOCOL.encode_add(request(**sampling)) for _ in range(2))
        assert first == second
        plain = requests._sampling_params(Sampling(**({"max_tokens": 8} | sampling)))
        assert msgspec.msgpack.encode(plain) in second[1]


def test_settings_with_many_stop_ids_are_not_kept():
    requests._remembered_sampling.cache_clear()
    PROTOCOL.encode_add(request(stop_token_ids=tuple(range(MAX_REMEMBERED_STOPS + 1))))
    assert requests._remembered_sampling.cache_info().currsize == 0
    PROTOCOL.encode_add(request(stop_token_ids=tuple(range(MAX_REMEMBERED_STOPS))))
    assert requests._remembered_sampling.cache_info().currsize == 1
