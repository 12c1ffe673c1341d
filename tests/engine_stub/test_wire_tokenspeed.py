"""Byte vectors: what real TokenSpeed 0.1.1 senders and receivers exchange (rid vec-1, ids [10, 11], ...)."""

import msgspec
import pytest

from engine_stub.config import Model, StubConfig
from engine_stub.faults import WireForm
from engine_stub.scheduler import Request, Rows, Sequence
from engine_stub.wire.codec import Abort, Add, Consequence, Load, Malformed, RankCard
from engine_stub.wire.tokenspeed import BatchTokenIDOutSlim, SamplingParams, TokenizedGenerateReqInput, TokenSpeedCodec

HELLO = "84a6737461747573a548454c4c4fa56c6f63616cc3a8686561646c657373c3b4706172616c6c656c5f636f6e6669675f68617368c0"
ADD_11 = (
    "9bb9546f6b656e697a656447656e6572617465526571496e707574a57665632d31c0c093010203dc001d08c09102cb3fe0000000000000"
    "cb3feccccccccccccdce40000000cb0000000000000000cb0000000000000000cb0000000000000000cb3ff000000000000000c0c0c0c0"
    "c2c3c3c2c0c0c0c02ac0019000c3c3ff00c0c3"
)
BATCH_9 = (
    "99b34261746368546f6b656e49444f7574536c696d91a57665632d3191920a0b91a66c656e6774689103910291019192cbbfe000000000"
    "0000cbbfd000000000000091920a0b"
)
BATCH_10 = "9a" + BATCH_9[2:] + "01"
BATCH_14 = "9e" + BATCH_9[2:] + "01020564cd0190"
NO_LOAD_TAIL = "0100000000"


@pytest.fixture
def codec():
    return TokenSpeedCodec(StubConfig(model=Model(vocab_size=1000, max_model_len=64, eos_token_ids=(9,))))


def add_frames(rid="r", prompt=(1, 2, 3), sampling=(8,), *rest):
    payload = ["TokenizedGenerateReqInput", rid, None, None, list(prompt), list(sampling), *rest]
    return [b"\x00", msgspec.msgpack.encode(payload)]


def sampling(**fields):
    return msgspec.structs.astuple(SamplingParams(max_new_tokens=8, **fields))


def vector_rows():
    request = Request(id="vec-1", prompt_ids=[1, 2, 3], max_tokens=2, logprobs=0)
    sequence = Sequence(request, 0)
    sequence.output, sequence.generated = [10, 11], 2
    sequence.logprobs = [[(10, -0.5)], [(11, -0.25)]]
    return Rows([sequence], [[10, 11]], ["length"])


def test_hello_is_byte_identical(codec):
    assert codec.status("HELLO").hex() == HELLO


def test_the_recorded_add_is_read(codec):
    message = codec.decode([b"\x00", bytes.fromhex(ADD_11)])
    assert isinstance(message, Add)
    assert message.problem is None
    request = message.request
    assert (request.id, list(request.prompt_ids), request.max_tokens) == ("vec-1", [1, 2, 3], 8)
    assert (request.stop_ids, request.eos_ids, request.seed) == ({2}, {9}, 42)
    assert (request.logprobs, request.row_interval) == (0, 1)


def test_longer_and_shorter_adds_are_read(codec):
    whole = msgspec.msgpack.decode(bytes.fromhex(ADD_11))
    full = msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.convert(whole, TokenizedGenerateReqInput)))
    assert len(full) == 25
    longer = [*full, "a field of a later version"]
    for payload in (full, longer, whole[:6]):
        message = codec.decode([b"\x00", msgspec.msgpack.encode(payload), b"aux"])
        assert isinstance(message, Add)
        assert message.request.id == "vec-1"
    assert message.request.row_interval == 50, "without `stream` rows are rare"


def test_the_recorded_abort_is_read(codec):
    assert codec.decode([b"\x01", bytes.fromhex("91a57265712d31")]) == Abort(["req-1"])


@pytest.mark.parametrize(("size", "vector"), [(9, BATCH_9), (10, BATCH_10), (14, BATCH_14)])
def test_batches_are_byte_identical_but_for_the_cache_hits(codec, size, vector):
    without_hits = vector.replace("910391029101", "910391029100")
    assert without_hits != vector
    frames = codec.encode(vector_rows(), Load(2, 5, 100, 400), 1, WireForm(tokenspeed_batch=size), 0.0)
    assert [frame.hex() for frame in frames] == [without_hits]


def test_the_declaration_reads_all_three_forms():
    for vector, tail in ((BATCH_9, (0, 0, 0, 0, 0)), (BATCH_10, (1, 0, 0, 0, 0)), (BATCH_14, (1, 2, 5, 100, 400))):
        batch = msgspec.msgpack.decode(bytes.fromhex(vector), type=BatchTokenIDOutSlim)
        assert msgspec.structs.astuple(batch) == (
            ["vec-1"], [[10, 11]], ["length"], [3], [2], [1], [[-0.5, -0.25]], [[10, 11]], *tail,
        )  # fmt: skip
    assert msgspec.msgpack.encode(batch).hex() == BATCH_14


def test_no_report_is_an_all_zero_tail(codec):
    frame = codec.encode(vector_rows(), None, 1, WireForm(), 0.0)[0].hex()
    assert frame.endswith("920a0b" + NO_LOAD_TAIL)


