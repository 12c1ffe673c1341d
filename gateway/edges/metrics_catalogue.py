"""Every metric that the gateway exports, as data. To add one: one line in one of these tables.

Names carry base units and label sets are bounded: ranks come from the configuration, the rest from
enums and method names. `docs/metrics.md` is rendered from here (`make docs`).
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from gateway.core.ranks import RankTable
from gateway.edges.engine_link.counters import OTHER, BoundedCounts, LinkCounters

PREFIX = "rankgate_"
Kind = Literal["counter", "gauge", "histogram", "summary"]


class Spec(NamedTuple):
    """One metric family: its name without the prefix, its type, what it tells, and its labels."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """The name as it is scraped."""
        return PREFIX + self.name


class RankGauge(NamedTuple):
    """A gauge with one series per rank; `read` gives None where there is nothing to say."""

    spec: Spec
    read: Callable[[RankTable, int], float | None]


def _gauge(name: str, help_text: str, read: Callable[[RankTable, int], float | None]) -> RankGauge:
    return RankGauge(Spec(name, "gauge", help_text, ("rank",)), read)


def _reported(column: str) -> Callable[[RankTable, int], float | None]:
    """Read a snapshot column; a rank that never reported has no value rather than 0."""

    def read(table: RankTable, rank: int) -> float | None:
        return None if table.snapshot_at[rank] is None else float(getattr(table, column)[rank])

    return read


def _capacity(table: RankTable, rank: int) -> float | None:
    capacity = table.kv_capacity_tokens[rank]
    return None if capacity == float("inf") else capacity


RANK_GAUGES: tuple[RankGauge, ...] = (
    _gauge("rank_requests_in_flight", "Sequences of this gateway in flight on the rank.", lambda t, r: t.in_flight[r]),
    _gauge(
        "rank_requests_in_flight_limit", "In-flight sequences that the rank may hold.", lambda t, r: t.max_in_flight[r]
    ),
    _gauge(
        "rank_requests_without_token",
        "Sequences in flight on the rank that have no token yet.",
        lambda t, r: t.in_flight_prefill[r],
    ),
    _gauge(
        "rank_queued_prompt_tokens",
        "Prompt tokens of sequences in flight on the rank that have no token yet.",
        lambda t, r: t.queued_tokens[r],
    ),
    _gauge("rank_context_tokens", "Tokens held by this gateway's decoding sequences.", lambda t, r: t.ctx_tokens[r]),
    _gauge("rank_requests_running", "Running requests by the last snapshot, normalised.", _reported("running")),
    _gauge("rank_requests_waiting", "Waiting requests by the last snapshot, normalised.", _reported("waiting")),
    _gauge("rank_reported_requests_running", "Running requests as last reported.", _reported("reported_running")),
    _gauge("rank_reported_requests_waiting", "Waiting requests as last reported.", _reported("reported_waiting")),
    _gauge("rank_kv_cache_usage_ratio", "KV cache in use by the last snapshot, 0 to 1.", _reported("kv_usage")),
    _gauge("rank_kv_capacity_tokens", "Tokens that the rank's KV cache can hold.", _capacity),
    _gauge("rank_send_blocked", "1 while frames to the rank wait for its socket.", lambda t, r: t.is_blocked[r]),
)

RANK_INFO = Spec(
    "rank_info", "gauge", "1 for each rank that ever joined.", ("rank", "group", "engine_version", "incarnation")
)
RANK_STATE = Spec("rank_state", "gauge", "1 for the state that the rank is in, else 0.", ("rank", "state"))
RANK_COST = Spec("rank_cost", "gauge", "Cost of the rank in the newest decision.", ("rank",))
SNAPSHOT_AGE = Spec("rank_snapshot_age_seconds", "gauge", "Time since the rank's last snapshot.", ("rank",))
BUILD_INFO = Spec("build_info", "gauge", "1, with the version that runs.", ("version",))
LIVE = Spec("live_requests", "gauge", "Accepted requests that have not ended.")
DRAINING = Spec("draining", "gauge", "1 while the gateway refuses new requests to shut down.")

REQUESTS = Spec("requests_total", "counter", "Accepted requests by their end.", ("rpc", "code"))
PROMPT_TOKENS = Spec("prompt_tokens_total", "counter", "Prompt tokens of ended requests.")
CACHED_TOKENS = Spec("cached_prompt_tokens_total", "counter", "Prompt tokens that ranks found in their prefix cache.")
DURATION = Spec("request_duration_seconds", "histogram", "From acceptance to the end of a request.", ("rpc", "outcome"))
TTFT = Spec("time_to_first_token_seconds", "histogram", "From acceptance to a request's first token.")
ITL = Spec(
    "inter_token_latency_seconds",
    "histogram",
    "Time between consecutive batches of a busy rank, once per sequence that was in both.",
)
RANK_TTFT = Spec(
    "rank_time_to_first_token_seconds", "summary", "From sending to a rank to the first token it returned.", ("rank",)
)
LINK_EVENTS = Spec("link_events_total", "counter", "What the engine link did and met.", ("event",))
LINK_FAULTS = Spec("link_faults_total", "counter", "What the engine link met, by reason.", ("event", "reason"))
LOG_LINES_LOST = Spec("log_lines_lost_total", "counter", "Log lines that could not be written.")

LINK_EVENT_VALUES: dict[str, str] = {
    "frames": "Messages received on ranks' output sockets.",
    "controls": "Of these, messages that are neither batches nor noise: replies and wave control.",
    "early_frames": "Messages from a rank that had not joined, or was lost; dropped.",
    "index_mismatch": "Batches that name another engine index than their socket's.",
    "adds": "Requests that a rank's socket took.",
    "aborted_ids": "Requests to abort, sent or taken back before they left.",
    "aborts_dropped": "Aborts for a rank that was gone.",
    "send_blocked": "Times that a rank's socket took no more.",
}
LINK_FAULT_VALUES: dict[str, str] = {
    "noise": "Messages that cannot have carried tokens.",
    "faults": "Batches that could not be read in full.",
    "load_faults": "Batches whose load report could not be used; their tokens were.",
    "handshakes": "Steps of handshakes, and what went wrong in them.",
    "lost": "Ranks lost, by how it showed.",
    "send_failed": "Requests that a rank was not given.",
    "state_faults": "Records in `state_dir` that could not be used or written.",
}
"""The values of `event`; reasons are those that `LinkCounters` declares."""


def _counter(name: str, help_text: str, *labels: str) -> Spec:
    return Spec(name, "counter", help_text, labels)


CORE_COUNTERS: dict[str, Spec] = {
    "accepted": _counter("requests_accepted_total", "Requests admitted."),
    "refused": _counter("rejections_total", "Requests not admitted, by reason.", "reason"),
    "decisions": _counter("decisions_total", "Sequences routed to the rank.", "rank"),
    "batches": _counter("rank_batches_total", "Output batches received from the rank.", "rank"),
    "snapshots": _counter("snapshots_total", "Load snapshots stored for the rank.", "rank"),
    "clamped": _counter("snapshot_clamps_total", "Stored queue counts reset because the rank was empty.", "rank"),
    "tokens": _counter("generated_tokens_total", "Tokens received from the rank.", "rank"),
    "rows": _counter("rows_total", "Output rows received."),
    "late_rows": _counter("late_rows_total", "Rows of sequences that had ended."),
    "orphan_rows": _counter("orphan_rows_total", "Rows of requests of an earlier gateway process."),
    "misattributed_rows": _counter("misattributed_rows_total", "Rows that came from another rank than the request's."),
    "failed_rows": _counter("failed_rows_total", "Rows that could not be read."),
    "reaborts": _counter("repeated_aborts_total", "Aborts sent for rows that kept coming."),
    "lossy_frames": _counter("lossy_frames_total", "Unreadable frames that may have carried tokens."),
    "step_regressions": _counter("snapshot_regressions_total", "Snapshots older than the stored one."),
    "foreign_reports": _counter("foreign_reports_total", "Snapshots with load that this gateway did not send."),
    "foreign_expired": _counter("foreign_loads_expired_total", "Foreign loads dropped for lack of a fresh report."),
    "lost_tokens": _counter("lost_tokens_total", "Tokens that a rank counted and this gateway never received."),
    "duplicated_tokens": _counter("duplicated_tokens_total", "Tokens received beyond a rank's own count."),
    "double_ends": _counter("double_ends_total", "Second ends of a request or sequence; not applied."),
    "double_releases": _counter("double_releases_total", "Second releases of a charge; not applied."),
    "stale_events": _counter("stale_events_total", "Events of an earlier incarnation of a rank."),
    "deadlines_expired": _counter("deadlines_expired_total", "Requests ended by their deadline."),
    "relaxed_filters": _counter("relaxed_filters_total", "Decisions made without a soft filter.", "filter"),
    "non_finite_costs": _counter("non_finite_costs_total", "Costs that came out as NaN, infinite or a fault."),
    "all_non_finite": _counter(
        "decisions_without_cost_total", "Decisions in which no eligible rank had a cost; the least in flight was taken."
    ),
}

CATALOGUE: tuple[Spec, ...] = tuple(
    sorted(
        (
            *(gauge.spec for gauge in RANK_GAUGES),
            *CORE_COUNTERS.values(),
            *(RANK_INFO, RANK_STATE, RANK_COST, SNAPSHOT_AGE, BUILD_INFO, LIVE, DRAINING),
            *(REQUESTS, PROMPT_TOKENS, CACHED_TOKENS, DURATION, TTFT, ITL, RANK_TTFT),
            *(LINK_EVENTS, LINK_FAULTS, LOG_LINES_LOST),
        )
    )
)


def render() -> str:
    """The catalogue as a Markdown page."""
    lines = [
        "<!-- Generated by `make docs` from gateway/edges/metrics_catalogue.py. Don't edit. -->",
        "",
        "# Metrics",
        "",
        "Served in the Prometheus format at `http://<listen.metrics>/metrics`, on a port of its own.",
        "Times are in seconds. `rank` is the rank's global number. A rank that has not reported load has no",
        "series for what only a report can tell, rather than a zero. `process_*` metrics of the gateway's own",
        "process come on top.",
        "",
        "| metric | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    for spec in CATALOGUE:
        labels = ", ".join(f"`{label}`" for label in spec.labels) or "-"
        lines.append(f"| `{spec.full_name}` | {spec.kind} | {labels} | {spec.help} |")
    lines += ["", f"## `event` of `{LINK_EVENTS.full_name}`", "", "| event | meaning |", "|---|---|"]
    lines += (f"| `{event}` | {meaning} |" for event, meaning in LINK_EVENT_VALUES.items())
    lines += ["", f"## `event` and `reason` of `{LINK_FAULTS.full_name}`", ""]
    lines += [
        f"A reason that is none of these counts as `{OTHER}`.",
        "",
        "| event | meaning | reasons |",
        "|---|---|---|",
    ]
    counters = LinkCounters()
    for event, meaning in LINK_FAULT_VALUES.items():
        counts: BoundedCounts = getattr(counters, event)
        lines.append(f"| `{event}` | {meaning} | {', '.join(f'`{reason}`' for reason in counts.reasons)} |")
    return "\n".join(lines) + "\n"
