"""The one definition of every setting. Strict: an unknown key is an error.

A leaf module (msgspec and value sets only), so that core and edges take their settings from here instead of
repeating them. The loader turns YAML into `Config`; docs and the JSON schema are generated from it.
Units are in the names. `null` (or absence) means unlimited or automatic; 0 never does.
"""

from typing import Annotated, Literal

from msgspec import Meta

from gateway.config.failure import Failure
from gateway.config.fields import (
    Bytes,
    Count,
    Endpoint,
    KeepaliveSeconds,
    Name,
    NonNegativeSeconds,
    Port,
    Ratio,
    Seconds,
    Strict,
    TokenId,
    Tokens,
)
from gateway.config.limits import Limits
from gateway.config.scheduling import Admission, Predictor, Preserve, ResponseCache, Scheduling, Slo
from gateway.config.security import Auth, Tls
from gateway.config.values import LogFormat, LogLevel
from gateway.types import LoadSemantics, Protocol


class Keepalive(Strict, frozen=True, kw_only=True):
    """gRPC keepalive of the listeners."""

    time_s: Annotated[KeepaliveSeconds, Meta(description="idle time before the server pings a connection")] = 60.0
    timeout_s: Annotated[KeepaliveSeconds, Meta(description="time to wait for the ping's answer")] = 20.0
    min_client_ping_s: Annotated[
        KeepaliveSeconds, Meta(description="clients that ping more often are disconnected")
    ] = 10.0
    max_connection_age_s: Annotated[
        KeepaliveSeconds | None, Meta(description="age at which a connection is closed")
    ] = None
    max_connection_age_grace_s: Annotated[KeepaliveSeconds, Meta(description="time its open streams get to end")] = (
        600.0
    )


class Listen(Strict, frozen=True, kw_only=True):
    """Addresses that the gateway serves on."""

    grpc: Annotated[Port, Meta(description="clients: GatewayService and the standard engine service")] = (
        "127.0.0.1:50051"
    )
    admin: Annotated[Port, Meta(description="operators: AdminService")] = "127.0.0.1:50052"
    metrics: Annotated[Port | None, Meta(description="Prometheus; null switches it off")] = "127.0.0.1:9090"
    transport: Annotated[
        Literal["fast", "grpcio"],
        Meta(description="server of both gRPC listeners: our own, made for streams of small messages, or grpcio"),
    ] = "fast"
    stream_interval_tokens: Annotated[
        Count,
        Meta(
            description="tokens of a sequence that leave together; the first and the last ones never wait; 1: all at once"
        ),
    ] = 1
    max_flush_delay_ms: Annotated[
        float, Meta(ge=0, le=60_000, description="longest time that a token waits for stream_interval_tokens")
    ] = 0.0
    max_message_bytes: Annotated[Bytes, Meta(description="largest gRPC message in either direction")] = 64 * 1024 * 1024
    keepalive: Keepalive = Keepalive()
    allow_wildcard: Annotated[bool, Meta(description="permit binding to all interfaces (0.0.0.0, ::, *)")] = False
    tls: Annotated[Tls | None, Meta(description="TLS of all three listeners; null: plaintext")] = None
    auth: Annotated[Auth | None, Meta(description="bearer tokens of all three listeners; null: anyone may call")] = None


class Model(Strict, frozen=True, kw_only=True):
    """The model that every group serves."""

    name: Annotated[Name, Meta(description="served model name")]
    max_context_tokens: Annotated[Tokens, Meta(description="prompt + generated tokens of one sequence")]
    vocab_size: Annotated[Count, Meta(description="token ids are below this")]
    eos_token_ids: Annotated[
        tuple[TokenId, ...], Meta(description="ids that end a sequence; the first is the primary one")
    ] = ()
    tokenizer_path: Annotated[
        str | None, Meta(description="directory that standard-service clients load the tokenizer from")
    ] = None


