"""A snapshot file becomes the rank table that the live gateway would have had."""

import re
from pathlib import Path

import pytest

from gateway.cli.offline import arrive, decide, read_request, read_snapshot
from gateway.config.errors import ConfigError
from gateway.config.loader import parse_config
from gateway.core.errors import GatewayError, Reason
from gateway.core.rank_row import RankRow
from gateway.v1 import gateway_pb2
from tests.support.config_cases import BASE

CONFIG = parse_config(BASE.replace("ranks: 2", "ranks: 3"), "g")


def explain(snapshot, request="{prompt_tokens: 100}", section="", protocol="vllm"):
    config = parse_config(BASE.replace("ranks: 2", "ranks: 3").replace("vllm", protocol) + section, "g")
    decision = decide(config, read_snapshot(snapshot, "s", 3), read_request(request, "r"))
    return decision.render()


def test_lmetric_over_own_work():
    rendered = explain("ranks: [{rank: 0, queued_tokens: 50, in_flight: 1}, {rank: 2, queued_tokens: 10}]")
    assert [row["cost"] for row in rendered["ranks"]] == [300, 100, 110]
    assert rendered["rank"] == 1


def test_ranks_that_are_left_out_are_ready_and_idle():
    rendered = explain("ranks: []")
    assert [row["reason"] for row in rendered["ranks"]] == ["eligible"] * 3


def test_states_limits_and_kv_make_ranks_ineligible():
    rendered = explain(
        "ranks: [{rank: 0, state: LOST}, {rank: 1, in_flight: 5, max_in_flight: 5},"
        " {rank: 2, in_flight: 1, own_tokens: 950, kv_capacity_tokens: 1000}]"
    )
    assert [row["reason"] for row in rendered["ranks"]] == ["lost", "full", "kv_fit"]
    assert rendered["rank"] is None
    assert rendered["refusal"] == Reason.KV_FULL


def test_short_contexts_and_kv_usage():
    rendered = explain("ranks: [{rank: 0, max_model_len: 100}, {rank: 1, in_flight: 1, kv_usage: 0.97}]")
    assert [row["reason"] for row in rendered["ranks"]] == ["context_length", "kv_usage", "eligible"]


@pytest.mark.parametrize(
    ("row", "protocol", "values"),
    [
        ("running: 3, waiting: 2", "vllm", [3, 2, 3, 2, 4]),
        ("running: 3, waiting: 2", "tokenspeed", [3, 2, 5, 2, 4]),
        ("reported_running: 5, reported_waiting: 2", "vllm", [5, 2, 5, 2, 6]),
        ("reported_running: 5, reported_waiting: 2", "tokenspeed", [3, 2, 5, 2, 4]),
        ("reported_running: 1, reported_waiting: 2", "tokenspeed", [0, 2, 1, 2, 1]),
        ("reported_running: 9, reported_waiting: 9, running: 3, waiting: 2", "vllm", [3, 2, 9, 9, 4]),
        ("kv_usage: 0.5", "vllm", [0, 0, 0, 0, 0]),
    ],
)
def test_raw_and_normalised_counts_follow_from_each_other(row, protocol, values):
    cost = "policy: {cost: running + waiting + reported_running + reported_waiting + foreign}\n"
    rendered = explain(f"ranks: [{{rank: 1, in_flight: 1, {row}}}]", section=cost, protocol=protocol)
    names = ("running", "waiting", "reported_running", "reported_waiting", "foreign")
    assert [rendered["ranks"][1]["variables"][name] for name in names] == values


@pytest.mark.parametrize(
    ("row", "prefill", "decode"),
    [("", 0, 5), ("in_flight_prefill: 2", 2, 3), ("in_flight_decode: 2", 3, 2), ("in_flight_prefill: 1, in_flight_decode: 1", 1, 1)],
)  # fmt: skip
def test_phases_of_what_is_in_flight(row, prefill, decode):
    cost = "policy: {cost: in_flight_prefill + in_flight_decode}\n"
    rendered = explain(f"ranks: [{{rank: 0, in_flight: 5, {row}}}]", section=cost)
    assert rendered["ranks"][0]["variables"] == {"in_flight_prefill": prefill, "in_flight_decode": decode}


