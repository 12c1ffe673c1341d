"""Settings of what happens between a request's arrival and its way to a rank, and of the order of answers."""

from typing import Annotated, Literal

from msgspec import Meta, field

from gateway.config.fields import Bytes, Count, Name, NonNegativeSeconds, Ratio, Seconds, Strict, Tokens

Milliseconds = Annotated[float, Meta(gt=0)]
Factor = Annotated[float, Meta(gt=0)]


class Predictor(Strict, frozen=True, kw_only=True):
    """How long an engine takes. Needed by the preset `predicted`, by `slo` and by gates in steps or milliseconds."""

    prefill_ms: Annotated[
        str, Meta(description="formula: milliseconds to prefill a batch; its variables are in docs/scheduling.md")
    ]
    step_ms: Annotated[
        str | None,
        Meta(description="formula: milliseconds of one decode step; null: the rank's measured time between batches"),
    ] = None
    calibrate: Annotated[
        bool, Meta(description="scale predictions by the recent ratio of actual to predicted prefill time")
    ] = False
    mean_out_tokens: Annotated[
        Count, Meta(description="tokens a sequence generates, until a rank has shown its own")
    ] = 128


class Tenant(Strict, frozen=True, kw_only=True):
    """One tenant's weight and bounds; a tenant is the value of a call's `x-tenant-id` metadata."""

    weight: Annotated[
        Factor,
        Meta(
            description="share of the ranks' time, max_in_flight and max_queue_depth, relative to the other active tenants"
        ),
    ] = 1.0
    max_in_flight: Annotated[Count | None, Meta(description="sequences in flight or queued")] = None
    max_prompt_tokens: Annotated[Tokens | None, Meta(description="prompt tokens in flight or queued")] = None
    max_kv_tokens: Annotated[Tokens | None, Meta(description="prompt + max_tokens in flight or queued")] = None
    max_queue_depth: Annotated[Count | None, Meta(description="sequences queued")] = None


class Tenants(Strict, frozen=True, kw_only=True):
    """Who shares the gateway. Calls without `x-tenant-id` are the tenant "" and have the default's settings."""

    default: Tenant = Tenant()
    named: Annotated[
        dict[Name, Tenant], Meta(description="settings of single tenants, by their id", max_length=1024)
    ] = field(default_factory=dict)
    max_tracked: Annotated[
        Count, Meta(description="tenants told apart at one time; beyond it, unnamed ones share one account")
    ] = 1024
    active_s: Annotated[
        Seconds,
        Meta(
            description="a tenant keeps its share of max_in_flight and max_queue_depth this long after its last request"
        ),
    ] = 5.0


class Admission(Strict, frozen=True, kw_only=True):
    """Bounds on what is accepted. Beyond them: RESOURCE_EXHAUSTED with RetryInfo."""

    max_in_flight: Annotated[Count, Meta(description="sequences in flight and queued in this gateway")] = 16384
    max_in_flight_per_rank: Annotated[
        Count | None, Meta(description="null: 4 x the rank's max_num_seqs, or 1024 if unknown")
    ] = None
    max_prompt_tokens: Annotated[Tokens | None, Meta(description="prompt tokens in flight and queued")] = None
    max_kv_tokens: Annotated[Tokens | None, Meta(description="prompt + max_tokens in flight and queued")] = None
    max_queue_depth: Annotated[Count, Meta(description="sequences queued; for modes queue and batch")] = 4096
    id_reuse_after_s: Annotated[
        Seconds | None, Meta(description="time in which an ended request's id is refused; null: free at once")
    ] = None
    tenants: Tenants = Tenants()


class QueueLevel(Strict, frozen=True, kw_only=True):
    """What differs for requests of one priority."""

    priority: Annotated[int, Meta(description="the requests that it is for")]
    max_depth: Annotated[Count | None, Meta(description="sequences of this priority queued")] = None
    timeout_s: Annotated[Seconds | None, Meta(description="longest wait; null: the queue's")] = None
    timeout_action: Annotated[Literal["reject", "delay"] | None, Meta(description="null: the queue's")] = None


class Queue(Strict, frozen=True, kw_only=True):
    """The one ordered queue and the gate that each rank has. For modes queue and batch."""

    order: Annotated[
        Literal["fcfs", "aging", "hrrn", "spf", "edf"],
        Meta(
            description="fcfs: arrival; aging: arrival + alpha x predicted prefill; hrrn: highest response ratio;"
            " spf: shortest prefill; edf: earliest TTFT deadline"
        ),
    ] = "aging"
    alpha: Annotated[float, Meta(ge=0, description="aging: seconds of head start per predicted second of prefill")] = (
        32.0
    )
    fair: Annotated[bool, Meta(description="share the ranks between tenants by weight")] = True
    gate_steps: Annotated[
        Factor,
        Meta(
            description="with a predictor: a rank takes more while its un-started prefill is below this many of its decode steps"
        ),
    ] = 2.0
    gate_ms: Annotated[Milliseconds | None, Meta(description="the same in milliseconds; null: gate_steps decides")] = (
        None
    )
    gate_tokens: Annotated[
        Tokens,
        Meta(description="the same in prompt tokens; without a predictor, or while a rank's decode step is unknown"),
    ] = 8192
    max_in_flight_per_rank: Annotated[
        Count | None, Meta(description="sequences in flight per rank; null: the rank's max_num_seqs, if it said so")
    ] = None
    kv_limit: Annotated[
        Ratio, Meta(description="share of a busy rank's KV capacity that its contexts and a new prompt may fill")
    ] = 0.95
    hold_ratio: Annotated[
        Ratio | None,
        Meta(
            description="keep a request back for a gated rank that costs less than this share of the best open one;"
            " null: 0 (never), as costs of this version know of no cached prefixes"
        ),
    ] = None
    max_hold_s: Annotated[Seconds, Meta(description="longest time that hold_ratio keeps a request back")] = 1.0
    max_wait_s: Annotated[
        Seconds | None,
        Meta(
            description="requests in time that waited longer go first, oldest first; with fair only within their tenant;"
            " null: never"
        ),
    ] = 30.0
    timeout_s: Annotated[Seconds | None, Meta(description="longest wait; null: the request's deadline alone")] = None
    timeout_action: Annotated[
        Literal["reject", "delay"],
        Meta(description="after timeout_s: end with QUEUE_TIMEOUT, or go behind all requests that are in time"),
    ] = "reject"
    allow_timeout_override: Annotated[
        bool,
        Meta(description="let a call's `x-queue-timeout-ms` end its wait earlier (never later) than timeout_s"),
    ] = True
    levels: Annotated[tuple[QueueLevel, ...], Meta(description="exceptions by priority", max_length=64)] = ()
    no_rank_wait_s: Annotated[
        NonNegativeSeconds,
        Meta(
            description="how long requests wait while no rank that could take them is READY, e.g. in a rolling restart"
        ),
    ] = 5.0
    hold_until_queued: Annotated[
        Count | None, Meta(description="send nothing before this many are queued for the first time; for tests")
    ] = None


