"""What one engine batch does to the core: store load, append rows, collect what ended.

The hot path. `gateway.core.rows` takes nearly all rows, this the others.
"""

from collections.abc import Sequence as Seq
from functools import partial

from gateway.config.schema import Config
from gateway.core.attempts import Attempts
from gateway.core.columns import resize
from gateway.core.counters import Counters
from gateway.core.errors import GatewayError, Reason
from gateway.core.lifecycle import TRANSITIONS, Phase
from gateway.core.load import LoadBook
from gateway.core.ranks import RankTable
from gateway.core.refusals import ended_short, overrun, slow_reader
from gateway.core.request import Attempt, Request, Sequence
from gateway.core.rows import append_rows
from gateway.core.strays import Strays
from gateway.types import EngineBatch, FinishReason, TokenLogprob

_STREAMING = Phase.STREAMING
Row = Seq[TokenLogprob]


MAX_STRAY_ID_CHARS = 128
MAX_STRAYS_PER_BATCH = 1024


class BatchResult:
    """What the router still has to do: release the finished, end the failed, abort the strays."""

    __slots__ = ("failed", "finished", "stray_ids")

    def __init__(self) -> None:
        self.finished: list[tuple[Attempt, FinishReason]] = []
        self.failed: list[tuple[Attempt, GatewayError]] = []
        self.stray_ids: list[str] = []


