"""Looks for records that no event will ever end, and for sums that are wrong. It counts and cites; it ends nothing.

One rank a step, so that a step costs the same with any number of ranks. A finding is evidence for an operator; what
ends a request that everyone forgot is its deadline or `limits.max_request_age_s`.
"""

from gateway.config.schema import Config
from gateway.core.columns import resize
from gateway.core.counters import Counters
from gateway.core.effects import AuditFound
from gateway.core.ledger import Ledger
from gateway.core.ranks import RankState, RankTable

INTERVAL_S = 1.0
SILENT_AFTER_S = 30.0
"""An attempt is silent when its rank goes on, nothing waits there, and it got no token for this long."""
MAX_FINDINGS_PER_STEP = 16


class Audit:
    """Audits one rank after the other."""

    def __init__(self, table: RankTable, ledger: Ledger, counters: Counters) -> None:
        self._table = table
        self._ledger = ledger
        self._counters = counters
        self._next_rank = 0
        self._due_at: float | None = None
        # Per suspicious attempt: its tokens, the rank's batches then, and since when. Rebuilt at each visit.
        self._quiet: list[dict[str, tuple[int, int, float]]] = [{} for _ in range(table.size)]
        self._reported: list[set[str]] = [set() for _ in range(table.size)]

    def configure(self, _: Config) -> None:
        """Audit as many ranks as the table has now."""
        size = self._table.size
        resize(self._quiet, size, dict)
        resize(self._reported, size, set)
        self._next_rank %= size

    def step(self, now: float) -> list[AuditFound]:
        """Audit the next rank if it is time."""
        if self._due_at is None:
            self._due_at = now
        if now < self._due_at:
            return []
        # Every rank once per interval, at most one per step.
        self._due_at = now + INTERVAL_S / self._table.size
        rank = self._next_rank
        self._next_rank = (rank + 1) % self._table.size
        findings = [self._finding("sums", rank, column) for column in self._ledger.audit(rank)]
        room = MAX_FINDINGS_PER_STEP - len(findings)
        return findings + [self._finding("silent", rank, wire_id) for wire_id in self._silent(rank, now, room)]

    def _finding(self, kind: str, rank: int, subject: str) -> AuditFound:
        self._counters.audit_findings[kind] += 1
        return AuditFound(kind, rank, self._table.incarnation[rank], self._counters.batches[rank], subject)

    def _silent(self, rank: int, now: float, room: int) -> list[str]:
        """Attempts without a token while the rank works on others and has nothing waiting; each is told once.

        No more than `room`: the others have their turn at a later visit.
        """
        batches = self._counters.batches[rank]
        old, quiet = self._quiet[rank], {}
        reported = self._reported[rank]
        found: list[str] = []
        if self._table.state[rank] is RankState.READY and not self._table.waiting[rank]:
            for attempt in self._ledger.of_rank(rank):
                wire_id = attempt.wire_id
                tokens, seen_batches, since = old.get(wire_id, (attempt.tokens_out, batches, now))
                if tokens != attempt.tokens_out:
                    tokens, seen_batches, since = attempt.tokens_out, batches, now
                quiet[wire_id] = (tokens, seen_batches, since)
                is_silent = now - since >= SILENT_AFTER_S and batches > seen_batches
                if is_silent and wire_id not in reported and len(found) < room:
                    reported.add(wire_id)
                    found.append(wire_id)
        self._quiet[rank] = quiet
        reported &= quiet.keys()
        return found