class Sockets(Strict, frozen=True, kw_only=True):
    """Where the private per-rank data sockets are bound."""

    transport: Annotated[Literal["ipc", "tcp"], Meta(description="ipc for ranks on this host, tcp otherwise")] = "ipc"
    dir: Annotated[
        str | None, Meta(description="ipc: directory (0700, owned by this user); null makes a temporary one")
    ] = None
    host: Annotated[str, Meta(description="tcp: address to bind and to announce to the ranks")] = "127.0.0.1"


class GroupBudget(Strict, frozen=True, kw_only=True):
    """Bounds on what is in flight in one group. A group that is at one of them takes no request (`group_full`)."""

    max_requests: Annotated[Count | None, Meta(description="sequences in flight")] = None
    max_prompt_tokens: Annotated[Tokens | None, Meta(description="prompt tokens in flight")] = None
    max_kv_tokens: Annotated[Tokens | None, Meta(description="prompt + max_tokens of what is in flight")] = None


class Coordinator(Strict, frozen=True, kw_only=True):
    """The coordinator of a group of vLLM ranks, which the gateway is. Other ranks have none."""

    enabled: Annotated[
        bool,
        Meta(description="ranks report every change of their load by themselves, also when they become idle"),
    ] = True
    meeting_host: Annotated[
        str | None,
        Meta(description="coupled: IP address of the first rank's host, where the ranks meet; null: sockets.host"),
    ] = None


class Group(Strict, frozen=True, kw_only=True):
    """Ranks with the same model and configuration that dial one handshake address."""

    name: Annotated[Name, Meta(description="unique name of the group, shown in listings and metrics")]
    protocol: Annotated[Protocol, Meta(description="engine wire format")]
    handshake: Annotated[Endpoint, Meta(description="address that the ranks dial")]
    ranks: Annotated[int, Meta(ge=1, le=1024, description="number of ranks")]
    start_index: Annotated[int, Meta(ge=0, le=65535, description="engine index of the group's first rank")] = 0
    min_ready: Annotated[int, Meta(ge=0, description="ranks that must be READY before the gateway is ready")] = 1
    load_semantics: Annotated[
        LoadSemantics | None,
        Meta(description="disjoint: running excludes waiting; resident: includes it; null: the protocol's own"),
    ] = None
    coupled: Annotated[
        bool,
        Meta(
            description="the ranks step in lockstep (attention-DP, MoE); the loss of one is the loss of"
            " all; it also sets the formula variable `coupled`, which is 1 when any group has it"
        ),
    ] = False
    sockets: Sockets = Sockets()
    coordinator: Coordinator = Coordinator()
    budget: Annotated[GroupBudget, Meta(description="what may be in flight on the group's ranks together")] = (
        GroupBudget()
    )

    @property
    def has_waves(self) -> bool:
        """Whether its ranks sleep and wake together and the gateway wakes them: vLLM's way of lockstep."""
        return self.coupled and self.protocol == "vllm"


class TieTolerance(Strict, frozen=True, kw_only=True):
    """Costs this close to the best are ties."""

    relative: Annotated[float, Meta(ge=0, description="fraction of the best cost")] = 1e-9
    absolute: Annotated[float, Meta(ge=0, description="difference in the unit of the cost")] = 0.0


PresetName = Literal[
    "lmetric", "predicted", "smg", "vllm", "vllm_4w_r", "round_robin", "random", "p2c", "least_in_flight"
]


class Policy(Strict, frozen=True, kw_only=True):
    """How a rank is chosen: exactly one of a preset and a cost formula; the other keys override the preset's."""

    preset: Annotated[
        PresetName | None, Meta(description="named set of the keys below; absent with a cost of your own")
    ] = None
    cost: Annotated[str | None, Meta(description="formula over the documented variables; smaller is better")] = None
    picker: Annotated[
        Literal["argmin", "p2c", "random", "round_robin"] | None,
        Meta(
            description="argmin: the best of all; p2c: the better of two drawn at random; null: the preset's, else argmin"
        ),
    ] = None
    tie_break: Annotated[
        Literal["random", "rotate", "first"] | None,
        Meta(description="choice among ranks of equal cost; null: the preset's, else random"),
    ] = None
    objective: Annotated[
        Literal["min", "max"] | None,
        Meta(description="whether the smallest or largest value wins; null: the preset's, else min"),
    ] = None
    tie_tolerance: Annotated[
        TieTolerance | None, Meta(description="costs this close to the best are ties; null: the defaults below")
    ] = None
    seed: Annotated[int | None, Meta(description="seed of the random tie-break and pickers; null: from the system")] = (
        None
    )


