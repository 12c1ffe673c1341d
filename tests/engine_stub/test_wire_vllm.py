"""Byte vectors: recorded from real vLLM 0.32.0 engine cores and made with its own classes."""

import struct

import msgspec
import pytest

from engine_stub.config import Model, StubConfig
from engine_stub.faults import WireForm
from engine_stub.scheduler import Request, Rows, Sequence
from engine_stub.tokens import expected_logprob, expected_top_logprobs
from engine_stub.wire.codec import Abort, Add, Consequence, Load, Malformed, RankCard, Utility, Wave
from engine_stub.wire.vllm import EngineCoreOutput, EngineCoreOutputs, VllmCodec

HELLO = "83a6737461747573a548454c4c4fa56c6f63616cc2a8686561646c657373c3"
ADD_22 = (
    "dc0016a57265712d3193010203c0de0006ab74656d7065726174757265cb3fe0000000000000a473746f7090ae73746f705f746f6b656e"
    "5f69647390aa6d61785f746f6b656e7308a96261645f776f72647390b9736b69705f72656164696e675f7072656669785f636163"
    "6865c2c0cb3ff8000000000000c0c001c0c0000000c0c2c0c0c0c2c0c0"
)
ADD_21_SMG = (
    "dc0015a2723093010203c08cab74656d7065726174757265ca3f333333a5746f705f70ca3f800000a5746f705f6b00aa6d61785f746f6b"
    "656e7304aa6d696e5f746f6b656e7300a56d696e5f70ca00000000b16672657175656e63795f70656e616c7479ca00000000b07072"
    "6573656e63655f70656e616c7479ca00000000b272657065746974696f6e5f70656e616c7479ca3f800000ae73746f705f746f6b65"
    "6e5f69647390ad5f656f735f746f6b656e5f696402b35f616c6c5f73746f705f746f6b656e5f6964739102c0cb41dac304d8dc0a56"
    "c0c0c0c0c0000000c0c2c0c0c0c2c0"
)
ADD_14_EOS = (
    "9ea97265712d656f732d319405060708c085ab74656d7065726174757265cb0000000000000000aa6d61785f746f6b656e7314ad5f656f"
    "735f746f6b656e5f696465b35f616c6c5f73746f705f746f6b656e5f6964739165ab6f75747075745f6b696e6401c0cb41dac3055a"
    "887acbc0c0c0c0c0000000"
)
FINISH_ROW = "990191dc0012a57265712d31910cc0c0c001c0c0c0c0c0c0c000c0c0c0c0c0cb4004000000000000c091a57265712d31c0c0c0"
UTILITY_OK = "990090c0cb40040000000000009301c092c0c3c0c0c0c0"
STATS_KEYS = [
    "num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs", "num_kv_fetch_reqs_by_stage", "step_counter",
    "current_wave", "kv_cache_usage", "iteration_details", "prefix_cache_stats", "connector_prefix_cache_stats",
    "kv_cache_eviction_events", "spec_decoding_stats", "kv_connector_stats", "ec_connector_stats",
    "waiting_lora_adapters", "running_lora_adapters", "cudagraph_stats", "perf_stats",
]  # fmt: skip


@pytest.fixture
def codec():
    return VllmCodec(StubConfig(model=Model(vocab_size=1000, max_model_len=64)))


def add_frames(rid="r", prompt=(1, 2, 3), sampling=None, *rest):
    sampling = {"max_tokens": 8} if sampling is None else sampling
    payload = [rid, prompt, None, sampling, None, 1.5, None, None, None, *rest]
    return [b"\x00", msgspec.msgpack.encode(payload)]


def sequence(rid="r", output=(5,), **fields):
    made = Sequence(Request(id=rid, prompt_ids=[1, 2, 3, 4], max_tokens=9, **fields), 0)
    made.output, made.generated = list(output), len(output)
    return made


def encoded(codec, rows, load=None, form=None):
    frames = codec.encode(rows, load, 1, form or WireForm(), 2.5)
    return msgspec.msgpack.decode(frames[0]), frames[1:]


def test_hello_is_byte_identical(codec):
    assert codec.status("HELLO").hex() == HELLO


@pytest.mark.parametrize(
    ("vector", "request_id", "prompt", "max_tokens", "eos"),
    [
        (ADD_22, "req-1", [1, 2, 3], 8, set()),
        (ADD_21_SMG, "r0", [1, 2, 3], 4, {2}),
        (ADD_14_EOS, "req-eos-1", [5, 6, 7, 8], 20, {101}),
    ],
)
def test_recorded_adds_are_read(codec, vector, request_id, prompt, max_tokens, eos):
    message = codec.decode([b"\x00", bytes.fromhex(vector)])
    assert isinstance(message, Add)
    assert message.problem is None
    request = message.request
    assert (request.id, list(request.prompt_ids), request.max_tokens) == (request_id, prompt, max_tokens)
    assert (request.eos_ids, request.stop_ids, request.row_interval) == (eos, set(), 1)


def test_nine_elements_are_enough_and_more_than_22_are_cut(codec):
    assert codec.decode(add_frames()).problem is None
    longer = [*msgspec.msgpack.decode(bytes.fromhex(ADD_22)), "later", 1]
    assert codec.decode([b"\x00", msgspec.msgpack.encode(longer)]).request.id == "req-1"


def test_other_messages_are_read(codec):
    assert codec.decode([b"\x01", bytes.fromhex("91a57265712d31")]) == Abort(["req-1"])
    assert codec.decode([b"\x02", bytes.fromhex("9201c0")]) == Wave(1, None)
    utility = codec.decode([b"\x03", bytes.fromhex("940001b272657365745f7072656669785f636163686592c2c2")])
    assert utility == Utility(1, "reset_prefix_cache", [False, False])
    assert codec.utility_reply(utility, 0, 2.5)[0].hex() == UTILITY_OK


def test_an_unknown_utility_fails_and_the_rank_lives(codec):
    reply = msgspec.msgpack.decode(codec.utility_reply(Utility(9, "nosuch", []), 0, 2.5)[0])
    assert reply[4][0] == 9
    assert "nosuch" in reply[4][1]
    assert reply[4][2] is None


def test_the_declaration_writes_the_recorded_finish_row():
    row = EngineCoreOutput("req-1", [12], finish_reason=1)
    batch = EngineCoreOutputs(1, [row], None, 2.5, finished_requests=["req-1"], weight_version=None)
    assert msgspec.msgpack.encode(batch).hex() == FINISH_ROW


def test_a_running_row_is_bare_and_the_first_one_tells_of_the_prefill(codec):
    rows = Rows([sequence(output=(5, 6)), sequence(output=(5,))], [[6], [5]], ["", ""])
    batch, aux = encoded(codec, rows)
    assert batch[0] == 1
    assert batch[3:] == [2.5, None, None, None, None, "default"]
    assert batch[1][0] == ["r", [6], None, None, None, None, None, None, None, None, None, None, None, 0] + [None] * 4
    first = batch[1][1]
    assert len(first) == 18
    assert [event["type"] for event in first[7]] == [1, 2]
    assert (first[11]["num_prompt_tokens"], first[11]["num_cached_tokens"]) == (4, 0)
    assert not aux


@pytest.mark.parametrize(("finish", "reason"), [("", None), ("stop", 0), ("length", 1), ("abort", 2), ("error", 3)])
def test_finish_reasons(codec, finish, reason):
    batch, _ = encoded(codec, Rows([sequence()], [[5]], [finish]))
    assert batch[1][0][5] == reason


def test_stop_reason_is_the_stop_id_but_nil_for_eos(codec):
    by_id, by_eos = sequence(stop_ids=frozenset({5})), sequence(eos_ids=frozenset({5}), stop_ids=frozenset({5}))
    by_id.stop_token = by_eos.stop_token = 5
    batch, _ = encoded(codec, Rows([by_id, by_eos], [[5], [5]], ["stop", "stop"]))
    assert [row[5:7] for row in batch[1]] == [[0, 5], [0, None]]


def test_older_forms_are_shorter(codec):
    batch, _ = encoded(codec, Rows([sequence()], [[5]], ["length"]), form=WireForm(vllm_batch=8, vllm_row=14))
    assert len(batch) == 8
    assert len(batch[1][0]) == 14
    assert batch[1][0][5] == 1


def test_stats_have_the_real_keys(codec):
    batch, _ = encoded(codec, Rows([sequence(output=(5,))], [[5]], [""]), Load(2, 5, 100, 400))
    stats = batch[2]
    assert list(stats) == STATS_KEYS
    assert (stats["num_running_reqs"], stats["num_waiting_reqs"], stats["kv_cache_usage"]) == (2, 5, 0.25)
    assert (stats["prefix_cache_stats"]["requests"], stats["prefix_cache_stats"]["queries"]) == (1, 4)
    assert encoded(codec, Rows())[0][2] is None


def test_logprobs_are_inline_tensors_with_the_chosen_token_first(codec):
    made = sequence(output=(5, 59), logprobs=2)
    made.logprobs = [expected_top_logprobs(token, 2, 1000) for token in (5, 59)]
    batch, aux = encoded(codec, Rows([made], [[59]], [""]))
    ids, values, ranks, none = batch[1][0][2]
    assert not aux
    assert none is None
    assert ids == ["<i4", [1, 3], msgspec.msgpack.Ext(3, struct.pack("<3i", 59, 59, 60))]
    chosen = expected_logprob(59)
    assert values == ["<f4", [1, 3], msgspec.msgpack.Ext(3, struct.pack("<3f", chosen, chosen, chosen - 0.25))]
    assert ranks == ["<i8", [1], msgspec.msgpack.Ext(3, struct.pack("<q", 1))]


def test_large_tensors_go_into_aux_frames_by_index(codec):
    made = sequence(output=(5, 6), logprobs=100)
    made.logprobs = [expected_top_logprobs(token, 100, 1000) for token in (5, 6)]
    batch, aux = encoded(codec, Rows([made], [[6]], [""]))
    ids, values, ranks, _ = batch[1][0][2]
    assert (ids[2], values[2], type(ranks[2])) == (1, 2, msgspec.msgpack.Ext)
    assert [len(frame) for frame in aux] == [404, 404]
    assert struct.unpack("<101i", aux[0])[:3] == (6, 6, 7)


