"""Every metric that the gateway exports, as data. To add one: one line in one of these tables.

Names carry base units and label sets are bounded: ranks come from the configuration, the rest from
enums, method names and the tenants that it names. `docs/metrics.md` is rendered from here (`make docs`).
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from gateway.core.ranks import RankTable

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
    _gauge(
        "rank_silence_seconds",
        "Time with work in flight since the rank's last message.",
        lambda t, r: t.silent_s[r],
    ),
    _gauge("rank_consecutive_failures", "Failures of the rank since its last success.", lambda t, r: t.failures[r]),
    _gauge("rank_send_blocked", "1 while frames to the rank wait for its socket.", lambda t, r: t.is_blocked[r]),
)

RANK_INFO = Spec(
    "rank_info", "gauge", "1 for each rank that ever joined.", ("rank", "group", "engine_version", "incarnation")
)
RANK_STATE = Spec("rank_state", "gauge", "1 for the state that the rank is in, else 0.", ("rank", "state"))
RANK_COST = Spec("rank_cost", "gauge", "Cost of the rank in the newest decision.", ("rank",))
SNAPSHOT_AGE = Spec("rank_snapshot_age_seconds", "gauge", "Time since the rank's last snapshot.", ("rank",))
BUILD_INFO = Spec(
    "build_info", "gauge", "1, with the version that runs and whether its rows are compiled.", ("version", "native")
)
CONFIG_INFO = Spec("config_info", "gauge", "1, with the SHA-256 of the configuration in force.", ("sha256",))
CONFIG_RELOADS = Spec(
    "config_reload_total", "counter", "Reloads of the configuration file, by what became of them.", ("result",)
)
CONFIG_RELOADED = Spec(
    "config_last_reload_successful", "gauge", "Whether the last reload (or the start) left the file in force."
)
CONFIG_RELOADED_AT = Spec(
    "config_last_reload_success_timestamp_seconds",
    "gauge",
    "When the file was last found to be in force, since the epoch.",
)
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
AUTH_FAILURES = Spec(
    "auth_failures_total", "counter", "Calls and scrapes refused for their token.", ("listener", "reason")
)
CLIENT_STREAMS = Spec("client_streams", "gauge", "Open calls on `listen.grpc`, health checks aside.")
CLIENT_CONNECTIONS = Spec("client_connections", "gauge", "Connections with an open call on `listen.grpc`.")
LIMIT_HITS = Spec("limit_hits_total", "counter", "Calls and streams that met a limit of `limits`.", ("limit",))
HTTP2_ERRORS = Spec(
    "http2_errors_total",
    "counter",
    "Connections ended for what the client did, with `listen.transport: fast`.",
    ("code",),
)
REJECTION_DURATION = Spec(
    "rejection_duration_seconds",
    "histogram",
    "From a call's arrival at its handler to the refusal that it was answered with; on GenerateMany, of a request.",
)
CREDENTIAL_LOADS = Spec(
    "credential_loads_total",
    "counter",
    "States of the files of `listen.tls` or `listen.auth` that were taken, or could not be.",
    ("files", "outcome"),
)


def _counter(name: str, help_text: str, *labels: str) -> Spec:
    return Spec(name, "counter", help_text, labels)


QUEUE_DEPTH = Spec("queue_depth", "gauge", "Sequences that wait in the gateway for a rank.")
QUEUE_OUTCOME_VALUES: dict[str, str] = {
    "dispatched": "It was sent to a rank.",
    "timeout": "The queue's time-out ended it.",
    "ended": "Something else did: the caller, its deadline, a drain, no rank that could ever take it.",
}
"""The values of `outcome`."""
QUEUE_DURATION = Spec(
    "queue_duration_seconds",
    "histogram",
    "From a request's acceptance until its sequence was first sent to a rank, or its outcome was known without one.",
    ("outcome",),
)
BATCH_SIZE = Spec("batch_size_sequences", "histogram", "Sequences in a batch that was sent to a rank.")
BATCHES_IN_FLIGHT = Spec(
    "rank_batches_in_flight", "gauge", "Batches sent to the rank that count as in flight.", ("rank",)
)
OLDEST_AGE = Spec(
    "oldest_request_age_seconds", "gauge", "Time since the oldest live request was accepted; 0 without one."
)
PREFILL_PREDICTED = Spec(
    "rank_prefill_predicted_seconds_total",
    "counter",
    "Predicted prefill time of the sequences whose actual one is known.",
    ("rank",),
)
PREFILL_ACTUAL = Spec(
    "rank_prefill_actual_seconds_total", "counter", "Actual prefill time of the same sequences.", ("rank",)
)
PREFILL_GAP = Spec(
    "prefill_gap_seconds", "histogram", "Difference between predicted and actual prefill time, either way."
)
PREDICTOR_SCALE = Spec("predictor_scale_ratio", "gauge", "What predictions are multiplied by; 1 unless calibrated.")
PREDICTOR_FAULTS = Spec(
    "predictor_faults_total", "counter", "Predictions that came out as NaN, infinite, negative or a fault."
)

ORDERING: dict[str, Spec] = {
    "places": Spec("ordering_places", "gauge", "Requests that have a place in the preserved order."),
    "held_bytes": Spec("ordering_held_bytes", "gauge", "Output charged for what may have to wait for its turn."),
}
RESPONSE_CACHE: dict[str, Spec] = {
    "entries": Spec("response_cache_entries", "gauge", "Answers stored."),
    "nbytes": Spec("response_cache_bytes", "gauge", "Size of the stored answers and their keys."),
    "hits": Spec("response_cache_hits_total", "counter", "Stored answers that were given to a request."),
    "misses": Spec("response_cache_misses_total", "counter", "Look-ups that found none, or one that was too old."),
    "inserts": Spec("response_cache_inserts_total", "counter", "Answers stored so far."),
    "evictions": Spec("response_cache_evictions_total", "counter", "Answers that went to make room."),
    "expired": Spec("response_cache_expired_total", "counter", "Answers forgotten for their age."),
    "too_large": Spec("response_cache_too_large_total", "counter", "Answers not stored for their size."),
    "flushes": Spec("response_cache_flushes_total", "counter", "Times that an operator emptied the cache."),
}
TENANTS: dict[str, Spec] = {
    "in_flight": Spec(
        "tenant_requests_in_flight", "gauge", "Sequences of the tenant in flight or queued.", ("tenant",)
    ),
    "queued": Spec("tenant_requests_queued", "gauge", "Of these, sequences that are queued.", ("tenant",)),
}
"""Attributes of the core's objects and what they are exported as. Tenants: those that the configuration names."""

