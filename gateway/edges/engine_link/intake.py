"""Turns what a rank sends into events: decode once, count, cross-check, pass on."""

import zmq

from gateway.core.events import BatchReceived, RankHeard
from gateway.edges.engine_link.env import LinkEnv
from gateway.types import EngineBatch, EngineDead, EngineNoise
from gateway.wire.protocol import EngineProtocol


class Intake:
    """Receiving side of one rank. The socket says which rank it is; a claimed index is only compared."""

    def __init__(self, env: LinkEnv, protocol: EngineProtocol, rank: int, engine_index: int) -> None:
        self._env = env
        self._protocol = protocol
        self._rank = rank
        self._engine_index = engine_index
        # The incarnation was given up for its silence, and nothing was heard since.
        self.is_silent = False

    def take(self, frames: list[zmq.Frame], incarnation: int | None) -> bool:
        """Handle one message; True when the rank announced its end.

        `incarnation` None: nobody has joined. No attempt of this gateway can be in such a message, it is dropped.
        """
        counters = self._env.counters
        counters.frames += 1
        first = frames[0].bytes
        message = self._protocol.decode_output([first] if len(frames) == 1 else [frame.bytes for frame in frames])
        # `isinstance` costs 0.3 us with a Struct, whose metaclass is an ABCMeta.
        if type(message) is EngineDead:
            return True
        if incarnation is None:
            counters.early_frames += 1
        elif type(message) is EngineNoise:
            # No sign of life: an engine of another family sends nothing else.
            counters.noise.add(message.reason)
            self._env.limited_log.warning("output_noise", rank=self._rank, reason=message.reason)
        else:
            self.is_silent = False
            if type(message) is EngineBatch:
                self._check(message)
                self._env.events.emit(BatchReceived(self._rank, incarnation, message))
            else:
                counters.controls += 1
                self._env.events.emit(RankHeard(self._rank, incarnation))
        return False

    def _check(self, batch: EngineBatch) -> None:
        index, fault, load_fault = batch.engine_index, batch.fault, batch.load_fault
        if index == self._engine_index and fault is None and load_fault is None:
            return
        counters = self._env.counters
        if index is not None and index != self._engine_index:
            counters.index_mismatch += 1
            self._env.limited_log.warning("engine_index_mismatch", rank=self._rank, claimed=index)
        if fault is not None:
            counters.faults.add(fault)
            self._env.limited_log.warning("batch_fault", rank=self._rank, fault=fault, lossy=batch.lossy)
        if load_fault is not None:
            counters.load_faults.add(load_fault)
