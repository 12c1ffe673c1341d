"""What a configuration comes to, and the remarks on it."""

import json
from pathlib import Path

import pytest

from gateway.config.effective import cautions, effective_config, remarks
from gateway.config.loader import load_config, parse_config
from tests.support.config_cases import BASE

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))


def test_every_default_is_filled_in():
    effective = effective_config(parse_config(BASE, "f"))
    assert effective["listen"]["grpc"] == "127.0.0.1:50051"
    assert effective["groups"][0]["load_semantics"] == "disjoint"
    assert effective["policy"] == {
        "preset": "lmetric",
        "cost": None,
        "picker": "argmin",
        "tie_break": "random",
        "objective": "min",
        "tie_tolerance": {"relative": 1e-09, "absolute": 0.0},
        "seed": None,
    }


@pytest.mark.parametrize(("setting", "semantics"), [("", "resident"), ("    load_semantics: disjoint\n", "disjoint")])
def test_load_semantics_follow_the_protocol_unless_set(setting, semantics):
    text = BASE.replace("vllm", "tokenspeed") + setting
    assert effective_config(parse_config(text, "f"))["groups"][0]["load_semantics"] == semantics


@pytest.mark.parametrize(
    "section",
    [
        "",
        "policy: {cost: in_flight, picker: p2c}\n",
        "policy: {preset: random}\n",
        "policy: {preset: predicted}\npredictor: {prefill_ms: total_new_tokens}\n",
        "listen: {metrics: null}\n",
        "scheduling: {mode: queue}\n",
        "scheduling: {mode: queue, queue: {order: hrrn, levels: [{priority: 1}]}}\n",
        "scheduling: {mode: batch, queue: {hold_ratio: 0.5}}\n",
        "admission: {tenants: {named: {a: {weight: 2}, b: {}}}}\n",
        "ordering: preserve\nlimits: {default_deadline_s: 1}\nresponse_cache: {}\n",
    ],
)
def test_effective_configuration_is_a_configuration_and_a_fixed_point(section):
    effective = effective_config(parse_config(BASE + section, "f"))
    again = parse_config(json.dumps(effective, allow_nan=False), "again")
    assert effective_config(again) == effective


def test_the_queue_s_nulls_come_to_what_the_queue_does():
    levels = "[{priority: 1}, {priority: 2, timeout_s: 3, timeout_action: delay}]"
    section = f"scheduling: {{mode: queue, queue: {{timeout_s: 9, levels: {levels}}}}}\n"
    queue = effective_config(parse_config(BASE + section, "f"))["scheduling"]["queue"]
    assert queue["hold_ratio"] == 0.0
    assert [(level["timeout_s"], level["timeout_action"]) for level in queue["levels"]] == [
        (9.0, "reject"),
        (3.0, "delay"),
    ]


def test_a_set_ratio_stays():
    section = "scheduling: {mode: queue, queue: {hold_ratio: 0.5}}\n"
    assert effective_config(parse_config(BASE + section, "f"))["scheduling"]["queue"]["hold_ratio"] == 0.5


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_files_survive_the_round_trip(path):
    effective = effective_config(load_config(path))
    assert effective_config(parse_config(json.dumps(effective), path)) == effective


GROUP = "  - {name: b, protocol: vllm, handshake: 'tcp://10.0.0.1:0', ranks: 2, min_ready: 0}\n"
OTHER_HOSTS = BASE.replace("tcp://127.0.0.1:5570", "tcp://10.0.0.5:5") + "    sockets: {transport: tcp}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BASE, []),
        (
            BASE + "listen: {admin: 10.0.0.1:1}\n",
            [
                "listen.admin 10.0.0.1:1 is reachable from other hosts in plaintext, and anyone there may call; set listen.tls and listen.auth"
            ],
        ),
        (
            BASE + GROUP,
            [
                "group a has ranks 0 to 1",
                "group b has ranks 2 to 3",
                "group b: handshake port 0 is another free port at every start",
                "group b: ranks may dial tcp://10.0.0.1:0 from other hosts, but sockets.transport ipc serves ranks on this host only",
            ],
        ),
        (
            OTHER_HOSTS,
            [
                "group a: ranks may dial tcp://10.0.0.5:5 from other hosts, but are told to connect to sockets.host 127.0.0.1; set it to an address that they can reach"
            ],
        ),
        (
            OTHER_HOSTS.replace("tcp}", "tcp, host: '[::1]'}"),
            [
                "group a: ranks may dial tcp://10.0.0.5:5 from other hosts, but are told to connect to sockets.host [::1]; set it to an address that they can reach"
            ],
        ),
        (OTHER_HOSTS.replace("tcp}", "tcp, host: 10.0.0.5}"), []),
        (BASE + "    sockets: {transport: tcp}\n", []),
        (
            BASE + "failure: {eject: {max_ratio: 0.3}}\n",
            [
                "failure.eject.max_ratio 0.3 of the 2 ranks of group a is none: a rank that fails again and again keeps getting work"
            ],
        ),
        (BASE.replace("ranks: 2", "ranks: 1") + "failure: {eject: {max_ratio: 0.3}}\n", []),
        (
            BASE + "    min_ready: 0\n",
            ["every min_ready is 0: the gateway reports ready before any rank has joined"],
        ),
        (
            BASE + "admission: {max_in_flight: 21, max_in_flight_per_rank: 10}\n",
            ["admission.max_in_flight 21 is never reached: 2 ranks x max_in_flight_per_rank 10 = 20"],
        ),
        (BASE + "admission: {max_in_flight: 20, max_in_flight_per_rank: 10}\n", []),
        (BASE + "admission: {max_in_flight: 21, max_in_flight_per_rank: 10}\nresponse_cache: {coalesce: true}\n", []),
        (
            BASE
            + "admission: {max_in_flight: 5000, max_in_flight_per_rank: 4}\nscheduling: {mode: queue}\n"
            + "predictor: {prefill_ms: '1', step_ms: '1'}\n",
            [],
        ),
        (
            BASE + "gateways: 2\npolicy: {preset: vllm_4w_r}\n",
            ["with several gateways, tie_break first sends all of them to the same rank"],
        ),
        (
            BASE + "processes: 2\nlisten: {transport: fast}\npolicy: {preset: vllm_4w_r}\n",
            [
                "each of the 2 processes has every rank, and admission, limits, the queue, the preserved order and the response cache are each process's own",
                "with several gateways, tie_break first sends all of them to the same rank",
            ],
        ),
        (
            BASE.replace("vllm", "tokenspeed") + "processes: 2\nlisten: {transport: fast}\n",
            [
                "each of the 2 processes has its part of the ranks, and admission, limits, the queue, the preserved order and the response cache are each process's own",
            ],
        ),
    ],
)
def test_remarks(text, expected):
    assert remarks(parse_config(text, "f")) == expected


def test_how_ranks_are_numbered_is_nothing_to_warn_of():
    config = parse_config(BASE + GROUP, "f")
    assert remarks(config) == ["group a has ranks 0 to 1", "group b has ranks 2 to 3", *cautions(config)]