def test_the_registration_has_every_key(codec):
    card = RankCard(
        max_model_len=64, total_blocks=10, block_size=16, capacity_tokens=160, dtype="bfloat16",
        group_size=4, index=3, max_active=7, token_budget=1024, instance_id="i",
    )  # fmt: skip
    assert msgspec.msgpack.decode(codec.registration(card)) == {
        "max_model_len": 64, "num_gpu_blocks": 10, "block_size": 16, "dp_stats_address": None, "dtype": "bfloat16",
        "vllm_version": "0.32.0", "world_size": 1, "data_parallel_size": 1, "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "data_parallel_rank": 3, "max_num_seqs": 7,
        "max_num_batched_tokens": 1024, "instance_id": "i", "supports_lora": False, "max_loras": 0,
        "mamba_block_size": None, "kv_cache_size_tokens": 160, "kv_cache_max_concurrency": 2.5,
        "kv_events_config": None, "weight_transfer_backend": None, "enable_sleep_mode": False,
        "supports_draft_weight_updates": False, "effective_attention_block_size": 16,
    }  # fmt: skip


@pytest.mark.parametrize(
    "frames",
    [
        [b"\x00"],
        [b"\x09", b"\x90"],
        [b"\x00", b"\xc1"],
        [b"\x00", msgspec.msgpack.encode(["x", "notalist", None, {}, None, 1.0, None, None, None])],
        [b"\x00", msgspec.msgpack.encode(["x", [1], None, {}])],
        [b"\x01", b"\xc1"],
        [b"\x02", b"\x91\x01"],
        [b"\x03", msgspec.msgpack.encode([0, 1])],
    ],
)
def test_what_cannot_be_read_deafens_a_real_rank(codec, frames):
    message = codec.decode(frames)
    assert isinstance(message, Malformed)
    assert message.problem.consequence is Consequence.DEAF


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -0.5},
        {"temperature": 2.01},
        {"temperature": float("nan")},
        {"top_p": 1.1},
        {"top_p": 0.0},
        {"top_k": -2},
        {"min_p": 1.5},
        {"max_tokens": 0},
        {"min_tokens": 20, "max_tokens": 10},
        {"n": 0},
        {"n": 2, "temperature": 0.0},
        {"logprobs": -2},
        {"frequency_penalty": 2.5},
        {"presence_penalty": -2.5},
        {"repetition_penalty": 0.0},
        {"stop": ["x"], "detokenize": False},
    ],
)
def test_sampling_values_out_of_range_deafen_a_real_rank(codec, params):
    message = codec.decode(add_frames(sampling=params))
    assert message.problem.consequence is Consequence.DEAF
    assert message.request.id == "r"


def test_a_request_says_which_front_end_it_is_of(codec):
    message = codec.decode(add_frames("r", [1], {"max_tokens": 4}, None, None, 1))
    assert message.problem is None
    assert message.request.client == 1


@pytest.mark.parametrize(
    ("frames", "consequence"),
    [
        (add_frames(prompt=[1000]), Consequence.DEAD),
        (add_frames(prompt=[]), Consequence.DEAD),
        (add_frames(prompt=None), Consequence.DEAD),
        (add_frames(prompt=[1] * 65), Consequence.DEAD),
        (add_frames(sampling={"allowed_token_ids": [1000]}), Consequence.DEAD),
        (add_frames(sampling={"max_tokens": None}), Consequence.REFUSED),
        (add_frames(sampling={"structured_outputs": {"regex": "a"}}), Consequence.REFUSED),
        ([b"\x00", msgspec.msgpack.encode(["r", [1], None, None, None, 1.5, None, None, None])], Consequence.REFUSED),
        ([b"\x00", msgspec.msgpack.encode(["r", [1], None, None, {}, 1.5, None, None, None])], Consequence.REFUSED),
    ],
)
def test_what_else_costs_a_rank_or_a_request(codec, frames, consequence):
    assert codec.decode(frames).problem.consequence is consequence


def test_good_requests_have_no_problem(codec):
    for params in ({}, {"temperature": 0.0, "top_k": -1}, {"n": 2}, {"stop": ["x"]}, {"unheard_of": 1}):
        assert codec.decode(add_frames(sampling=params)).problem is None
    assert codec.decode(add_frames(prompt=[1] * 64)).request.max_tokens == 1
    assert codec.decode(add_frames(sampling={"max_tokens": 500})).request.max_tokens == 61
    assert codec.decode(add_frames(sampling={})).request.max_tokens == 16, "vLLM's default"
    ignoring = codec.decode(add_frames(sampling={"_eos_token_id": 3, "ignore_eos": True}))
    assert ignoring.request.eos_ids == set()
    only_all = codec.decode(add_frames(sampling={"_all_stop_token_ids": [3]}))
    assert only_all.request.eos_ids == only_all.request.stop_ids == set()