class Filters(Strict, frozen=True, kw_only=True):
    """Which ranks a request may go to, before any picker. Soft filters are relaxed when no rank passes."""

    kv_fit: Annotated[
        Literal["hard", "soft", "off"], Meta(description="the prompt must fit the rank's free KV tokens")
    ] = "hard"
    max_kv_usage: Annotated[
        Ratio | None, Meta(description="soft: shun ranks above this while they have work in flight")
    ] = 0.95


class Load(Strict, frozen=True, kw_only=True):
    """How reported load is interpreted."""

    abort_settle_s: Annotated[
        NonNegativeSeconds, Meta(description="a report without rows this soon after our abort is clamped")
    ] = 1.0
    foreign_ttl_s: Annotated[
        Seconds, Meta(description="load on an idle rank is believed this long without a fresh report")
    ] = 2.0


class Drain(Strict, frozen=True, kw_only=True):
    """What happens between SIGTERM and exit."""

    delay_s: Annotated[NonNegativeSeconds, Meta(description="time between readiness off and refusing new requests")] = (
        0.0
    )
    grace_s: Annotated[NonNegativeSeconds, Meta(description="time that live requests get to end")] = 30.0


class Reload(Strict, frozen=True, kw_only=True):
    """How a change of this file is noticed; SIGHUP and `AdminService.ReloadConfig` reload it in any case."""

    watch_interval_s: Annotated[
        Annotated[float, Meta(ge=0.05, le=86_400)] | None,
        Meta(
            description="time between two looks at the file; it is read once it has stayed the same between two; null: none"
        ),
    ] = 2.0


class Observability(Strict, frozen=True, kw_only=True):
    """Logs and decision records."""

    log_level: Annotated[LogLevel, Meta(description="least severe level that is written")] = "info"
    log_format: Annotated[LogFormat, Meta(description="json: one object a line; console: for people")] = "json"
    decision_ring: Annotated[int, Meta(ge=0, le=1_000_000, description="decision records kept; 0 keeps none")] = 4096


class Config(Strict, frozen=True, kw_only=True):
    """The whole configuration file."""

    version: Annotated[Literal[1], Meta(description="version of this file's format")]
    listen: Listen = Listen()
    model: Model
    groups: Annotated[
        tuple[Group, ...], Meta(min_length=1, description="rank numbers run through the groups in this order")
    ]
    gateways: Annotated[int, Meta(ge=1, le=1024, description="gateways that share these ranks")] = 1
    processes: Annotated[
        int, Meta(ge=1, le=64, description="processes of this gateway, which share listen.grpc; needs transport fast")
    ] = 1
    state_dir: Annotated[
        str | None, Meta(description="directory that lets a restarted gateway re-attach; null: no re-attach")
    ] = None
    policy: Policy = Policy(preset="lmetric")
    filters: Filters = Filters()
    load: Load = Load()
    predictor: Annotated[Predictor | None, Meta(description="how long prefill takes; null: no model")] = None
    admission: Admission = Admission()
    scheduling: Scheduling = Scheduling()
    slo: Slo = Slo()
    ordering: Annotated[
        Literal["none", "preserve"],
        Meta(description="none: answers leave as they come; preserve: in the order in which their requests arrived"),
    ] = "none"
    preserve: Preserve = Preserve()
    response_cache: Annotated[
        ResponseCache | None, Meta(description="answers deterministic requests again without a rank; null: off")
    ] = None
    limits: Limits = Limits()
    failure: Failure = Failure()
    drain: Drain = Drain()
    reload: Reload = Reload()
    observability: Observability = Observability()
