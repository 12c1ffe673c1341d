"""What the core counts. Plain integers and dicts with bounded keys; edges read, the core writes."""

from gateway.core.columns import resize
from gateway.core.errors import Reason
from gateway.core.lifecycle import Evidence

DISPATCH_REASONS = (
    "direct",
    "gate_open",
    "idle_rank",
    "batch_full",
    "preferred_size",
    "window",
    "predicted_cap",
    "token_cap",
    "closed",
)
"""Why a sequence went to its rank when it did."""


class Counters:
    """Monotonic counts since start. Dict keys are fixed enums or rank numbers, so label sets are bounded."""

    __slots__ = (
        "accepted",
        "all_non_finite",
        "audit_findings",
        "batch_sizes",
        "batches",
        "clamped",
        "deadlines_expired",
        "decisions",
        "dispatch_reasons",
        "double_ends",
        "double_releases",
        "duplicated_tokens",
        "ejections",
        "ejections_capped",
        "ended",
        "failed_rows",
        "foreign_expired",
        "foreign_reports",
        "late_rows",
        "lossy_frames",
        "lost_tokens",
        "misattributed_rows",
        "non_finite_costs",
        "orphan_rows",
        "probes",
        "queue_delays",
        "queue_timeouts",
        "rank_failures",
        "reaborts",
        "refused",
        "relaxed_filters",
        "releases",
        "reroutes",
        "resumes",
        "rows",
        "silence_losses",
        "slo_rejects",
        "slo_shadow_rejects",
        "snapshots",
        "stale_events",
        "step_regressions",
        "suspects",
        "tenants_overflowed",
        "tokens",
        "wave_starts",
    )

    def __init__(self, ranks: int) -> None:
        self.accepted = 0
        self.ended: dict[str, int] = {"OK": 0}
        self.refused: dict[Reason, int] = {}
        self.decisions = [0] * ranks
        self.batches = [0] * ranks
        self.snapshots = [0] * ranks
        self.clamped = [0] * ranks
        self.tokens = [0] * ranks
        self.suspects = [0] * ranks
        self.silence_losses = [0] * ranks
        self.probes = [0] * ranks
        self.rank_failures = [0] * ranks
        self.ejections = [0] * ranks
        self.ejections_capped = 0
        self.rows = 0
        self.late_rows = 0
        self.orphan_rows = 0
        self.misattributed_rows = 0
        self.failed_rows = 0
        self.reaborts = 0
        self.lossy_frames = 0
        self.step_regressions = 0
        self.foreign_reports = 0
        self.foreign_expired = 0
        self.lost_tokens = 0
        self.duplicated_tokens = 0
        self.double_ends = 0
        self.double_releases = 0
        self.stale_events = 0
        self.wave_starts = 0
        self.deadlines_expired = 0
        # By the filter that was given up; only soft filters can be.
        self.relaxed_filters = {"kv_usage": 0, "tried": 0, "kv_fit": 0}
        self.releases = dict.fromkeys(Evidence, 0)
        self.dispatch_reasons = dict.fromkeys(DISPATCH_REASONS, 0)
        # By number of sequences, up to `scheduling.batch.max_requests`.
        self.batch_sizes: dict[int, int] = {}
        self.queue_timeouts = 0
        self.reroutes = 0
        self.resumes = 0
        self.queue_delays = 0
        self.tenants_overflowed = 0
        self.slo_rejects = 0
        self.slo_shadow_rejects = 0
        self.audit_findings = {"sums": 0, "silent": 0}
        self.non_finite_costs = 0
        self.all_non_finite = 0

    def sent_again(self, *, is_resumed: bool) -> None:
        """A sequence goes to another rank: from its start, or with the tokens that it has."""
        if is_resumed:
            self.resumes += 1
        else:
            self.reroutes += 1

    def resize(self, ranks: int) -> None:
        """Count for another number of ranks."""
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, list):
                resize(value, ranks, int)
