import msgspec
import pytest

from engine_stub.config import ConfigError, StubConfig, load_config
from engine_stub.faults import Faults, WireForm


def test_the_default_profile_spells_out_the_defaults():
    assert load_config("default", None, {}) == StubConfig()


def test_the_default_profile_names_every_setting():
    import yaml

    from engine_stub.config import _profile

    def names(value):
        return {key: names(inner) if isinstance(inner, dict) else None for key, inner in value.items()}

    built_in = msgspec.to_builtins(StubConfig())
    faults = {key: built_in.pop(key) for key in ("faults", "rank_faults")}
    assert names(_profile("default")) == names(built_in)
    assert yaml is not None
    assert faults["rank_faults"] == {}


def test_file_over_profile_and_options_over_file(tmp_path):
    path = tmp_path / "stub.yaml"
    path.write_text("time_scale: 0\nscheduler: {max_active: 8, kv_tokens: 1600}\n", encoding="utf-8")
    config = load_config("default", path, {"scheduler.max_active": 4, "time_scale": None})
    assert (config.time_scale, config.scheduler.max_active, config.scheduler.kv_tokens) == (0, 4, 1600)
    assert config.scheduler.token_budget == 8192


def test_faults_by_rank(tmp_path):
    path = tmp_path / "stub.yaml"
    path.write_text(
        "faults: {load: drop}\nrank_faults:\n  1: {die_at_token: 9}\n  2: {wire: {tokenspeed_batch: 9}}\n",
        encoding="utf-8",
    )
    config = load_config("default", path, {})
    assert config.faults_of(0) == Faults(load="drop")
    assert config.faults_of(1) == Faults(die_at_token=9)
    assert config.faults_of(2) == Faults(wire=WireForm(tokenspeed_batch=9))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scheduler: {max_activ: 8}", r"stub.yaml: .*`max_activ` - at `\$.scheduler`"),
        ("scheduler: {max_active: 0}", r">= 1 - at `\$.scheduler.max_active`"),
        ("time_scale: fast", r"at `\$.time_scale`"),
        ("rank_faults: {0: {stal: true}}", r"`stal`"),
        ("scheduler: {kv_tokens: 8}", "less than one block of 16"),
        ("wire: {tokenspeed_batch: 11}", r"at `\$.wire.tokenspeed_batch`"),
        ("- a list", "top level must be a mapping"),
        ("a: [", "stub.yaml"),
    ],
)
def test_errors_name_the_file_and_the_place(tmp_path, text, message):
    path = tmp_path / "stub.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_config("default", path, {})


def test_a_profile_that_is_missing_says_so():
    with pytest.raises(ConfigError, match="'none' is not known; available: aprender, default, dgr012, sarathi"):
        load_config("none", None, {})


def test_an_empty_file_changes_nothing(tmp_path):
    path = tmp_path / "stub.yaml"
    path.write_text("# nothing\n", encoding="utf-8")
    assert load_config("default", path, {}) == StubConfig()


def test_the_context_is_capped_by_the_pool():
    assert StubConfig().max_model_len == 131_072
    assert load_config("default", None, {"scheduler.kv_tokens": 1000}).max_model_len == 992


def test_the_shipped_example_is_valid(request):
    path = request.config.rootpath / "configs" / "engine" / "faults.yaml"
    config = load_config("default", path, {})
    assert config.faults_of(1).die_at_token == 2000
