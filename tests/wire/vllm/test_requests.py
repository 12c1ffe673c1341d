"""vLLM ADD and ABORT against golden bytes and a declaration of the engine's own structs."""

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.types import EngineRequest, Sampling
from gateway.wire.common import MAX_REMEMBERED_STOPS
from gateway.wire.vllm import VllmProtocol, requests
from tests.support.wire import any_speed, recorded, unpack, vllm_made
from tests.support.wire_structs import EngineCoreRequest, VllmSampling

ENGINE = msgspec.msgpack.Decoder(EngineCoreRequest)
PROTOCOL = VllmProtocol()

FRONT_END_ADDS = [m for m in recorded() if m.name.startswith("golden-vllm-client-add")]


def engine_reads(frames):
    kind, payload = frames
    assert kind == b"\x00"
    return ENGINE.decode(payload)


def encode(sampling=None, **fields):
    values = {"wire_id": "req-1", "prompt_token_ids": [1, 2, 3], "sampling": Sampling(max_tokens=8)} | fields
    if sampling is not None:
        values["sampling"] = Sampling(**({"max_tokens": 8} | sampling))
    return PROTOCOL.encode_add(EngineRequest(**values))


def stops(**fields):
    """Return (id that stops as EOS, ids that stop, ids that min_tokens masks)."""
    params = engine_reads(encode(**fields)).sampling_params
    return params.eos_token_id, sorted(params.stop_token_ids), sorted(params.all_stop_token_ids)


NOT_SERVED = ("fatal", "sp-", "nocoord-array_tolerance-add-2")  # the last has a key that is no sampling parameter
ADDS = [m for m in recorded() if m.socket == "input" and "-add" in m.name and not m.name.startswith(NOT_SERVED)]


@pytest.mark.parametrize("message", ADDS, ids=lambda m: m.name)
def test_the_declaration_reads_what_real_ranks_took(message):
    """So that the tests below mean something."""
    decoded = ENGINE.decode(message.raw[message.body])
    assert decoded.request_id == unpack(message.raw[message.body])[0]


def test_golden_add_field_by_field():
    golden = ENGINE.decode(vllm_made()["add-22"][0])
    ours = engine_reads(encode({"temperature": 0.5}, arrived_at_unix_s=1.5))
    assert golden.data_parallel_rank == 1  # there the front end's own note, which no rank reads
    golden.data_parallel_rank = None
    golden.sampling_params.skip_reading_prefix_cache = None  # what the rank derives from None
    ours.sampling_params.detokenize = True  # on an engine core there is nothing to detokenize with
    for field in VllmSampling.__struct_fields__:
        assert getattr(ours.sampling_params, field) == getattr(golden.sampling_params, field), field
    for field in EngineCoreRequest.__struct_fields__:
        assert getattr(ours, field) == getattr(golden, field), field


@pytest.mark.parametrize("message", FRONT_END_ADDS, ids=lambda m: m.name)
def test_same_meaning_as_vllms_own_front_end(message):
    """Re-ask what it asked and compare: EOS id 2 there came from the model's generation config."""
    golden = ENGINE.decode(message.raw[2])
    theirs = golden.sampling_params
    ours = engine_reads(
        encode(
            {
                "max_tokens": theirs.max_tokens,
                "temperature": theirs.temperature,
                "top_p": theirs.top_p,
                "top_k": theirs.top_k or -1,
                "presence_penalty": theirs.presence_penalty,
                "seed": theirs.seed,
                "stop_token_ids": tuple(set(theirs.stop_token_ids) - {2}),
                "ignore_eos": theirs.ignore_eos,
            },
            wire_id=golden.request_id,
            prompt_token_ids=golden.prompt_token_ids,
            arrived_at_unix_s=golden.arrival_time,
            eos_token_ids=(2,),
            priority=golden.priority,
        )
    )
    params = ours.sampling_params
    assert (params.ignore_eos, params.all_stop_token_ids) == (theirs.ignore_eos, theirs.all_stop_token_ids)
    # Its tokenizer-less start knew no primary EOS id and had to put id 2 among the plain stop ids.
    assert {*params.stop_token_ids, params.eos_token_id} - {None} == set(theirs.stop_token_ids)
    for field in ("max_tokens", "temperature", "top_p", "top_k", "presence_penalty", "seed", "detokenize", "logprobs"):
        assert getattr(params, field) == getattr(theirs, field), field
    for field in ("request_id", "prompt_token_ids", "arrival_time", "client_index", "current_wave", "priority"):
        assert getattr(ours, field) == getattr(golden, field), field


def test_same_meaning_as_smg():
    """SMG fills in every default and sends 32-bit floats; the rank reads the same request."""
    golden = ENGINE.decode(vllm_made()["add-21-smg"][0])
    temperature = golden.sampling_params.temperature
    ours = engine_reads(
        encode(
            {"temperature": temperature, "max_tokens": 4},
            wire_id="r0",
            arrived_at_unix_s=golden.arrival_time,
            eos_token_ids=(2,),
        )
    )
    ours.sampling_params.detokenize = True
    assert ours == golden


