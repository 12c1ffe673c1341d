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
        message = self._protocol.decode_output([frame.buffer for frame in frames])
        if isinstance(message, EngineDead):
            return True
        if incarnation is None:
            counters.early_frames += 1
            return False
        if isinstance(message, EngineBatch):
            self._pass_on(message, incarnation)
            return False
        if isinstance(message, EngineNoise):
            # No sign of life: an engine of another family sends nothing else.
            counters.noise.add(message.reason)
            self._env.limited_log.warning("output_noise", rank=self._rank, reason=message.reason)
        else:
            counters.controls += 1
            self.is_silent = False
            self._env.events.emit(RankHeard(self._rank, incarnation))
        return False

    def _pass_on(self, batch: EngineBatch, incarnation: int) -> None:
        self.is_silent = False
        counters = self._env.counters
        if batch.engine_index is not None and batch.engine_index != self._engine_index:
            counters.index_mismatch += 1
            self._env.limited_log.warning("engine_index_mismatch", rank=self._rank, claimed=batch.engine_index)
        if batch.fault is not None:
            counters.faults.add(batch.fault)
            self._env.limited_log.warning("batch_fault", rank=self._rank, fault=batch.fault, lossy=batch.lossy)
        if batch.load_fault is not None:
            counters.load_faults.add(batch.load_fault)
        self._env.events.emit(BatchReceived(self._rank, incarnation, batch))
