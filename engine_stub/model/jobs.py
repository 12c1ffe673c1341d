"""Greedy generation without a scheduler: for the self-test and the benchmarks."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from engine_stub.model.backend import LogitRows, Model
from engine_stub.model.fixed import Floats
from engine_stub.scheduler.plan import StepItem
from engine_stub.scheduler.sequence import GREEDY, NO_IDS


class Job(msgspec.Struct, frozen=True):
    """A prompt and how many tokens are to follow."""

    prompt: list[int]
    new_tokens: int


class Text(msgspec.Struct):
    """A job in progress: its tokens, its block table, positions stored."""

    tokens: list[int]
    blocks: list[int]
    stored: int = 0

    def item(self, count: int) -> StepItem:
        """The next `count` tokens as a step's item."""
        start, end = self.stored, self.stored + count
        self.stored = end
        is_last = end == len(self.tokens)
        return item(self.tokens[start:end], start, self.blocks, needs_token=is_last)


def item(tokens: list[int], start: int, blocks: Sequence[int], *, needs_token: bool = True) -> StepItem:
    """A greedy item."""
    return StepItem(
        request_id="job",
        token_ids=tokens,
        start=start,
        block_table=blocks,
        needs_token=needs_token,
        is_prefill=len(tokens) > 1,
        sampling=GREEDY,
        seed=None,
        logprobs=None,
        banned_ids=NO_IDS,
        prompt_ids=(),
        output_ids=(),
    )


def texts_of(jobs: Sequence[Job], block_size: int) -> list[Text]:
    """Jobs with blocks dealt round robin, so that no text's blocks are neighbours."""
    counts = [-(-(len(job.prompt) + job.new_tokens) // block_size) for job in jobs]
    texts = [Text(list(job.prompt), []) for job in jobs]
    block = 0
    for place in range(max(counts)):
        for text, count in zip(texts, counts, strict=True):
            if place < count:
                text.blocks.append(block)
                block += 1
    return texts


def blocks_needed(jobs: Sequence[Job], block_size: int) -> int:
    """Blocks that `texts_of` deals."""
    return sum(-(-(len(job.prompt) + job.new_tokens) // block_size) for job in jobs)


def run(
    model: Model,
    jobs: Sequence[Job],
    block_size: int,
    chunk: int,
    on_logits: Callable[[int, LogitRows, int], None] = lambda _job, _rows, _row: None,
) -> list[list[int]]:
    """The new tokens of each job, all jobs in one batch: prompts in chunks of `chunk`, decodes beside them.

    `on_logits` gets every row of logits that yields a token: (number of the job, rows, row).
    """
    texts = texts_of(jobs, block_size)
    ends = [len(job.prompt) + job.new_tokens for job in jobs]
    while live := [index for index, text in enumerate(texts) if len(text.tokens) < ends[index]]:
        items = [texts[index].item(min(chunk, len(texts[index].tokens) - texts[index].stored)) for index in live]
        rows = model.forward(items)
        best = rows.best()
        yielding = [index for index, item in zip(live, items, strict=True) if item.needs_token]
        for row, index in enumerate(yielding):
            on_logits(index, rows, row)
            texts[index].tokens.append(best[row])
    return [text.tokens[len(job.prompt) :] for text, job in zip(texts, jobs, strict=True)]


def little_endian(row: Floats) -> bytes:
    """A row as float64 bytes, least significant first, without negative zeros."""
    return (row + 0.0).astype(np.dtype("<f8")).tobytes()
