"""Consecutive plain batches of one drain become one event.

A rank that sends many small batches costs the gateway the fixed price of a batch, in the core and on the way to it,
for each of them; that is more than their rows cost. What is joined here comes to the same there as one by one, but
for the times at which queued messages were read, which are no steps of the rank.
"""

from collections.abc import Sequence

from gateway.types import EngineBatch, EngineLoad, FinishReason

MAX_ROWS = 1024
"""A joined batch has no more."""
MAX_OWN_ROWS = 64
"""A batch with more rows has its fixed price spread already."""


def is_plain(batch: EngineBatch, engine_index: int) -> bool:
    """Whether the batch may be joined to another one: rows and perhaps a load, nothing that is special."""
    return (
        0 < len(batch.ids) <= MAX_OWN_ROWS
        and batch.engine_index == engine_index
        and batch.cached_tokens is None
        and batch.logprobs is None
        and batch.prompt_tokens is None
        and batch.fault is None
        and batch.load_fault is None
        and not batch.failed_ids
        and not batch.lossy
    )


class BatchRun:
    """Plain batches of one incarnation, joined to the first of them. `batch` None: none is held."""

    __slots__ = ("_completion", "_finish", "_ids", "_loads", "_token_ids", "batch", "incarnation")

    def __init__(self) -> None:
        self.batch: EngineBatch | None = None
        self.incarnation = 0
        # The columns of `batch`, once a second one was joined to it.
        self._ids: list[str] = []
        self._token_ids: list[Sequence[int]] = []
        self._finish: list[FinishReason] = []
        self._completion: list[int] | None = None
        self._loads: list[EngineLoad] = []

    def join(self, batch: EngineBatch, incarnation: int) -> bool:
        """Add a plain batch to the one that is held; False if it has to stay apart."""
        held = self.batch
        if held is None or incarnation != self.incarnation or len(held.ids) + len(batch.ids) > MAX_ROWS:
            return False
        load, before = batch.load, held.load
        if before is None or load is None:
            if before is not load:
                return False
        elif not _is_later(load, before):
            return False
        completion = batch.completion_tokens
        if (completion is None) != (held.completion_tokens is None):
            return False
        if held.messages == 1:
            self._own(held)
        self._ids += batch.ids
        self._token_ids += batch.token_ids
        self._finish += batch.finish
        if self._completion is not None and completion is not None:
            self._completion += completion
        if before is not None:
            self._loads.append(before)
            held.load = load
        held.messages += 1
        return True

    def _own(self, held: EngineBatch) -> None:
        """Give the held batch columns that can grow."""
        held.ids = self._ids = [*held.ids]
        held.token_ids = self._token_ids = [*held.token_ids]
        held.finish = self._finish = [*held.finish]
        completion = held.completion_tokens
        self._completion = None if completion is None else [*completion]
        held.completion_tokens = self._completion
        held.earlier_loads = self._loads = []


def _is_later(load: EngineLoad, before: EngineLoad) -> bool:
    """Whether the load is of the same kind and no step back: one that goes back may tell of a rank's restart."""
    if load.source != before.source:
        return False
    taken_at, taken_before = load.taken_at_s, before.taken_at_s
    if taken_at is None or taken_before is None:
        if taken_at is not taken_before:
            return False
    elif not taken_at >= taken_before:
        return False
    step, step_before = load.step_counter, before.step_counter
    if step is None or step_before is None:
        return step is step_before
    return (load.wave, step) >= (before.wave, step_before)
