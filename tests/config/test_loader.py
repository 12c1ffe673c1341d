"""Configuration files: what is accepted, and where each mistake is reported."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.loader import ConfigError, load_config, load_fragment, parse_config, parse_fragment
from gateway.config.schema import Config, Filters, Listen, Policy
from tests.support.config_cases import BASE, MARK, unmark


def refused(marked):
    """The error for a text whose mark shows where it must point."""
    text, line, column = unmark(marked)
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "f.yaml")
    message = str(caught.value)
    assert message.startswith(f"f.yaml:{line}:{column}: "), message
    return message.removeprefix(f"f.yaml:{line}:{column}: ")


def test_shortest_configuration_has_every_default():
    config = parse_config(BASE, "f.yaml")
    assert config.groups[0].ranks == 2
    assert config.listen == Listen()
    assert config.policy == Policy(preset="lmetric")


def test_load_config_reads_a_file_with_or_without_byte_order_mark(tmp_path):
    path = tmp_path / "g.yaml"
    for prefix in ("", "\ufeff"):
        path.write_text(prefix + BASE, encoding="utf-8")
        assert isinstance(load_config(path), Config)
    path.write_text(BASE.replace("ranks", "rnks"))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == f"{path}:7:5: unknown key 'rnks'; did you mean 'ranks'? (at $.groups[0].rnks)"


@pytest.mark.parametrize("indent", [None, 2, "\t"])
def test_json_is_valid_input(indent):
    text = json.dumps(yaml.safe_load(BASE), indent=indent)
    assert parse_config(text, "f.json") == parse_config(BASE, "f.yaml")


def test_json_errors_have_positions():
    assert refused(
        '{"version": 1, "model": {"name": "m", "max_context_tokens": §0, "vocab_size": 1}, "groups": []}'
    ) == ("expected whole number >= 1, got 0 (at $.model.max_context_tokens)")


UNKNOWN_AND_MISSING = [
    ("§lissten: {}\n", "unknown key 'lissten'; did you mean 'listen'? (at $.lissten)"),
    ("filters: {§kv_ft: off}\n", "unknown key 'kv_ft'; did you mean 'kv_fit'? (at $.filters.kv_ft)"),
    ("drain: {§zzz: 1}\n", "unknown key 'zzz'; known here: delay_s, grace_s (at $.drain.zzz)"),
    ("§1: 2\n", "unknown key '1'; known here: version, listen, model, groups, gateways, processes, state_dir, policy, filters, load, predictor, admission, scheduling, slo, ordering, preserve, response_cache, limits, failure, drain, reload, observability (at $['1'])"),
    ("§filters:\n", "'filters' has no value; leave the key out for its default (at $.filters)"),
    ("gateways: 1\n§gateways: 2\n", "duplicate key 'gateways', first on line 8 (at $.gateways)"),
]  # fmt: skip

VALUES = [
    ("gateways: §0\n", "expected whole number >= 1, got 0 (at $.gateways)"),
    ("gateways: §1025\n", "expected whole number <= 1024, got 1025 (at $.gateways)"),
    ("gateways: §1.0\n", "expected whole number, got 1.0 (at $.gateways)"),
    ("gateways: §true\n", "expected whole number, got true (at $.gateways)"),
    ("gateways: §'2'\n", "expected whole number, got the text '2'; numbers are written without quotes (at $.gateways)"),
    ("gateways: §two\n", "expected whole number, got the text 'two' (at $.gateways)"),
    ("gateways: §[2]\n", "expected whole number, got a list (at $.gateways)"),
    ("gateways: §{a: 2}\n", "expected whole number, got a mapping (at $.gateways)"),
    ("gateways: §12:30\n", "expected whole number, got the text '12:30'; base 60 is not read as a number; write it in decimal (at $.gateways)"),
    ("gateways: §010\n", "expected whole number, got the text '010'; octal is not read as a number; write it in decimal, without leading zeros (at $.gateways)"),
    ("gateways: §99999999999999999999\n", "expected whole number, got the text '99999999999999999999'; the number does not fit 64 bits (at $.gateways)"),
    ("listen: {allow_wildcard: §on}\n", "expected true or false, got the text 'on'; write true or false (at $.listen.allow_wildcard)"),
    ("listen: {allow_wildcard: §'true'}\n", "expected true or false, got the text 'true' (at $.listen.allow_wildcard)"),
    ("listen: {keepalive: {time_s: §0}}\n", "expected number > 0.0, got 0 (at $.listen.keepalive.time_s)"),
    ("limits: {reader_stall_timeout_s: §0.000001}\n", "expected number >= 0.05, got 1e-06 (at $.limits.reader_stall_timeout_s)"),
    ("limits: {idle_stream_timeout_s: §0.049}\n", "expected number >= 0.05, got 0.049 (at $.limits.idle_stream_timeout_s)"),
    ("reload: {watch_interval_s: §0.001}\n", "expected number >= 0.05, got 0.001 (at $.reload.watch_interval_s)"),
    ("listen: {keepalive: {time_s: §.inf}}\n", "expected number, got the text '.inf'; numbers must be finite (at $.listen.keepalive.time_s)"),
    ("state_dir: §5\n", 'expected text or null, got 5; quote it if it is text: "5" (at $.state_dir)'),
    ("listen: {grpc: §50051}\n", "expected HOST:PORT, got 50051 (at $.listen.grpc)"),
    ("listen: {grpc: §localhost}\n", "expected HOST:PORT, got 'localhost' (at $.listen.grpc)"),
    ('listen: {grpc: §"127.0.0.1:1\\n"}\n', "expected HOST:PORT, got '127.0.0.1:1\\n' (at $.listen.grpc)"),
    ("filters: {max_kv_usage: §2}\n", "expected number <= 1.0, got 2 (at $.filters.max_kv_usage)"),
    ("filters: {kv_fit: §sofft}\n", "unknown value 'sofft'; expected one of hard, off, soft; did you mean 'soft'? (at $.filters.kv_fit)"),
    ("filters: {kv_fit: §1}\n", "unknown value 1; expected one of hard, off, soft (at $.filters.kv_fit)"),
    ("policy: {preset: §lmetrics}\n", "unknown value 'lmetrics'; expected one of least_in_flight, lmetric, p2c, predicted, random, round_robin, smg, vllm, vllm_4w_r, null; did you mean 'lmetric'? (at $.policy.preset)"),
    ("filters: §[]\n", "expected mapping, got a list (at $.filters)"),
    ("policy: §lmetric\n", "expected mapping, got the text 'lmetric'; write policy: {preset: lmetric} (at $.policy)"),
    ("policy: §lmetrics\n", "expected mapping, got the text 'lmetrics' (at $.policy)"),
    ("slo: §off\n", "expected mapping, got the text 'off'; write slo: {mode: off} (at $.slo)"),
    ("drain: §off\n", "expected mapping, got the text 'off' (at $.drain)"),
    ("predictor: §random\n", "expected mapping or null, got the text 'random' (at $.predictor)"),
    ("listen: {metrics: §''}\n", "'metrics' is empty; write null to switch it off, or leave the key out for its default (at $.listen.metrics)"),
    ("listen: {grpc: §''}\n", "'grpc' is empty; leave the key out for its default (at $.listen.grpc)"),
    ("filters: {kv_fit: §''}\n", "'kv_fit' is empty; leave the key out for its default (at $.filters.kv_fit)"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "message"), UNKNOWN_AND_MISSING + VALUES)
def test_section_errors(section, message):
    assert refused(BASE + section) == message


BODY = [
    ("version: 1", "version: §2", "unknown value 2; expected 1 (at $.version)"),
    ("version: 1", "version: §'1'", "unknown value '1'; expected 1 (at $.version)"),
    ("version: 1", "§version:", "'version' has no value; it is required (at $.version)"),
    ("version: 1\nmodel", "§model", "missing key 'version' (at $)"),
    ("name: m, ", "", "missing key 'name' (at $.model)"),
    ("ranks: 2", "", "missing key 'ranks' (at $.groups[0])"),
    ("    protocol: vllm\n", "", "missing key 'protocol' (at $.groups[0])"),
    ("vllm", "§vlm", "unknown value 'vlm'; expected one of tokenspeed, vllm; did you mean 'vllm'? (at $.groups[0].protocol)"),
    ("name: a", "name: §''", "'name' is empty; it is required (at $.groups[0].name)"),
    ("name: a", "name: §12", 'expected name: 1 to 128 letters, digits or . _ / - with a letter or digit first, got 12; quote it if it is text: "12" (at $.groups[0].name)'),
    ("name: a", "name: §a b", "expected name: 1 to 128 letters, digits or . _ / - with a letter or digit first, got 'a b' (at $.groups[0].name)"),
    ("name: m", 'name: §"m\\n"', "expected name: 1 to 128 letters, digits or . _ / - with a letter or digit first, got 'm\\n' (at $.model.name)"),
    ("ranks: 2", "ranks: §0", "expected whole number >= 1, got 0 (at $.groups[0].ranks)"),
    ("ranks: 2", "ranks: 2\n    §min_ready:", "'min_ready' has no value; leave the key out for its default (at $.groups[0].min_ready)"),
    ("tcp://127.0.0.1:5570", "§udp://127.0.0.1:5570", "expected tcp://HOST:PORT or ipc://PATH, got 'udp://127.0.0.1:5570' (at $.groups[0].handshake)"),
    ("vocab_size: 100", "vocab_size: 100, eos_token_ids: [1, §x]", "expected whole number, got the text 'x' (at $.model.eos_token_ids[1])"),
    ("vocab_size: 100", "vocab_size: 100, eos_token_ids: §7", "expected list, got 7 (at $.model.eos_token_ids)"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), BODY)
def test_body_errors(old, new, message):
    assert BASE.count(old) == 1
    text = BASE.replace(old, new)
    if MARK not in text:  # a missing key is reported at its parent
        text = text.replace("model", "§model") if "$.model" in message else text.replace("- name", "- §name")
    assert refused(text) == message


def test_no_groups():
    assert refused("version: 1\nmodel: {name: m, max_context_tokens: 1, vocab_size: 1}\ngroups: §[]\n") == (
        "expected list of length >= 1, got 0 items (at $.groups)"
    )


PART = "missing key 'version'; if this is a part of a configuration, try check-config --fragment (at $)"


@pytest.mark.parametrize(
    ("marked", "message"),
    [
        ("§policy: {preset: p2c}\n", PART),
        ("§policy: {preset: p2c}\nstate_dir: x\nslo: {}\n", PART),
        ("policy: {preset: p2c}\n§polcy: 1\n", "unknown key 'polcy'; did you mean 'policy'? (at $.polcy)"),
        ("§policy: {preset: p2c}\nmodel: {}\n", "missing key 'version' (at $)"),
        ("§version: 1\npolicy: {preset: p2c}\n", "missing key 'model' (at $)"),
        ("§{}\n", "missing key 'version' (at $)"),
    ],
)
def test_a_part_of_a_configuration_is_told_from_one_that_lacks_a_key(marked, message):
    assert refused(marked) == message


def test_off_is_text_where_text_is_meant():
    assert parse_config(BASE + "filters: {kv_fit: off}\n", "f").filters.kv_fit == "off"
    assert parse_config(BASE.replace("name: a", "name: 010"), "f").groups[0].name == "010"


@pytest.mark.parametrize("text", ["[]", "null", "text", "- a"])
def test_the_root_is_a_mapping(text):
    assert refused(MARK + text) == "expected a mapping with version, model and groups (at $)"


def test_first_mistake_wins_over_later_sections_but_syntax_comes_first():
    assert (
        refused(BASE + "listen: §[\n".replace("§", "") + "§")
        == "while parsing a flow node, did not find expected node content"
    )


@pytest.mark.parametrize(
    "key", ["state_dir: ''", "model: {name: m, max_context_tokens: 4096, vocab_size: 100, tokenizer_path: ''}"]
)
def test_empty_text_means_unset_where_the_default_is_null(key):
    lines = [line for line in BASE.splitlines() if not line.startswith(key.partition(":")[0])]
    assert parse_config("\n".join([*lines, key]), "f") == parse_config(BASE, "f")


def test_null_is_a_value_where_it_means_off():
    config = parse_config(BASE + "listen: {metrics: null}\nfilters: {max_kv_usage: null}\n", "f")
    assert config.listen.metrics is None
    assert config.filters == Filters(max_kv_usage=None)


def test_groups_can_be_merged_from_an_anchor():
    text = (
        BASE.replace("- name: a", "- &first\n    name: a")
        + "  - {<<: *first, name: b, handshake: ipc://x, start_index: 2}\n"
    )
    config = parse_config(text, "f")
    assert [(group.name, group.start_index, group.ranks) for group in config.groups] == [("a", 0, 2), ("b", 2, 2)]


def test_fragment_needs_no_other_sections_but_is_checked_like_them(tmp_path):
    assert parse_fragment("policy: {preset: smg}\n", "f").policy == Policy(preset="smg")
    with pytest.raises(ConfigError) as caught:
        parse_fragment("policy:\n  cost: in_flght\n", "f")
    assert str(caught.value).startswith("f:2:9: ")
    path = tmp_path / "f.yaml"
    path.write_text("polcy: {}\n")
    with pytest.raises(ConfigError, match=r":1:1: unknown key 'polcy'; did you mean 'policy'\?"):
        load_fragment(path)


fragments = st.sampled_from(
    [*BASE.splitlines(keepends=True), "policy: {", "cost: ", "in_flight", "- ", "&a ", "*a", "<<: ", "''", "null", "{}", "[]",
     ": ", "\n", "  ", "listen: ", "grpc: ", "1", "0.0.0.0:1", "groups: ", "}", "]", ", ", "|\n", '"', "(", "on", "é", "\t"]
)  # fmt: skip


@given(st.text(st.characters(codec="utf-8"), max_size=100) | st.lists(fragments, max_size=14).map("".join))
def test_any_text_is_a_configuration_or_a_config_error(text):
    for candidate in (text, BASE + text):
        result = None
        try:
            result = parse_config(candidate, "f")
        except ConfigError as error:
            result = error
        assert isinstance(result, Config | ConfigError)
