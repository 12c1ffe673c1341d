"""The coordinator's side of a data-parallel group: its ranks report load and waves, and are told to start one.

Facts (vLLM 0.24 to 0.32, `vllm/v1/engine/core.py`). A rank subscribes to the coordinator's XPUB with one byte and does
not go on with its start-up until it gets the raw frame `READY`; a later one is ignored by recent releases only. It
pushes `EngineCoreOutputs` without rows: statistics whenever its counts of requests have changed, before and after a
step, also with the logging of statistics off; and, in lockstep groups, `wave_complete` and `start_wave`.
`START_DP_WAVE` is published as `[02, [wave, engine index to leave out or nil]]`; a rank obeys when `wave` is at least
its own current one.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.types import EngineBatch, EngineControl, EngineMessage, EngineNoise
from gateway.wire.common import MALFORMED, Fault, Noise, Opaque, as_count
from gateway.wire.protocol import Frame
from gateway.wire.vllm.layout import Stats, read_load, read_time

SUBSCRIBE: Final = b"\x01"
READY: Final = b"READY"
START_DP_WAVE: Final = b"\x02"


class _Report(msgspec.Struct, array_like=True, gc=False):
    """`EngineCoreOutputs` as it comes to a coordinator; rows or utility replies in it are nobody's."""

    engine_index: Opaque = None
    outputs: Opaque = None
    scheduler_stats: Stats = None
    timestamp: Opaque = None
    utility_output: Opaque = None
    finished_requests: Opaque = None
    wave_complete: Opaque = None
    start_wave: Opaque = None


_DECODER: Final = msgspec.msgpack.Decoder(_Report)
_ENCODER: Final = msgspec.msgpack.Encoder()


class VllmCoordinator:
    """See `CoordinatorProtocol`. Immutable; safe to share."""

    ready = READY

    def is_subscription(self, payload: Frame) -> bool:
        """Whether a rank asks for what is published."""
        return payload == SUBSCRIBE

    def encode_start_wave(self, wave: int) -> list[bytes]:
        """Frames of START_DP_WAVE for every rank. None is left out: one that has gone back to sleep must wake too."""
        return [START_DP_WAVE, _ENCODER.encode([wave, None])]

    def decode_report(self, frames: Sequence[Frame]) -> EngineMessage:
        """Decode one push: a batch without rows, or wave control. Never raises."""
        if not frames or not len(frames[0]):
            return EngineNoise(Noise.EMPTY)
        try:
            report = _DECODER.decode(frames[0])
        except MALFORMED:
            return EngineNoise(Noise.NOT_AN_ARRAY)
        engine_index = as_count(report.engine_index)
        wave_complete, start_wave = as_count(report.wave_complete), as_count(report.start_wave)
        if wave_complete is not None or start_wave is not None:
            return EngineControl(engine_index=engine_index, wave_complete=wave_complete, start_wave=start_wave)
        load, fault = read_load(report.scheduler_stats, read_time(report.timestamp), source="coordinator")
        if load is None and fault is None:
            fault = Fault.BAD_LOAD
        return EngineBatch(ids=(), token_ids=(), finish=(), engine_index=engine_index, load=load, load_fault=fault)
