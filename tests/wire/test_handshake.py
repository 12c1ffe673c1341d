"""HELLO, INIT, READY and the ready response of both families; garbage only ever raises WireError."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.wire.handshake import (
    MAX_HANDSHAKE_BYTES,
    Hello,
    WireError,
    decode_hello,
    decode_ready_response,
    encode_init,
    identity_of,
    index_of,
)
from tests.support.wire import any_speed, pack, recorded, tokenspeed_vectors, unpack

VLLM_HELLOS = [m for m in recorded() if m.socket == "handshake" and m.direction == "engine->frontend"]
VLLM_INITS = [m for m in recorded() if m.socket == "handshake" and m.direction == "frontend->engine"]
READY_RESPONSES = [m for m in recorded() if m.socket == "input" and m.direction == "engine->frontend"]


def name(message):
    return message.name


def ready(**fields):
    return pack({"max_model_len": 4096} | fields)


@pytest.mark.parametrize("message", VLLM_HELLOS, ids=name)
def test_recorded_hello_and_ready(message):
    decoded = unpack(message.raw[1])
    assert decode_hello(message.raw[1:]) == Hello(
        status=decoded["status"],
        local=False,
        headless=True,
        parallel_config_hash=decoded.get("parallel_config_hash"),
    )
    assert decoded["status"] in message.name.upper()


def test_recorded_hellos_cover_both_states_and_the_lockstep_hash():
    hellos = [decode_hello(message.raw[1:]) for message in VLLM_HELLOS]
    assert {hello.status for hello in hellos} == {"HELLO", "READY"}
    assert any(hello.parallel_config_hash for hello in hellos)


def test_tokenspeed_hello_and_ready():
    payload = tokenspeed_vectors()["handshake-hello"]
    assert decode_hello([payload]) == Hello(status="HELLO", local=True, headless=True)
    assert decode_hello([payload.replace(b"HELLO", b"READY")]).status == "READY"


def test_hello_takes_the_last_frame_and_ignores_unknown_keys():
    assert decode_hello([b"", memoryview(pack({"status": "HELLO", "later": [1, {"x": 2}]}))]).status == "HELLO"


@pytest.mark.parametrize("message", VLLM_INITS, ids=name)
def test_init_equals_recorded_bytes(message):
    decoded = unpack(message.raw[1])
    addresses = decoded["addresses"]
    ours = encode_init(
        addresses["inputs"],
        addresses["outputs"],
        coordinator_input=addresses["coordinator_input"],
        coordinator_output=addresses["coordinator_output"],
    )
    if addresses["frontend_stats_publish_address"] is None and not decoded["parallel_config"]:
        assert ours == message.raw[1]
    else:  # what only vLLM's own front end fills in
        addresses["frontend_stats_publish_address"] = None
        assert unpack(ours) == {"addresses": addresses, "parallel_config": {}}


def test_init_equals_smg_bytes():
    golden = tokenspeed_vectors()["handshake-init-smg"]
    addresses = unpack(golden)["addresses"]
    assert encode_init(addresses["inputs"], addresses["outputs"]) == golden


@pytest.mark.parametrize("message", READY_RESPONSES, ids=name)
def test_recorded_ready_response(message):
    decoded = unpack(message.raw[1])
    info = decode_ready_response(message.raw[1])
    assert info.max_model_len == 512
    assert info.num_gpu_blocks == decoded["num_gpu_blocks"]
    assert info.block_size == 128
    assert info.kv_capacity_tokens == decoded["kv_cache_size_tokens"] == 2048
    assert info.max_num_seqs == decoded["max_num_seqs"]
    assert info.max_num_batched_tokens == decoded["max_num_batched_tokens"]
    assert info.data_parallel_size == decoded["data_parallel_size"]
    assert info.data_parallel_rank == index_of(message.raw[0])
    assert (info.engine_version, info.dtype) == ("0.32.0", "bfloat16")
    assert info.instance_id == decoded["instance_id"]


def test_tokenspeed_ready_response():
    info = decode_ready_response(
        ready(
            prefix_granularity=64,
            num_gpu_blocks=1000,
            kv_cache_size_tokens=None,
            max_num_batched_tokens=-1,
            vllm_version="tokenspeed-0.1.1",
            dtype="float8_e4m3",
            data_parallel_size=8,
        )
    )
    assert info.block_size == 64
    assert info.kv_capacity_tokens == 64_000
    assert info.max_num_batched_tokens is None
    assert info.engine_version == "tokenspeed-0.1.1"
    assert info.dtype == "float8_e4m3"
    assert info.data_parallel_size == 8


def test_ready_response_needs_only_max_model_len():
    info = decode_ready_response(ready())
    assert info.max_model_len == 4096
    assert info.kv_capacity_tokens is None
    assert info.block_size is None
    assert info.data_parallel_size == 1
    assert info.data_parallel_rank is None
    assert info.engine_version == ""


def test_ready_response_prefers_the_stated_capacity():
    info = decode_ready_response(ready(kv_cache_size_tokens=2**40, num_gpu_blocks=2, block_size=16))
    assert info.kv_capacity_tokens == 2**40


@pytest.mark.parametrize("odd", ["256", -1, 2.5, True, [256], {"groups": 2}])
def test_odd_optional_fields_are_left_out_and_do_not_refuse_the_rank(odd):
    info = decode_ready_response(
        ready(num_gpu_blocks=odd, block_size=odd, kv_cache_size_tokens=odd, max_num_seqs=odd, data_parallel_size=odd)
    )
    assert info.num_gpu_blocks is info.block_size is info.kv_capacity_tokens is info.max_num_seqs is None
    assert info.data_parallel_size == 1


@pytest.mark.parametrize("bad", [None, 0, -1, "4096", 4096.0, True])
def test_max_model_len_is_required(bad):
    with pytest.raises(WireError, match="max_model_len is missing"):
        decode_ready_response(pack({"max_model_len": bad}))
    with pytest.raises(WireError, match="max_model_len is missing"):
        decode_ready_response(pack({"num_gpu_blocks": 3}))


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [pack({"status": "GOODBYE"})],
        [pack({"local": True})],
        [pack({"status": "HELLO", "local": "yes"})],
        [pack(["HELLO"])],
        [pack({"status": "HELLO"}) + b"\x00"],
        [b"\x81" * 5000],
        [b"\xd4\x01\x80"],
    ],
)
def test_unusable_hello(frames):
    with pytest.raises(WireError, match="handshake message"):
        decode_hello(frames)


def test_errors_are_short_whatever_the_peer_sent():
    with pytest.raises(WireError) as caught:
        decode_hello([pack({"status": "x" * 100_000})])
    assert len(str(caught.value)) < 300


def test_oversized_payloads_are_not_read():
    huge = pack({"max_model_len": 1, "pad": "x" * MAX_HANDSHAKE_BYTES})
    with pytest.raises(WireError, match="at most"):
        decode_ready_response(huge)
    with pytest.raises(WireError, match="at most"):
        decode_hello([huge])


@any_speed
@given(st.binary(max_size=200))
def test_garbage_raises_only_wire_errors(data):
    for decode in (decode_ready_response, lambda frame: decode_hello([frame])):
        try:
            decode(data)
        except WireError:
            continue


@pytest.mark.parametrize("message", [VLLM_HELLOS[0], READY_RESPONSES[0]], ids=name)
def test_truncated_anywhere(message):
    payload = message.raw[1]
    decode = decode_ready_response if message.socket == "input" else lambda frame: decode_hello([frame])
    for end in range(len(payload)):
        with pytest.raises(WireError):
            decode(payload[:end])


def test_identities_are_two_bytes_little_endian():
    assert identity_of(1) == b"\x01\x00"
    assert identity_of(0x0203) == b"\x03\x02"
    assert all(index_of(identity_of(index)) == index for index in range(2**16))
    assert index_of(memoryview(b"\x05\x00")) == 5


@pytest.mark.parametrize("identity", [b"", b"\x01", b"\x01\x00\x00", b"\x00\x6b\x8b\x45\x67"])
def test_malformed_identities(identity):
    assert index_of(identity) is None


@pytest.mark.parametrize("index", [-1, 2**16])
def test_index_out_of_range(index):
    with pytest.raises(ValueError, match="engine index"):
        identity_of(index)