def test_ages():
    cost = "policy: {cost: 'head_age_ms + min(snapshot_age_ms, 1e9)'}\n"
    rendered = explain(
        "ranks: [{rank: 0, head_age_ms: 1500, snapshot_age_ms: 250, running: 0}, {rank: 1, running: 1}]", section=cost
    )
    ages = [row["variables"] for row in rendered["ranks"]]
    assert ages[0] == pytest.approx({"head_age_ms": 1500, "snapshot_age_ms": 250})
    assert ages[1] == {"head_age_ms": 0, "snapshot_age_ms": 0}
    assert ages[2] == {"head_age_ms": 0, "snapshot_age_ms": "inf"}


def test_a_listing_is_a_snapshot():
    listing = (
        '{"ranks": [{"rank": 0, "group": "a", "group_rank": 0, "state": "READY", "incarnation": 3, "in_flight": 2,'
        ' "reported_running": null, "reported_waiting": null, "running": null, "waiting": null, "foreign": null,'
        ' "kv_usage": null, "snapshot_age_ms": null, "cost": 3.0}]}'
    )
    assert explain(listing)["ranks"][0]["cost"] == 300


def test_request_tokens_pin_and_defaults():
    arrived = arrive(CONFIG, read_request("{prompt_token_ids: [1, 2, 3], data_parallel_rank: 2, priority: -1}", "r"))
    assert (tuple(arrived.prompt_token_ids), arrived.pinned_rank, arrived.priority) == ((1, 2, 3), 2, -1)
    assert arrived.sampling.max_tokens == 4093
    assert explain("ranks: []", "{prompt_tokens: 1, data_parallel_rank: 2, max_tokens: 7}")["pinned_rank"] == 2


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ("{prompt_tokens: 4096}", Reason.PROMPT_TOO_LONG),
        ("{prompt_token_ids: [100]}", Reason.INVALID_REQUEST),
        ("{prompt_token_ids: []}", Reason.INVALID_REQUEST),
        ("{prompt_tokens: 1, data_parallel_rank: 3}", Reason.INVALID_RANK),
        ("{prompt_tokens: 1, data_parallel_rank: -1}", Reason.INVALID_RANK),
        ("{prompt_tokens: 1, model: other}", Reason.MODEL_NOT_FOUND),
    ],
)
def test_what_the_gateway_would_refuse_is_refused(request_, reason):
    with pytest.raises(GatewayError) as caught:
        explain("ranks: []", request_)
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        ("snapshot", "ranks: [{rank: 3}]", "f:1:16: there is no rank 3; the configuration has 0 to 2 (at $.ranks[0].rank)"),
        ("snapshot", "ranks: [{rank: 1}, {rank: 1}]", "f:1:27: rank 1 is listed twice (at $.ranks[1].rank)"),
        ("snapshot", "ranks: [{rank: -1}]", "f:1:16: expected whole number >= 0, got -1 (at $.ranks[0].rank)"),
        ("snapshot", "ranks: [{rank: 0, in_flght: 1}]", "f:1:19: unknown key 'in_flght'; did you mean 'in_flight'? (at $.ranks[0].in_flght)"),
        ("snapshot", "ranks: [{rank: 0, kv_usage: 1.5}]", "f:1:29: expected number <= 1.0, got 1.5 (at $.ranks[0].kv_usage)"),
        ("snapshot", "[]", "f:1:1: expected a mapping (at $)"),
        ("request", "{}", "f:1:1: set either 'prompt_tokens' or 'prompt_token_ids' (at $)"),
        ("request", "{prompt_tokens: 1, prompt_token_ids: [1]}", "f:1:1: set either 'prompt_tokens' or 'prompt_token_ids' (at $)"),
        ("request", "{prompt_tokens: 0}", "f:1:17: expected whole number >= 1, got 0 (at $.prompt_tokens)"),
    ],
)  # fmt: skip
def test_bad_files(read, text, message):
    with pytest.raises(ConfigError) as caught:
        read_snapshot(text, "f", 3) if read == "snapshot" else read_request(text, "f")
    assert str(caught.value) == message


def test_the_page_names_every_column_that_a_listing_lacks():
    page = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
    _, _, rest = page.partition("columns that\na listing lacks can be added (")
    listed = {field.name for field in gateway_pb2.Rank.DESCRIPTOR.fields}
    assert set(re.findall(r"`(\w+)`", rest.partition(")")[0])) == set(RankRow.__struct_fields__) - listed