DISPATCH_REASON_VALUES: dict[str, str] = {
    "direct": "Mode direct: at once.",
    "idle_rank": "Nothing was in flight on the rank.",
    "gate_open": "Mode queue: the rank's gate was open.",
    "batch_full": "The batch had `max_requests`.",
    "preferred_size": "The batch had the largest of `preferred_sizes` that was there.",
    "window": "The oldest in the batch had waited for `window_ms`.",
    "predicted_cap": "One more would have taken the batch over `max_predicted_ms`.",
    "token_cap": "One more would have taken the batch over `max_tokens` or `max_padded_tokens`.",
    "closed": "The rank could not take the next one.",
}
"""The values of `reason` of the dispatches."""
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
    "wave_starts": _counter("waves_started_total", "Waves of lockstep vLLM groups that the gateway has started."),
    "foreign_expired": _counter("foreign_loads_expired_total", "Foreign loads dropped for lack of a fresh report."),
    "lost_tokens": _counter("lost_tokens_total", "Tokens that a rank counted and this gateway never received."),
    "duplicated_tokens": _counter("duplicated_tokens_total", "Tokens received beyond a rank's own count."),
    "double_ends": _counter("double_ends_total", "Second ends of a request or sequence; not applied."),
    "double_releases": _counter("double_releases_total", "Second releases of a charge; not applied."),
    "suspects": _counter("rank_suspects_total", "Times that the rank was suspected for its silence.", "rank"),
    "silence_losses": _counter("rank_silence_losses_total", "Times that the rank was lost for its silence.", "rank"),
    "probes": _counter("rank_probes_total", "Signs of life that the rank was asked for while it was silent.", "rank"),
    "rank_failures": _counter("rank_failures_total", "Failures of the rank that count for its ejection.", "rank"),
    "ejections": _counter("rank_ejections_total", "Times that the rank was ejected.", "rank"),
    "ejections_capped": _counter("ejections_capped_total", "Ejections left out because too few ranks would stay."),
    "stale_events": _counter("stale_events_total", "Events of an earlier incarnation of a rank."),
    "releases": _counter("releases_total", "Charges given back, by what showed that they are free.", "evidence"),
    "audit_findings": _counter("audit_findings_total", "What the audit of charges found.", "kind"),
    "dispatch_reasons": _counter("dispatches_total", "Sequences sent to ranks, by what let them go.", "reason"),
    "reroutes": _counter("reroutes_total", "Sequences sent to another rank before their first token."),
    "resumes": _counter("resumes_total", "Sequences that another rank went on with after their first tokens."),
    "queue_timeouts": _counter("queue_timeouts_total", "Requests ended by the queue's time-out or their call's own."),
    "queue_delays": _counter("queue_delays_total", "Sequences that the queue's time-out moved behind all others."),
    "tenants_overflowed": _counter(
        "tenants_overflowed_total", "Calls of unnamed tenants beyond max_tracked, which share one account."
    ),
    "slo_shadow_rejects": _counter(
        "slo_shadow_rejections_total", "Requests admitted that mode enforce would have refused."
    ),
    "slo_rejects": _counter("slo_rejections_total", "Requests refused for missing their TTFT objective."),
    "deadlines_expired": _counter(
        "deadlines_expired_total", "Requests ended by their deadline; not those that reached max_request_age_s."
    ),
    "relaxed_filters": _counter("relaxed_filters_total", "Decisions made without a soft filter.", "filter"),
    "non_finite_costs": _counter("non_finite_costs_total", "Costs that came out as NaN, infinite or a fault."),
    "all_non_finite": _counter(
        "decisions_without_cost_total", "Decisions in which no eligible rank had a cost; the least in flight was taken."
    ),
}

