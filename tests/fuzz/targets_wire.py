"""The engine wires: outputs of both families, the salvage below them, and handshakes."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import msgspec

from gateway.native import compiled
from gateway.types import EngineBatch
from gateway.wire import handshake
from gateway.wire.registry import protocol_for
from gateway.wire.scan import MAX_ITEMS, split_array
from gateway.wire.tokenspeed.salvage import salvage as salvage_tokenspeed
from gateway.wire.vllm.coordinator import VllmCoordinator
from gateway.wire.vllm.outputs import decode_compiled, decode_outputs
from gateway.wire.vllm.salvage import Salvaged
from gateway.wire.vllm.salvage import salvage as salvage_vllm
from tests.fuzz.mutator import Frame
from tests.fuzz.target import Check, Target, accepts
from tests.support.wire import STATS, check, outputs, pack, recorded, row, slim, tokenspeed_vectors, vllm_made

_MAX_CORPUS_FRAME_BYTES = 4096
_LOOKED_AT = 64
_ANY_ITEM = msgspec.msgpack.Decoder(msgspec.Raw)


@cache
def tokenspeed_corpus() -> Sequence[Frame]:
    """The golden vectors, and batches of more rows, with logprobs and with every finish."""
    made = [
        slim(ids=["aa", "bb", "cc"], logprob_values=[[], [-1.0], []], logprob_ids=[[], [11], []]),
        slim(ids=[f"{at:016x}-{at}-0-1" for at in range(12)], finished_reasons=["", "stop", "length"] * 4),
        slim(ids=["a", "b"], output_ids=[list(range(40)), [2**32 - 1]], completion_tokens=[40, 1]),
        slim(ids=[]),
    ]
    return [[vector] for vector in (*tokenspeed_vectors().values(), *map(pack, made))]


def _tensor_frames() -> list[Frame]:
    """Logprobs in aux frames and inline, of one and of several tokens, and some that contradict themselves."""
    inline = [msgspec.msgpack.Ext(3, data) for data in (b"\x01\0\0\0\x02\0\0\0", b"\0\0\x80\xbf" * 2)]
    eight = [b"\x01\0\0\0" * 8, b"\0\0\x80\xbf" * 8]
    return [
        [pack(outputs([row("aa", f2=[["<i4", [1, 2], inline[0]], ["<f4", [1, 2], inline[1]]])]))],
        [pack(outputs([row("aa", (1, 2), f2=[["<i4", [2, 4], 1], ["<f4", [2, 4], 2]]), row("bb")])), *eight],
        [pack(outputs([row("aa", (1, 2), f2=[["<i4", [2, 4], 1], ["<f4", [2, 4], 9]])])), *eight],
        [pack(outputs([row("aa", f2=[["<i2", [1, 4], 1], ["<f8", [1, 4], 2]])])), *eight],
    ]


@cache
def report_corpus() -> Sequence[Frame]:
    """What ranks push to a coordinator."""
    made = [pack(outputs(stats=STATS)), pack(outputs(f6=3)), pack(outputs(f7=4)), pack(outputs())]
    found = [message.raw for message in recorded() if message.socket == "coord_out"]
    return [*found, *([frame] for frame in made)]


@cache
def vllm_corpus() -> Sequence[Frame]:
    """Recorded and made messages with their aux frames, the same in short, and control messages."""
    found = [message.raw for message in recorded() if message.socket == "output"]
    small = [frames for frames in found if sum(map(len, frames)) <= _MAX_CORPUS_FRAME_BYTES]
    tensors = [["<i4", [1, 2], 1], ["<f4", [1, 2], 2], ["<i4", [1], 3]]
    made = [
        [pack(outputs([row("aa"), row("bb", (1, 2), f5=1, f11={"num_cached_tokens": 3})], STATS))],
        [pack(outputs([row(f"{at:016x}-{at}-0-1", (at,), length=9) for at in range(12)], STATS))],
        [
            pack(outputs([row("aa", f2=tensors), row("bb")])),
            b"\x01\0\0\0\x02\0\0\0",
            b"\0\0\x80\xbf" * 2,
            b"\x01\0\0\0",
        ],
        *_tensor_frames(),
        [pack(outputs(f4=[7, None, "ok"]))],
        [pack(outputs(f6=3))],
    ]
    return [*small, *(frames for frames in vllm_made().values()), *made]


@cache
def handshake_corpus() -> Sequence[Frame]:
    """Recorded handshakes and registrations, and one of each kind."""
    names = ("max_model_len", "num_gpu_blocks", "block_size", "kv_cache_size_tokens", "max_num_seqs", "vllm_version")
    made = [
        pack({"status": "HELLO", "local": True, "headless": True}),
        pack({"status": "READY", "parallel_config_hash": "ab"}),
        pack(dict(zip(names, (4096, 100, 16, 1600, 256, "0.28"), strict=True)) | {"instance_id": "x", "dtype": "f"}),
    ]
    found = [message.raw[-1] for message in recorded() if message.socket == "handshake"]
    return [[frame] for frame in (*found, *made) if frame and len(frame) <= _MAX_CORPUS_FRAME_BYTES]


def _rows_of(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else ()


def _key(name: Any, tokens: Any) -> Any:
    return (name, tuple(tokens)) if isinstance(tokens, list) and not any(isinstance(t, list) for t in tokens) else None


def _content(family: str, message: Any) -> "Counter[Any] | None":
    """The rows that a whole msgpack message has: (id, tokens) and how often."""
    if not isinstance(message, list) or len(message) < 3:
        return Counter() if isinstance(message, list) and family == "tokenspeed" else None
    if family == "tokenspeed":
        pairs = zip(_rows_of(message[1]), _rows_of(message[2]), strict=False)
        return Counter(key for name, tokens in pairs if _hashable(key := _key(name, tokens)))
    cells = [cells for cells in _rows_of(message[1]) if isinstance(cells, list) and len(cells) > 1]
    return Counter(key for name, tokens, *_ in cells if _hashable(key := _key(name, tokens)))


def _hashable(key: Any) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return key is not None


def nothing_invented(family: str, frame: Frame, batch: EngineBatch) -> None:
    """Every id stands in the payload, and where that is whole msgpack, every row does, as often as it was delivered."""
    payload = frame[0]
    for name in (*batch.ids, *batch.failed_ids):
        assert name.encode() in payload, name
    assert sum(map(len, batch.token_ids)) <= len(payload)
    if not batch.ids:
        return
    try:
        content = _content(family, msgspec.msgpack.decode(payload))
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return  # cut off, or a map with keys that Python can't have
    if content is not None:
        delivered = Counter(zip(batch.ids, map(tuple, batch.token_ids), strict=True))
        assert delivered <= content, delivered - content


def _check_outputs(family: str) -> Check:
    protocol = protocol_for(family)

    def run(frame: Frame) -> None:
        message = protocol.decode_output(frame)
        check(message)
        if isinstance(message, EngineBatch):
            nothing_invented(family, frame, message)

    return run


def _check_compiled(payload: bytes) -> None:
    """What is decoded by the compiled way is what the typed decoder makes of it."""
    found = decode_compiled(payload)
    if found is not None:
        assert _cells(found) == _cells(decode_outputs(payload, [payload]))


def _cells(message: Any) -> list[Any]:
    values = [getattr(message, name) for name in EngineBatch.__struct_fields__]
    return [list(value) if isinstance(value, (list, tuple)) else value for value in values]


def _check_reports() -> Check:
    coordinator = VllmCoordinator()

    def run(frame: Frame) -> None:
        message = coordinator.decode_report(frame)
        check(message)
        assert not isinstance(message, EngineBatch) or not message.ids

    return run


def _check_tokenspeed_salvage() -> Check:
    protocol = protocol_for("tokenspeed")

    def run(frame: Frame) -> None:
        payload = frame[0] if frame else b""
        found = salvage_tokenspeed(payload)
        check(found)
        decoded = protocol.decode_output([payload])
        if isinstance(decoded, EngineBatch) and not (decoded.fault or decoded.lossy or decoded.failed_ids):
            assert isinstance(found, EngineBatch)
            same = (list(found.ids), list(found.token_ids), list(found.finish))
            assert same == (list(decoded.ids), list(decoded.token_ids), list(decoded.finish))

    return run


def _check_vllm_salvage() -> Check:
    def run(frame: Frame) -> None:
        payload = frame[0] if frame else b""
        found = salvage_vllm(payload)
        if isinstance(found, Salvaged):
            assert len(found.rows) + len(found.failed_ids) <= MAX_ITEMS
            assert all(name.encode() in payload for name in found.failed_ids)
            assert all(entry.request_id.encode() in payload for entry in found.rows)
        pieces = split_array(payload)
        if pieces is not None:
            whole = b"".join(pieces.items) + pieces.rest
            assert payload.endswith(whole)
            for item in pieces.items[:_LOOKED_AT]:
                accepts(RecursionError, _ANY_ITEM.decode, item)  # whole, and nothing behind it

    return run


def _check_handshake() -> Check:
    def run(frame: Frame) -> None:
        accepts(handshake.WireError, handshake.decode_hello, frame)
        for part in frame:
            info = accepts(handshake.WireError, handshake.decode_ready_response, part)
            assert info is None or info.max_model_len > 0
            index = handshake.index_of(part)
            assert index is None or handshake.identity_of(index) == part

    return run


_COMPILED = Target("vllm_compiled", 20, vllm_corpus, lambda: lambda frame: _check_compiled(b"".join(frame[:1])))
TARGETS = (
    Target("tokenspeed_outputs", 30, tokenspeed_corpus, lambda: _check_outputs("tokenspeed")),
    Target("vllm_outputs", 30, vllm_corpus, lambda: _check_outputs("vllm")),
    *([] if compiled is None else [_COMPILED]),
    Target("vllm_reports", 4, report_corpus, _check_reports),
    Target("tokenspeed_salvage", 8, tokenspeed_corpus, _check_tokenspeed_salvage),
    Target("vllm_salvage", 8, vllm_corpus, _check_vllm_salvage),
    Target("handshake", 12, handshake_corpus, _check_handshake),
)
