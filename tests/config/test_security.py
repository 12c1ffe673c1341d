"""The settings of TLS and tokens: what is refused, what is remarked on, what is printed."""

import json
import re
from pathlib import Path

import pytest

from gateway.config.effective import cautions, effective_config
from gateway.config.loader import ConfigError, parse_config, parse_fragment
from tests.support.config_cases import BASE, unmark

ROOT = Path(__file__).parents[2]
TLS = "tls: {cert_file: c.pem, key_file: k.pem}"
MUTUAL = "tls: {cert_file: c.pem, key_file: k.pem, client_ca_file: a.pem}"
TOKENS = "auth: {tokens_file: t}"
BOTH_FILES = "auth: {tokens_file: t, admin_tokens_file: a}"


def parse(listen):
    return parse_config(f"{BASE}listen: {{{listen}}}\n", "f.yaml")


def test_off_unless_set():
    listen = parse_config(BASE, "f.yaml").listen
    assert (listen.tls, listen.auth) == (None, None)


def test_what_is_set_is_what_counts():
    listen = parse(f"{MUTUAL}, {BOTH_FILES}").listen
    assert (listen.tls.cert_file, listen.tls.key_file, listen.tls.client_ca_file) == ("c.pem", "k.pem", "a.pem")
    assert (listen.auth.tokens_file, listen.auth.admin_tokens_file) == ("t", "a")
    assert listen.tls.reload_interval_s == listen.auth.reload_interval_s == 10.0


REFUSED = [
    ("listen: {§tls: {key_file: k}}\n", "missing key 'cert_file' (at $.listen.tls)"),
    ("listen: {§tls: {cert_file: c}}\n", "missing key 'key_file' (at $.listen.tls)"),
    ("listen: {tls: {cert_file: §'', key_file: k}}\n", "'cert_file' is empty; it is required (at $.listen.tls.cert_file)"),
    ("listen: {tls: {cert_file: c, key_file: k, §client_ca: a}}\n", "unknown key 'client_ca'; did you mean 'client_ca_file'? (at $.listen.tls.client_ca)"),
    ("listen: {tls: {cert_file: c, key_file: k, reload_interval_s: §0}}\n", "expected number > 0.0, got 0 (at $.listen.tls.reload_interval_s)"),
    ("listen: {tls: {cert_file: c, key_file: k, reload_interval_s: §86401}}\n", "expected number <= 86400.0, got 86401 (at $.listen.tls.reload_interval_s)"),
    ("listen: {§auth: {}}\n", "missing key 'tokens_file' (at $.listen.auth)"),
    ("listen: {auth: {tokens_file: a/../t, admin_tokens_file: §./t}}\n", "this is tokens_file as well: every client would be an operator; use two files (at $.listen.auth.admin_tokens_file)"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "expected"), REFUSED)
def test_what_is_refused(section, expected):
    text, line, column = unmark(BASE + section)
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "f.yaml")
    place, _, message = str(caught.value).partition(": ")
    assert place == f"f.yaml:{line}:{column}"
    assert message == expected


# --- remarks -----------------------------------------------------------------------------------------

HERE = "127.0.0.1:1"
THERE = "10.0.0.1:1"
NO_ADMIN = "listen.auth has no admin_tokens_file: every call on listen.admin but health is refused"


def reachable(name):
    return f"listen.{name} {THERE} is reachable from other hosts"


@pytest.mark.parametrize("name", ["grpc", "admin", "metrics"])
@pytest.mark.parametrize(
    ("security", "missing"),
    [
        ("", " in plaintext, and anyone there may call; set listen.tls and listen.auth"),
        (f", {BOTH_FILES}", " in plaintext, tokens included; set listen.tls"),
        (f", {TLS}", ", and anyone there may call; set listen.auth or listen.tls.client_ca_file"),
        (f", {TLS}, {BOTH_FILES}", None),
        (f", {MUTUAL}, {BOTH_FILES}", None),
    ],
)
def test_what_other_hosts_can_reach_is_protected_or_remarked_on(name, security, missing):
    expected = [] if missing is None else [f"{reachable(name)}{missing}"]
    assert cautions(parse(f"{name}: '{THERE}'{security}")) == expected
    assert cautions(parse(f"{name}: '{HERE}'{security}")) == []


@pytest.mark.parametrize("name", ["grpc", "metrics"])
def test_certificates_alone_are_enough_for_clients(name):
    assert cautions(parse(f"{name}: '{THERE}', {MUTUAL}")) == []


def test_but_not_for_operators():
    more = ", and every client with a certificate is an operator; set listen.auth.admin_tokens_file"
    assert cautions(parse(f"admin: '{THERE}', {MUTUAL}")) == [reachable("admin") + more]


def test_a_wildcard_is_reachable_too():
    (remark,) = cautions(parse("grpc: '0.0.0.0:1', allow_wildcard: true"))
    assert remark.startswith("listen.grpc 0.0.0.0:1 is reachable from other hosts in plaintext")


def test_a_page_that_is_off_is_not_reachable():
    assert cautions(parse("metrics: null")) == []


def test_admin_calls_that_nobody_may_make_are_remarked_on():
    assert cautions(parse(TOKENS)) == [NO_ADMIN]
    assert cautions(parse(f"{TLS}, {BOTH_FILES}")) == []


# --- what is printed ---------------------------------------------------------------------------------


def test_the_effective_configuration_has_paths_only_and_is_a_fixed_point(tmp_path):
    (tmp_path / "t").write_text("canary-canary-canary")
    effective = effective_config(parse(f"{MUTUAL}, auth: {{tokens_file: '{tmp_path}/t'}}"))
    assert effective["listen"]["auth"] == {
        "tokens_file": f"{tmp_path}/t",
        "admin_tokens_file": None,
        "reload_interval_s": 10.0,
    }
    assert "canary" not in json.dumps(effective)
    assert effective_config(parse_config(json.dumps(effective), "again")) == effective


def test_the_examples_in_the_documentation_are_valid():
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    _, _, security = page.partition("\n## Security\n")
    examples = re.findall(r"```yaml\n(.*?)```", security.partition("\n## ")[0], re.DOTALL)
    ours = [text for text in examples if not text.startswith("# prometheus.yml")]
    configs = [parse_fragment(text, "docs/operations.md") for text in ours]
    assert [(config.listen.tls is not None, config.listen.auth is not None) for config in configs] == [(True, True)]
    assert cautions(configs[0]) == []
