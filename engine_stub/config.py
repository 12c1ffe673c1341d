"""Settings of a group of ranks. Strict: an unknown key is an error. Profiles are files of these settings.

Precedence: defaults < profile < configuration file < command-line options.
"""

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

PROFILES = ("default",)
PLANNED_PROFILES = ("dgr012", "aprender", "sarathi")


class ConfigError(ValueError):
    """Settings that can't be used; the message names the source and the place."""


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

    @property
    def never_emitted(self) -> tuple[int, ...]:
        """The ids that the token stream leaves out."""
        return self.eos_token_ids if self.excluded_token_ids is None else self.excluded_token_ids


class LoadReports(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When and how a rank reports its load. Null: as the real engine of the family does.

    TokenSpeed samples before the step commits (its last report always overstates), counts waiting
    requests inside the running ones and sends load only with rows. vLLM samples after the commit, counts
    them apart and sends one batch without rows when it runs dry.
    """

    snapshot: SnapshotTiming | None = None
    semantics: LoadSemantics | None = None
    trailing: Annotated[bool | None, Meta(description="a batch without rows when a step had none or work ran out")] = (
        None
    )


class StubConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything about a group but its protocol, address and size."""

    model: Model = Model()
    scheduler: SchedulerConfig = SchedulerConfig()
    step_time: StepTime = StepTime()
    time_scale: Annotated[float, Meta(ge=0, description="multiplies modelled step time; 0 steps as fast as it can")] = (
        1.0
    )
    load: LoadReports = LoadReports()
    wire: WireForm = WireForm()
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

    @property
    def max_model_len(self) -> int:
        """Longest text of one sequence: the model's limit, and no more than the KV pool can hold."""
        return min(self.model.max_model_len, self.scheduler.capacity_tokens)

    def faults_of(self, index: int) -> Faults:
        """The configured faults of the rank at `index`."""
        return self.rank_faults.get(index, self.faults)


def load_config(profile: str, path: Path | None, overrides: Mapping[str, object]) -> StubConfig:
    """Merge profile, file and options (`section.key` names); raises `ConfigError`."""
    settings = _profile(profile)
    if path is not None:
        settings = _merge(settings, _read(path.read_text(encoding="utf-8"), str(path)))
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
        what = "is not part of this version" if name in PLANNED_PROFILES else "is not known"
        raise ConfigError(f"profile '{name}' {what}; available: {', '.join(PROFILES)}")
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