class BatchIntake:
    """Applies batches. Holds no state of its own beyond the times of the last ones."""

    def __init__(
        self,
        table: RankTable,
        attempts: Attempts,
        load: LoadBook,
        strays: Strays,
        counters: Counters,
        max_backlog_bytes: int,
    ) -> None:
        self._table = table
        self._attempts = attempts
        self._ledger = attempts.ledger
        self._load = load
        self._strays = strays
        self._counters = counters
        self._max_backlog_bytes = max_backlog_bytes
        self._result: BatchResult | None = None
        self._last_batch_at = [0.0] * table.size
        # What was un-started then is prefilled since, and that makes the gap longer than a decode step.
        self._unstarted_then = [0] * table.size

    def configure(self, config: Config) -> None:
        """Go by other limits, for as many ranks as the table has now."""
        self._max_backlog_bytes = config.limits.max_stream_buffer_bytes
        resize(self._last_batch_at, self._table.size, float)
        resize(self._unstarted_then, self._table.size, int)

    def apply(self, rank: int, batch: EngineBatch, now: float, dirty: list[Sequence | Request]) -> BatchResult | None:
        """Store the load, append every row, and say what ended, if anything did. Releases are the caller's."""
        self._counters.batches[rank] += batch.messages
        table, ids = self._table, batch.ids
        was_empty = not table.in_flight[rank]
        if not self._unstarted_then[rank] and table.in_flight_decode[rank] and len(ids):
            # Between two messages with rows of a rank that only decodes lies one of its steps.
            table.observe_step(rank, round((now - self._last_batch_at[rank]) / batch.messages * 1e6))
        self._last_batch_at[rank] = now
        report = batch.load
        if report is not None:
            if batch.earlier_loads:
                self._load.store_earlier(rank, batch.earlier_loads, now, is_idle=was_empty)
            self._load.store(rank, report, now)
        self._append_rows(rank, batch, now, dirty)
        self._unstarted_then[rank] = table.in_flight_prefill[rank]
        if batch.fault is not None:
            self._fail_unreadable(rank, batch)
        result = self._take_result()
        if result is None or not result.finished:  # their release does it
            table.refresh(rank)
        if was_empty and report is not None:
            self._load.settle(rank, now, has_rows=bool(len(ids)))
        return result

    def _append_rows(self, rank: int, batch: EngineBatch, now: float, dirty: list[Sequence | Request]) -> None:
        ids = batch.ids
        total = append_rows(
            self._ledger.by_rank[rank],
            ids,
            batch.token_ids,
            batch.finish,
            batch.completion_tokens,
            batch.logprobs,
            dirty,
            partial(self._append_other, rank, batch, now, dirty),
        )
        self._counters.rows += len(ids)
        self._counters.tokens[rank] += total
        self._ledger.add_tokens(rank, total)

    def _append_other(
        self,
        rank: int,
        batch: EngineBatch,
        now: float,
        dirty: list[Sequence | Request],
        at: int,
        attempt: Attempt | None,
    ) -> int:
        """A row that is more than one more token of an attempt that goes on; returns how many tokens it brought."""
        finish = batch.finish[at]
        if attempt is None or attempt.is_done:
            self._stray(rank, batch.ids[at], now, is_final=finish != "")
            return 0
        completion, cached_tokens, logprobs = batch.completion_tokens, batch.cached_tokens, batch.logprobs
        cached = None if cached_tokens is None else cached_tokens[at] or 0
        return self._append_row(
            attempt,
            batch.token_ids[at],
            finish,
            None if completion is None else completion[at],
            cached,
            None if logprobs is None else logprobs[at],
            now,
            dirty,
        )

    def _append_row(
        self,
        attempt: Attempt,
        token_ids: Seq[int],
        finish: FinishReason,
        claimed: int | None,
        cached: int | None,
        logprobs: Row | None,
        now: float,
        dirty: list[Sequence | Request],
    ) -> int:
        """Any row of a live attempt; returns how many tokens it brought."""
        count = len(token_ids)
        tokens_out = attempt.tokens_out + count
        if claimed is not None and claimed != tokens_out:
            self._miscounted(attempt, claimed, count)
            return 0
        if tokens_out > attempt.max_tokens:
            self._fail(attempt, overrun(attempt))
            return 0
        sequence = attempt.sequence
        if count:
            if not attempt.tokens_out:
                self._start(attempt, now)
                if cached is not None:
                    sequence.cached_tokens = cached
            attempt.tokens_out = tokens_out
            if sequence.append(token_ids, None if logprobs is None else _asked_for(sequence, logprobs)):
                self._check_reader(attempt)
        if not sequence.is_dirty:
            sequence.is_dirty = True
            dirty.append(sequence)
        if finish:
            self._finish(attempt, finish, tokens_out, is_counted=claimed is not None)
        return count

    def _finish(self, attempt: Attempt, finish: FinishReason, tokens_out: int, *, is_counted: bool) -> None:
        if finish == "length" and not is_counted and self._is_short(attempt, tokens_out):
            self._fail(attempt, ended_short(attempt, tokens_out))
            return
        attempt.is_done = True
        self._ended().finished.append((attempt, finish))

    def _take_result(self) -> BatchResult | None:
        result = self._result
        if result is not None:
            self._result = None
        return result

    def _ended(self) -> BatchResult:
        """Most batches end nothing, and have no result."""
        if self._result is None:
            self._result = BatchResult()
        return self._result

    def _start(self, attempt: Attempt, now: float) -> None:
        self._ledger.start(attempt, now)
        if self._attempts.follows_starts:
            self._attempts.started(attempt)
        request = attempt.sequence.request
        if request.first_token_at is None:
            request.first_token_at = now
            assert _STREAMING in TRANSITIONS[request.phase], request.phase
            request.phase = _STREAMING

    def _check_reader(self, attempt: Attempt) -> None:
        """End the attempt if its reader fell behind."""
        if self._is_too_slow(attempt.sequence):
            self._fail(attempt, slow_reader(self._max_backlog_bytes))

    def _is_too_slow(self, sequence: Sequence) -> bool:
        """Whether a reader fell behind. One whose turn has not come can't read: its output was paid for at acceptance."""
        place = sequence.request.place
        is_its_turn = place is None or place.is_live
        return is_its_turn and sequence.backlog_bytes - sequence.held_bytes > self._max_backlog_bytes

    def _stray(self, rank: int, wire_id: str, now: float, *, is_final: bool) -> None:
        """A row that belongs to no live attempt of this rank never reaches a client."""
        attempt = self._ledger.live.get(wire_id)
        if attempt is not None:
            if attempt.rank == rank:
                self._counters.late_rows += 1  # its end came earlier in this very batch
            else:
                self._counters.misattributed_rows += 1
            return
        if self._strays.is_probe(wire_id):
            return
        if self._strays.is_ours(wire_id):
            self._counters.late_rows += 1
        else:
            self._counters.orphan_rows += 1
        if len(wire_id) > MAX_STRAY_ID_CHARS or len(self._ended().stray_ids) >= MAX_STRAYS_PER_BATCH:
            return  # no gateway makes such ids; the rest has its turn with a later batch
        if self._strays.seen(rank, wire_id, now, is_final=is_final):
            self._ended().stray_ids.append(wire_id)

    def _miscounted(self, attempt: Attempt, claimed: int, count: int) -> None:
        """The engine's cumulative count and what arrived differ: tokens were lost or doubled."""
        missing = claimed - attempt.tokens_out - count
        if missing > 0:
            self._counters.lost_tokens += missing
        else:
            self._counters.duplicated_tokens -= missing
        kind = "lost" if missing > 0 else "doubled"
        error = GatewayError(
            Reason.DATA_LOSS,
            f"{abs(missing)} tokens were {kind} between rank {attempt.rank} and the gateway",
            rank=attempt.rank,
            delivered_tokens=attempt.tokens_out,
        )
        self._fail(attempt, error)

    def _is_short(self, attempt: Attempt, tokens_out: int) -> bool:
        """Whether an attempt ended for its length before it had it: a wire without counts tells of a loss only here."""
        room = self._table.max_model_len[attempt.rank] - attempt.prompt_tokens
        return tokens_out < min(attempt.max_tokens, room)

    def _fail_unreadable(self, rank: int, batch: EngineBatch) -> None:
        """Rows that could not be read: fail whom they name, or everyone they may have hit.

        Where the wire carries cumulative counts the next row of each victim tells; where it does not
        (vLLM), any attempt of the rank may have lost tokens, its first ones included.
        """
        live = self._ledger.live
        victims = [live[wire_id] for wire_id in batch.failed_ids if wire_id in live and live[wire_id].rank == rank]
        self._counters.failed_rows += len(batch.failed_ids)
        if batch.lossy:
            self._counters.lossy_frames += 1
            if not self._table.counts_tokens[rank]:
                victims = self._ledger.of_rank(rank)
        for attempt in victims:
            error = GatewayError(
                Reason.DATA_LOSS,
                f"rank {rank} sent output that could not be read ({batch.fault})",
                rank=rank,
                delivered_tokens=attempt.tokens_out,
            )
            self._fail(attempt, error)

    def _fail(self, attempt: Attempt, error: GatewayError) -> None:
        """The attempt ends with an error; nothing more of it is delivered, not even from this batch."""
        attempt.is_done = True
        self._ended().failed.append((attempt, error))


def _asked_for(sequence: Sequence, logprobs: Row) -> Row | None:
    """Cut a row's alternatives to the number that was asked for: engines may pad to the batch's maximum."""
    wanted = sequence.request.arrived.sampling.logprobs
    if wanted is None:
        return None
    if all(len(item.top) <= wanted for item in logprobs):
        return logprobs
    return [TokenLogprob(item.logprob, item.top[:wanted]) for item in logprobs]
