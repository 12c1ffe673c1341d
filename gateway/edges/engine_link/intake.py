"""Turns what a rank sends into events: decode once, count, cross-check, pass on."""

from collections.abc import Callable

import zmq

from gateway.core.events import BatchReceived, RankHeard
from gateway.edges.engine_link.env import LinkEnv
from gateway.edges.engine_link.runs import BatchRun, is_plain
from gateway.types import EngineBatch, EngineDead, EngineMessage, EngineNoise
from gateway.wire.protocol import EngineProtocol


class Intake:
    """Receiving side of one rank. The socket says which rank it is; a claimed index is only compared.

    Plain batches that follow each other are held and joined until something else comes, or `flush`. `joined` is the
    incarnation as of now: what a held batch sets off in the core may end it.
    """

    def __init__(
        self,
        env: LinkEnv,
        protocol: EngineProtocol,
        rank: int,
        engine_index: int,
        *,
        joined: Callable[[], int | None],
    ) -> None:
        self._env = env
        self._counters = env.counters
        self._emit = env.events.emit
        self._decode = protocol.decode_output
        self._rank = rank
        self._engine_index = engine_index
        self._joined = joined
        self._run = BatchRun()
        # The incarnation was given up for its silence, and nothing was heard since.
        self.is_silent = False

    def take(self, frames: list[zmq.Frame], incarnation: int | None) -> bool:
        """Handle one message, or hold it; True when the rank announced its end, which does not flush.

        `incarnation` None: nobody has joined. No attempt of this gateway can be in such a message, it is dropped.
        """
        counters = self._counters
        counters.frames += 1
        message = self._decode([frame.bytes for frame in frames] if len(frames) > 1 else [frames[0].bytes])
        # `isinstance` costs 0.3 us with a Struct, whose metaclass is an ABCMeta.
        if type(message) is EngineDead:
            return True
        run = self._run
        if type(message) is EngineBatch and incarnation is not None and is_plain(message, self._engine_index):
            if run.batch is None:
                self._hold(message, incarnation)
            elif not run.join(message, incarnation):
                # Also after a handler's exception: the message is read, nobody else has it.
                try:
                    self.flush()
                finally:
                    self._hold(message, self._joined())
            if any(message.finish):
                self.flush()  # a request that ends makes room: the core has to know before the next rows
        elif run.batch is None:
            self._pass_on(message, incarnation)
        else:
            try:
                self.flush()
            finally:
                self._pass_on(message, self._joined())
        return False

    def flush(self) -> None:
        """Pass on what is held."""
        run = self._run
        batch = run.batch
        if batch is not None:
            run.batch = None
            self._emit(BatchReceived(self._rank, run.incarnation, batch))

    def _hold(self, batch: EngineBatch, incarnation: int | None) -> None:
        if incarnation is None:
            self._counters.early_frames += 1
            return
        self.is_silent = False
        run = self._run
        run.batch, run.incarnation = batch, incarnation

    def _pass_on(self, message: EngineMessage, incarnation: int | None) -> None:
        counters = self._counters
        if incarnation is None:
            counters.early_frames += 1
        elif type(message) is EngineNoise:
            # No sign of life: an engine of another family sends nothing else.
            counters.noise.add(message.reason)
            self._env.limited_log.warning("output_noise", rank=self._rank, reason=message.reason)
        else:
            self.is_silent = False
            if type(message) is EngineBatch:
                if message.engine_index != self._engine_index or message.fault or message.load_fault:
                    self._check(message)
                self._emit(BatchReceived(self._rank, incarnation, message))
            else:
                counters.controls += 1
                self._emit(RankHeard(self._rank, incarnation))

    def _check(self, batch: EngineBatch) -> None:
        index, fault, load_fault = batch.engine_index, batch.fault, batch.load_fault
        counters = self._counters
        if index is not None and index != self._engine_index:
            counters.index_mismatch += 1
            self._env.limited_log.warning("engine_index_mismatch", rank=self._rank, claimed=index)
        if fault is not None:
            counters.faults.add(fault)
            self._env.limited_log.warning("batch_fault", rank=self._rank, fault=fault, lossy=batch.lossy)
        if load_fault is not None:
            counters.load_faults.add(load_fault)
