"""Which prompts run in a step, and how much of each: a pure choice over sequences in slot order."""

from collections.abc import Callable, Iterable

from engine_stub.scheduler.config import SchedulerConfig
from engine_stub.scheduler.plan import PrefillChunk
from engine_stub.scheduler.sequence import Sequence


def choose_chunks(
    prefilling: Iterable[Sequence],
    config: SchedulerConfig,
    budget: int | None,
    start: Callable[[Sequence], bool],
) -> list[PrefillChunk]:
    """Chunks for the sequences that hold a slot and have no first token, unfinished prompts before new ones.

    `budget` is what the decodes left of the token budget. `start` gives blocks to a sequence that has
    none yet; when it can't, this one and those behind it wait. With `whole_prompts` nothing is split and
    the first prompt always runs.
    """
    room = min((cap for cap in (budget, config.max_prefill_tokens_per_tick) if cap is not None), default=None)
    most = None if config.recycle_batch else config.max_prefills_per_tick
    chunks: list[PrefillChunk] = []
    for sequence in prefilling:
        if len(chunks) == most or (room == 0 and not config.whole_prompts):
            break
        if config.whole_prompts and chunks and room is not None and sequence.target - sequence.computed > room:
            break
        if not sequence.blocks and not start(sequence):
            break
        count = left = sequence.target - sequence.computed
        if not config.whole_prompts:
            count = min(cap for cap in (left, room, config.prefill_chunk_size) if cap is not None)
        chunks.append(PrefillChunk(sequence, sequence.computed, count, count == left))
        if room is not None:
            room -= count
    return chunks