SWITCHED: tuple[Spec, ...] = (
    *(QUEUE_DEPTH, QUEUE_DURATION, BATCH_SIZE, BATCHES_IN_FLIGHT),
    *(PREFILL_PREDICTED, PREFILL_ACTUAL, PREFILL_GAP, PREDICTOR_SCALE, PREDICTOR_FAULTS),
    *(*ORDERING.values(), *RESPONSE_CACHE.values(), AUTH_FAILURES, CREDENTIAL_LOADS, HTTP2_ERRORS),
)
"""What the default configuration switches off; without series then."""

CATALOGUE: tuple[Spec, ...] = tuple(
    sorted(
        (
            *(gauge.spec for gauge in RANK_GAUGES),
            *CORE_COUNTERS.values(),
            *(RANK_INFO, RANK_STATE, RANK_COST, SNAPSHOT_AGE, BUILD_INFO, LIVE, DRAINING),
            *(REQUESTS, PROMPT_TOKENS, CACHED_TOKENS, DURATION, TTFT, ITL, RANK_TTFT),
            *(CONFIG_INFO, CONFIG_RELOADS, CONFIG_RELOADED, CONFIG_RELOADED_AT),
            *(LINK_EVENTS, LINK_FAULTS, LOG_LINES_LOST),
            *(CLIENT_STREAMS, CLIENT_CONNECTIONS, LIMIT_HITS, REJECTION_DURATION),
            *(OLDEST_AGE, *TENANTS.values(), *SWITCHED),
        )
    )
)
