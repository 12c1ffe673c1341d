"""The rows of a batch into the outboxes, as far as they are nothing special: the hot path.

Nearly every row is one more token of an attempt that goes on. Per row: one dict lookup and one append; lists are made for a
whole batch, and where tokens wait. `gateway.native` has the same in C; this is the reference.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Final

from gateway.core.outbox import PACK_AT_TOKENS, Record
from gateway.core.request import Attempt, Request, Sequence
from gateway.native import compiled
from gateway.types import FinishReason, TokenLogprob

MAX_PENDING: Final = PACK_AT_TOKENS - 1
"""One token more is not packed yet."""


def append_in_python(
    live: dict[str, Attempt],
    ids: Seq[str],
    token_ids: Seq[Seq[int]],
    finish: Seq[FinishReason],
    completion: Seq[int] | None,
    logprobs: Seq[Seq[TokenLogprob] | None] | None,
    dirty: list[Sequence | Request],
    other: Callable[[int, Attempt | None], int],
    /,
) -> int:
    """Append ordinary rows, and call `other` with position and attempt of every row that is not; in order.

    The columns are parallel to `ids`; None for a column that the batch lacks. Sequences that were not yet in `dirty` are
    listed there. Returns how many tokens there were; `other` says how many its row brought. Raises ValueError for columns
    of different lengths.
    """
    # One walk over all columns; those that are missing say nothing of any row.
    blank: Seq[None] = [None] * len(ids)
    total = 0
    columns = zip(
        range(len(ids)),
        list(map(live.get, ids)),  # ahead of the walk: then it waits less for memory
        token_ids,
        finish,
        blank if completion is None else completion,
        blank if logprobs is None else logprobs,
        strict=True,
    )
    for at, attempt, tokens, reason, claimed, row in columns:
        if (
            attempt is not None
            and not reason
            and row is None
            and type(tokens) is tuple
            and len(tokens) == 1
            and 0 < (before := attempt.tokens_out) < attempt.max_tokens
            and not attempt.is_done
            and (claimed is None or claimed == before + 1)
            and len(pending := (sequence := attempt.sequence).pending) < MAX_PENDING
            and ((record := sequence.record) is None or not record.is_answer)
        ):
            attempt.tokens_out = before + 1
            total += 1
            sequence.completion_tokens += 1
            if not pending:
                sequence.pending = tokens  # most are taken before the next ones come: no list for them
            elif type(pending) is list:
                pending += tokens
            else:
                sequence.pending = [*pending, *tokens]
            if record is not None:  # for another rank: it has room for all that an attempt may generate
                record.token_ids.append(tokens[0])
            if not sequence.is_dirty:
                sequence.is_dirty = True
                dirty.append(sequence)
        else:
            total += other(at, attempt)
    return total


append_rows = append_in_python
if compiled is not None:
    append_rows = compiled.Intake(Attempt, Sequence, Record, MAX_PENDING).append