def test_only_positions_that_no_release_moves_are_sent():
    """Positions after 13 differ between 0.24 and 0.32: a rank of another release must not read ours as its own."""
    message = unpack(encode()[1])
    assert len(message) == 14
    assert message[9:] == [None, None, 0, 0, 0]

    kinds = EngineCoreRequest.__annotations__
    names = EngineCoreRequest.__struct_fields__
    defaults = dict.fromkeys(("client_index", "current_wave", "priority"), 0)
    stable = [(name, kinds[name]) for name in names[:9]]
    stable += [(name, kinds[name], defaults.get(name)) for name in names[9:14]]
    release = msgspec.defstruct("Release", [*stable, ("tries", int, 3), ("cut", bool, False)], array_like=True)
    decoded = msgspec.msgpack.decode(encode()[1], type=release)
    assert (decoded.request_id, decoded.tries, decoded.cut) == ("req-1", 3, False)


def test_the_sampling_map_is_sparse():
    assert unpack(encode()[1])[3] == {"max_tokens": 8, "detokenize": False}


def test_max_tokens_equal_to_the_engines_default_is_sent_all_the_same():
    assert unpack(encode({"max_tokens": 16})[1])[3]["max_tokens"] == 16


def test_zero_logprobs_differ_from_none():
    assert engine_reads(encode({"logprobs": 0})).sampling_params.logprobs == 0
    assert engine_reads(encode()).sampling_params.logprobs is None


def test_the_first_eos_id_stops_as_eos_and_the_others_as_stop_ids():
    assert stops(eos_token_ids=(2, 7), sampling={"stop_token_ids": (9,)}) == (2, [7, 9], [2, 7, 9])
    assert stops(eos_token_ids=(2,)) == (2, [], [2])
    assert stops(eos_token_ids=(2, 2)) == (2, [], [2])
    assert stops() == (None, [], [])


def test_ignored_eos_stops_nothing_and_is_still_masked_until_min_tokens():
    sampling = {"ignore_eos": True, "stop_token_ids": (9,)}
    assert stops(eos_token_ids=(2, 7), sampling=sampling) == (None, [9], [2, 7, 9])


def test_an_eos_id_asked_for_as_stop_id_stays_one():
    sampling = {"ignore_eos": True, "stop_token_ids": (2,)}
    assert stops(eos_token_ids=(2,), sampling=sampling) == (None, [2], [2])


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
@given(
    SAMPLING,
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=30),
    st.lists(st.integers(0, 10), max_size=3).map(tuple),
    st.integers(-(2**31), 2**31 - 1),
)
def test_every_parameter_arrives(sampling, prompt, eos, priority):
    got = engine_reads(
        PROTOCOL.encode_add(
            EngineRequest(wire_id="w", prompt_token_ids=prompt, sampling=sampling, eos_token_ids=eos, priority=priority)
        )
    )
    params = got.sampling_params
    assert (got.request_id, got.prompt_token_ids, got.priority) == ("w", prompt, priority)
    for field in ("max_tokens", "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"):
        assert getattr(params, field) == getattr(sampling, field)
    for field in ("repetition_penalty", "min_tokens", "seed", "logprobs", "ignore_eos"):
        assert getattr(params, field) == getattr(sampling, field)
    assert params.top_k == max(sampling.top_k, 0)
    assert set(sampling.stop_token_ids) <= set(params.stop_token_ids)
    assert params.all_stop_token_ids == {*sampling.stop_token_ids, *eos}
    stopping = {*params.stop_token_ids} | ({params.eos_token_id} - {None})
    assert stopping == ({*sampling.stop_token_ids} if sampling.ignore_eos else {*sampling.stop_token_ids, *eos})


@pytest.mark.parametrize("prompt", [(1, 2, 3), array("I", [1, 2, 3]), range(1, 4)])
def test_any_sequence_of_ids_is_a_prompt(prompt):
    assert encode(prompt_token_ids=prompt) == encode()


ABORTS = [m for m in recorded() if m.socket == "input" and m.note.startswith("ABORT")]


@pytest.mark.parametrize("message", ABORTS, ids=lambda m: m.name)
def test_abort_equals_recorded_bytes(message):
    _, kind, payload = message.raw
    assert PROTOCOL.encode_abort(unpack(payload)) == [kind, payload]


def test_settings_that_came_before_are_encoded_as_if_they_had_not():
    for fields in ({}, {"temperature": 0.0, "seed": 7}, {"stop_token_ids": (9, 4), "min_tokens": 2}, {"logprobs": 3}):
        for eos_token_ids in ((), (2,), (2, 9)):
            first, second = (encode(fields, eos_token_ids=eos_token_ids, wire_id=wire_id) for wire_id in ("x-1", "x-2"))
            assert second[1] == first[1].replace(b"x-1", b"x-2")
            plain = requests._sampling_params(Sampling(max_tokens=8, **fields), eos_token_ids)
            assert msgspec.msgpack.encode(plain) in second[1]


def test_settings_with_many_stop_ids_are_not_kept():
    requests._remembered_sampling.cache_clear()
    encode({"stop_token_ids": tuple(range(MAX_REMEMBERED_STOPS + 1))})
    assert requests._remembered_sampling.cache_info().currsize == 0
    encode({"stop_token_ids": tuple(range(MAX_REMEMBERED_STOPS))})
    assert requests._remembered_sampling.cache_info().currsize == 1