def test_rows_without_logprobs_have_empty_columns(codec):
    rows = vector_rows()
    plain = Sequence(Request(id="p", prompt_ids=[1], max_tokens=4), 0)
    plain.output, plain.generated = [5], 1
    rows.add(plain, [5], "")
    batch = msgspec.msgpack.decode(codec.encode(rows, None, 0, WireForm(), 0.0)[0])
    assert batch[7:9] == [[[-0.5, -0.25], []], [[10, 11], []]]
    assert batch[2:6] == [[[10, 11], [5]], ["length", ""], [3, 1], [2, 1]]


def test_the_registration_has_every_key(codec):
    card = RankCard(
        max_model_len=64, total_blocks=10, block_size=16, capacity_tokens=160, dtype="bfloat16",
        group_size=4, index=3, max_active=7, token_budget=None, instance_id="i",
    )  # fmt: skip
    ready = msgspec.msgpack.decode(codec.registration(card))
    assert ready == {
        "max_model_len": 64, "num_gpu_blocks": 10, "prefix_granularity": 16, "dp_stats_address": None,
        "dtype": "bfloat16", "multimodal_encoder_dtype": None, "vllm_version": "tokenspeed-0.1.1", "world_size": 4,
        "data_parallel_size": 4, "tensor_parallel_size": 1, "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1, "data_parallel_rank": 3, "max_num_seqs": 7, "max_num_batched_tokens": 0,
        "instance_id": "i", "kv_cache_size_tokens": 160, "kv_cache_max_concurrency": None, "kv_events_config": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    "frames",
    [
        [b"\x00"],
        [],
        [b"\x07", b"\x90"],
        [b"\x00", b"\xc1"],
        [b"\x00", b""],
        [b"\x01", b"\xa1x"],
        [b"\x00", msgspec.msgpack.encode(["SomethingElse", "r"])],
        [b"\x00", msgspec.msgpack.encode(["TokenizedGenerateReqInput", ["r", "s"], None, None, [1], [8]])],
        [b"\x00", msgspec.msgpack.encode(["TokenizedGenerateReqInput", "r", None, None, ["1"], [8]])],
        [b"\x00", b"\x96\xb9TokenizedGenerateReqInput\xa1\xff\xc0\xc0\x91\x01\x91\x08"],
    ],
)
def test_what_cannot_be_read_is_dropped(codec, frames):
    message = codec.decode(frames)
    assert isinstance(message, Malformed)
    assert message.problem.consequence is Consequence.DROPPED


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        (add_frames(prompt=()), "empty"),
        (add_frames(prompt=[1] * 64), "no room"),
        (add_frames(prompt=[1000]), "vocabulary"),
        (add_frames(prompt=[-1]), "vocabulary"),
        (add_frames("r", (1,), (8,), True, -1, 1), "logprobs"),
        (add_frames("r", (1,), (8,), True, 0), "logprobs"),
        (add_frames("r", (1,), (8,), True, -1, 0, [4]), "logprobs"),
        (add_frames(sampling=sampling(n=2)), "n=2"),
        (add_frames(sampling=[0]), "max_new_tokens"),
        (add_frames(sampling=sampling(top_p=1.5)), "top_p"),
        (add_frames(sampling=sampling(top_p=0.0)), "top_p"),
        (add_frames(sampling=sampling(top_p=float("nan"))), "top_p"),
        (add_frames(sampling=sampling(top_k=0)), "top_k"),
        (add_frames(sampling=sampling(min_p=-0.1)), "min_p"),
        (add_frames(sampling=sampling(frequency_penalty=3.0)), "frequency_penalty"),
        (add_frames(sampling=sampling(presence_penalty=-3.0)), "presence_penalty"),
        (add_frames(sampling=sampling(repetition_penalty=0.0)), "repetition_penalty"),
        (add_frames(sampling=sampling(min_new_tokens=9)), "min_new_tokens"),
        (add_frames(sampling=sampling(stop_token_ids={1000})), "stop id"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(codec, frames, reason):
    message = codec.decode(frames)
    assert isinstance(message, Add)
    assert message.problem is not None
    assert message.problem.consequence is Consequence.REFUSED
    assert reason in message.problem.reason


@pytest.mark.parametrize(
    "params",
    [
        sampling(temperature=-1.0),
        sampling(temperature=float("nan")),
        sampling(stop=["x"]),
        sampling(temperature=0.0, top_k=1, is_normalized=True),
        sampling(temperature=1.0, top_k=-1, is_normalized=True),
    ],
)
def test_what_is_quietly_served_as_something_else_is_noted(codec, params):
    message = codec.decode(add_frames(sampling=params))
    assert message.problem.consequence is Consequence.SERVED


def test_good_requests_have_no_problem(codec):
    for params in (sampling(temperature=0.0), sampling(temperature=1.0, top_k=1 << 30, is_normalized=True), (None,)):
        assert codec.decode(add_frames(sampling=params)).problem is None
    assert codec.decode(add_frames(sampling=(None,))).request.max_tokens == 61, "up to the context's end"
    assert codec.decode(add_frames(sampling=(500,))).request.max_tokens == 61
    assert codec.decode(add_frames(sampling=sampling(ignore_eos=True))).request.eos_ids == set()
    assert (
        codec.decode(add_frames("r", (1,), sampling(stream_interval=4), False, -1, 0, None, True)).request.row_interval
        == 4
    )


def test_an_engine_without_logprobs_refuses_them():
    codec = TokenSpeedCodec(StubConfig(output_logprobs=False))
    assert "without them" in codec.decode(add_frames("r", (1,), (8,), True)).problem.reason