class Batch(Strict, frozen=True, kw_only=True):
    """How requests are grouped per rank. For mode batch."""

    max_requests: Annotated[Count, Meta(description="sequences in a batch")] = 8
    max_tokens: Annotated[Tokens | None, Meta(description="prompt tokens in a batch; a longer prompt goes alone")] = (
        16384
    )
    max_padded_tokens: Annotated[
        Tokens | None, Meta(description="longest prompt x sequences; for engines that pad")
    ] = None
    max_predicted_ms: Annotated[
        Milliseconds | None, Meta(description="predicted prefill of a batch; a single request is exempt")
    ] = None
    window_ms: Annotated[
        float, Meta(ge=0, description="how long a busy rank's batch waits for more, from its oldest request on")
    ] = 10.0
    preferred_sizes: Annotated[
        tuple[Count, ...], Meta(description="sizes to send at once; others wait for the window", max_length=64)
    ] = ()
    max_in_flight_batches: Annotated[Count, Meta(description="batches in flight per rank")] = 2
    release_at: Annotated[
        Literal["first_token", "finish"], Meta(description="when a request no longer keeps its batch in flight")
    ] = "first_token"


class Scheduling(Strict, frozen=True, kw_only=True):
    """How requests get to ranks. One mode for the whole gateway."""

    mode: Annotated[
        Literal["direct", "queue", "batch"],
        Meta(
            description="direct: to a rank at once, or refused; queue: wait here until a rank's gate opens; batch: as"
            " queue, in groups"
        ),
    ] = "direct"
    queue: Queue = Queue()
    batch: Batch = Batch()


class SloBucket(Strict, frozen=True, kw_only=True):
    """The TTFT objective of prompts up to a length."""

    max_prompt_tokens: Annotated[Tokens | None, Meta(description="null: any length; for the last bucket")] = None
    ttft_ms: Annotated[Milliseconds, Meta(description="longest time from arrival to the first token")]


class SloPriority(Strict, frozen=True, kw_only=True):
    """What one priority's objective is multiplied by."""

    priority: Annotated[int, Meta(description="the requests that it is for")]
    factor: Annotated[Factor, Meta(description="below 1: a tighter objective; above 1: a looser one")]


class Slo(Strict, frozen=True, kw_only=True):
    """Objectives for the time to first token (TTFT). Refusing early what would miss them needs a predictor."""

    mode: Annotated[
        Literal["off", "shadow", "enforce"],
        Meta(description="shadow: count what would be refused; enforce: refuse it with SLO_UNATTAINABLE"),
    ] = "off"
    ttft: Annotated[
        tuple[SloBucket, ...],
        Meta(description="objectives by prompt length, ascending; the order edf goes by them too", max_length=64),
    ] = ()
    priorities: Annotated[
        tuple[SloPriority, ...], Meta(description="factors by priority; others 1", max_length=64)
    ] = ()
    margin_ms: Annotated[float, Meta(ge=0, description="kept free below the objective")] = 0.0


class Preserve(Strict, frozen=True, kw_only=True):
    """Settings of `ordering: preserve`, which needs `limits.default_deadline_s`."""

    domain: Annotated[
        Literal["gateway", "tenant", "session", "stream"],
        Meta(
            description="whose answers keep an order among themselves: all; one tenant's; one session_id's; one"
            " GenerateMany stream's (all Generate calls count as one stream)"
        ),
    ] = "gateway"
    max_places: Annotated[Count, Meta(description="requests with a place in some order")] = 4096
    max_held_bytes: Annotated[
        Bytes, Meta(description="output that may have to wait for its turn, charged in full when a request is accepted")
    ] = 256 * 1024 * 1024


class ResponseCache(Strict, frozen=True, kw_only=True):
    """Complete answers of greedy or seeded requests."""

    max_bytes: Annotated[Bytes, Meta(description="stored answers and keys")] = 64 * 1024 * 1024
    max_entry_bytes: Annotated[Bytes, Meta(description="largest single answer")] = 1024 * 1024
    ttl_s: Annotated[Seconds | None, Meta(description="age at which an answer is forgotten; null: never")] = None
    coalesce: Annotated[
        bool, Meta(description="let identical requests wait for the first of them instead of a rank")
    ] = False
