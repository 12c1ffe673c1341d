"""Settings of a group of ranks. Strict: an unknown key is an error. Profiles are files of these settings.

Precedence: defaults < profile < configuration file < environment < command-line options.
"""

import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine_stub.backend.synthetic import StepTime
from engine_stub.faults import Faults, WireForm
from engine_stub.scheduler.config import SchedulerConfig

Protocol = Literal["tokenspeed", "vllm"]
SnapshotTiming = Literal["before_commit", "after_commit", "none"]
LoadSemantics = Literal["resident", "disjoint"]
TokenId = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]

PROFILES = ("aprender", "default", "dgr012", "sarathi")


class ConfigError(ValueError):
    """Settings that can't be used; the message names the source and the place."""


class Architecture(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shape of a dense Llama: RMSNorm, rotary positions, grouped queries, SwiGLU. Dimensions are elements.

    The defaults are the small model that `numpy` and `torch` run when nothing else is said: 6 layers of
    2 KV heads of 8, which in float64 is 1536 bytes of KV per position.
    """

    layers: Count = 6
    hidden: Count = 64
    heads: Annotated[Count, Meta(description="query heads; a multiple of kv_heads")] = 8
    kv_heads: Count = 2
    head_dim: Annotated[Count, Meta(description="even: rotary positions turn pairs")] = 8
    intermediate: Annotated[Count, Meta(description="width of the SwiGLU layer")] = 176
    rope_theta: Annotated[float, Meta(gt=0)] = 10_000.0
    norm_eps: Annotated[float, Meta(gt=0)] = 1e-5
    tie_embeddings: bool = False
    kv_itemsize: Annotated[Literal[2, 4, 8], Meta(description="bytes of one stored K or V element")] = 8
    weight_seed: Annotated[int, Meta(ge=0, description="of the hash that weights come from, without a path")] = 0

    def __post_init__(self) -> None:
        """Refuse shapes that no kernel can run (ValueError)."""
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary positions turn pairs")

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one position over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_itemsize


LLAMA_8B = Architecture(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    rope_theta=500_000.0,
    kv_itemsize=2,
)
"""What `synthetic` pretends to be: 128 KiB of KV per position."""


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model that the ranks pretend to run."""

    name: str = "stub"
    vocab_size: Annotated[Count, Meta(description="token ids are below this")] = 128_256
    max_model_len: Annotated[Count, Meta(description="prompt + generated tokens; capped by the KV capacity")] = 131_072
    eos_token_ids: Annotated[
        tuple[TokenId, ...], Meta(description="where TokenSpeed stops by itself; vLLM is told per request")
    ] = ()
    excluded_token_ids: Annotated[
        tuple[TokenId, ...] | None, Meta(description="ids never generated; null: the EOS ids, so that length is exact")
    ] = None
    dtype: str = "bfloat16"
    architecture: Annotated[
        Architecture | None, Meta(description="null: an 8B shape for synthetic, a small one for numpy and torch")
    ] = None
    path: Annotated[
        str | None, Meta(description="directory with config.json and safetensors, over the architecture and its seed")
    ] = None
    numerics: Annotated[
        Literal["exact", "fast"], Meta(description="exact: fixed point, the same bits anywhere; fast: floating point")
    ] = "exact"
    batch_invariant: Annotated[
        bool, Meta(description="numerics fast: results that don't depend on the batch; slower")
    ] = False
    device: Annotated[str, Meta(description="of the torch backend: cpu, cuda, cuda:1, ...")] = "cpu"

    @property
    def never_emitted(self) -> tuple[int, ...]:
        """The ids that the token stream leaves out."""
        return self.eos_token_ids if self.excluded_token_ids is None else self.excluded_token_ids


class LoadReports(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When and how a rank reports its load. Null: as the real engine of the family does.

    TokenSpeed samples before the step commits (its last report always overstates), counts waiting
    requests inside the running ones and sends load only with rows. vLLM samples after the commit, counts
    them apart and sends one batch without rows when it runs dry. To a coordinator it reports every change of its counts
    by itself, unless `snapshot` is none.
    """

    snapshot: SnapshotTiming | None = None
    semantics: LoadSemantics | None = None
    trailing: Annotated[bool | None, Meta(description="a batch without rows when a step had none or work ran out")] = (
        None
    )


class TelemetrySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a rank measures of itself beside its counters, which always run."""

    rate_interval_s: Annotated[
        float, Meta(gt=0, description="tokens per second are means over intervals of this length")
    ] = 1.0
    step_timing: Annotated[bool, Meta(description="time the schedule, forward and distribute parts of every step")] = (
        False
    )
    event_log: Annotated[bool, Meta(description="log what happens to each request, by its id")] = False
    event_limit: Annotated[Count, Meta(description="events that the control socket can still show")] = 4096


class KvEvents(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Publishing what the prefix cache holds, as vLLM does. A rank adds its index to the ports, as vLLM does too.

    `event_form`: since 0.24 vLLM's events are maps with a `type` key, before that tagged arrays.
    """

    endpoint: Annotated[
        str | None, Meta(description="PUB address to bind, tcp://127.0.0.1:5557; port *: any; null: off")
    ] = None
    replay_endpoint: Annotated[str | None, Meta(description="ROUTER address to bind for missed batches; null: off")] = (
        None
    )
    topic: str = ""
    buffer_steps: Annotated[Count, Meta(description="batches kept for replay")] = 10_000
    hwm: Annotated[int, Meta(ge=0, description="batches queued per subscriber; what comes then is lost to it")] = (
        100_000
    )
    event_form: Literal["map", "array"] = "map"
    hash_form: Annotated[
        Literal["int", "bytes"], Meta(description="block hashes as 64-bit integers or as raw bytes")
    ] = "int"


class StubConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything about a group but its protocol, address and size."""

    model: Model = Model()
    scheduler: SchedulerConfig = SchedulerConfig()
    step_time: StepTime = StepTime()
    time_scale: Annotated[float, Meta(ge=0, description="multiplies modelled step time; 0 steps as fast as it can")] = (
        1.0
    )
    load: LoadReports = LoadReports()
    telemetry: TelemetrySettings = TelemetrySettings()
    kv_events: KvEvents = KvEvents()
    wire: WireForm = WireForm()
    lockstep: Annotated[
        bool, Meta(description="vLLM: the ranks of the process step together, in waves; needs a coordinator")
    ] = False
    strict_vllm: Annotated[bool, Meta(description="vLLM ranks die or go deaf on the inputs that kill a real one")] = (
        False
    )
    output_logprobs: Annotated[bool, Meta(description="TokenSpeed: serve logprobs instead of refusing them")] = True
    faults: Annotated[Faults, Meta(description="faults of every rank without an entry below")] = Faults()
    rank_faults: Annotated[dict[int, Faults], Meta(description="faults by index in the group, from 0")] = {}
    handshake_timeout_s: Annotated[float, Meta(gt=0, description="how long a rank waits for INIT")] = 600.0
    output_hwm: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="batches queued at the output socket; null: 1000 TokenSpeed, unlimited vLLM"),
    ] = None
    socks_proxy: Annotated[
        str | None, Meta(description="HOST:PORT of a SOCKS5 proxy for all connections to the gateway; null: direct")
    ] = None

    @property
    def max_model_len(self) -> int:
        """Longest text of one sequence: the model's limit, and no more than the KV pool can hold.

        With `kv_admission: single` the pool doesn't cap it: what can't fit is refused request by request.
        """
        if self.scheduler.kv_admission == "single":
            return self.model.max_model_len
        return min(self.model.max_model_len, self.scheduler.capacity_tokens)

    def faults_of(self, index: int) -> Faults:
        """The configured faults of the rank at `index`."""
        return self.rank_faults.get(index, self.faults)


FORCE_BATCHED = "ENGINE_STUB_FORCE_BATCHED"
"""Environment variable that sets `scheduler.force_batched`; it arms on exactly `1`."""


def load_config(
    profile: str, path: Path | None, overrides: Mapping[str, object], environment: Mapping[str, str] = os.environ
) -> StubConfig:
    """Merge profile, file, environment and options (`section.key` names); raises `ConfigError`."""
    settings = _profile(profile)
    if path is not None:
        settings = _merge(settings, _read(path.read_text(encoding="utf-8"), str(path)))
    if environment.get(FORCE_BATCHED) == "1":
        settings = _merge(settings, {"scheduler": {"force_batched": True}})
    for name, value in overrides.items():
        if value is not None:
            *sections, key = name.split(".")
            nested: object = {key: value}
            for section in reversed(sections):
                nested = {section: nested}
            assert isinstance(nested, dict)
            settings = _merge(settings, nested)
    try:
        return msgspec.convert(settings, StubConfig, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path or f'profile {profile}'}: {error}") from error


def _profile(name: str) -> dict[str, Any]:
    if name not in PROFILES:
        raise ConfigError(f"profile '{name}' is not known; available: {', '.join(PROFILES)}")
    text = resources.files("engine_stub").joinpath("profiles", f"{name}.yaml").read_text(encoding="utf-8")
    return _read(text, f"profile {name}")


def _read(text: str, source: str) -> dict[str, Any]:
    import yaml  # noqa: PLC0415 - the in-process API never needs it

    try:
        settings = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: {error}") from error
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(f"{source}: the top level must be a mapping of settings")
    return settings


def _merge(base: dict[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`top` over `base`, mapping by mapping."""
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged
