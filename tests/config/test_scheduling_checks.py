"""Rules and remarks on scheduling, objectives and the order of answers, each reported where it can be mended."""

import json

import msgspec
import pytest

from gateway.config.checks import check
from gateway.config.effective import cautions, effective_config
from gateway.config.errors import format_loc
from gateway.config.loader import ConfigError, parse_config, parse_fragment
from gateway.config.schema import Config
from tests.support.config_cases import BASE, unmark

MODEL = "predictor: {prefill_ms: 0.03 * total_new_tokens, step_ms: '10'}\n"
DEADLINE = "limits: {default_deadline_s: 60}\n"
PRESERVE = DEADLINE + "ordering: preserve\n"


def refused(section):
    text, line, column = unmark(BASE + section)
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "f.yaml")
    message = str(caught.value)
    assert message.startswith(f"f.yaml:{line}:{column}: "), message
    return message.removeprefix(f"f.yaml:{line}:{column}: ")


NEEDED = "needs a predictor: set predictor.prefill_ms"

PREDICTIONS = [
    ("policy: {preset: §predicted}\n", f"preset predicted {NEEDED} (at $.policy.preset)"),
    ("policy: {cost: §queued_ms}\n", f"'queued_ms' {NEEDED} (at $.policy.cost)"),
    ("policy: {cost: 'in_flight + 2 * §prefill_ms'}\n", f"'prefill_ms' {NEEDED} (at $.policy.cost)"),
    ("policy:\n  cost: >-\n    in_flight\n    + fleet_min(§step_ms)\n", f"'step_ms' {NEEDED} (at $.policy.cost)"),
    ("policy: {cost: in_flight * §mean_out_tokens}\n", f"'mean_out_tokens' {NEEDED} (at $.policy.cost)"),
    ("predictor: null\npolicy: {preset: §predicted}\n", f"preset predicted {NEEDED} (at $.policy.preset)"),
    ("scheduling: {mode: queue, queue: {§gate_ms: 5}}\n", f"'gate_ms' {NEEDED}, or gate_tokens in its place (at $.scheduling.queue.gate_ms)"),
    ("scheduling: {mode: batch, queue: {§gate_steps: 5}}\n", f"'gate_steps' {NEEDED}, or gate_tokens in its place (at $.scheduling.queue.gate_steps)"),
    ("scheduling: {mode: batch, batch: {§max_predicted_ms: 5}}\n", f"'max_predicted_ms' {NEEDED}, or max_tokens instead (at $.scheduling.batch.max_predicted_ms)"),
    ("slo: {mode: §shadow, ttft: [{ttft_ms: 1}]}\n", f"slo.mode shadow {NEEDED} (at $.slo.mode)"),
    ("slo: {mode: §enforce, ttft: [{ttft_ms: 1}]}\n", f"slo.mode enforce {NEEDED} (at $.slo.mode)"),
    (MODEL + "slo: {mode: §enforce}\n", "slo.mode enforce needs an objective: set slo.ttft (at $.slo.mode)"),
]  # fmt: skip

MODES = [
    ("scheduling: {queue: {§order: fcfs}}\n", "'order' has no effect with mode direct; set scheduling.mode: queue, or leave it out (at $.scheduling.queue.order)"),
    ("scheduling: {mode: direct, queue: {§timeout_s: 5}}\n", "'timeout_s' has no effect with mode direct; set scheduling.mode: queue, or leave it out (at $.scheduling.queue.timeout_s)"),
    ("scheduling: {queue: {§levels: [{priority: 1}]}}\n", "'levels' has no effect with mode direct; set scheduling.mode: queue, or leave it out (at $.scheduling.queue.levels)"),
    ("scheduling: {queue: {§max_wait_s: null}}\n", "'max_wait_s' has no effect with mode direct; set scheduling.mode: queue, or leave it out (at $.scheduling.queue.max_wait_s)"),
    ("scheduling: {batch: {§max_requests: 4}}\n", "'max_requests' has no effect with mode direct; set scheduling.mode: batch, or leave it out (at $.scheduling.batch.max_requests)"),
    ("scheduling: {mode: queue, batch: {§window_ms: 0}}\n", "'window_ms' has no effect with mode queue; set scheduling.mode: batch, or leave it out (at $.scheduling.batch.window_ms)"),
    ("scheduling: {mode: §quue}\n", "unknown value 'quue'; expected one of batch, direct, queue; did you mean 'queue'? (at $.scheduling.mode)"),
    ("scheduling: {mode: queue, queue: {§max_hold_s: 2}}\n", "'max_hold_s' has no effect with no hold_ratio; set scheduling.queue.hold_ratio, or leave it out (at $.scheduling.queue.max_hold_s)"),
    ("slo: {§margin_ms: 5}\n", "'margin_ms' has no effect with slo.mode off; set slo.mode: shadow or enforce, or leave it out (at $.slo.margin_ms)"),
    ("preserve: {§max_places: 5}\n", "'max_places' has no effect with ordering none; set ordering: preserve, or leave it out (at $.preserve.max_places)"),
]  # fmt: skip

QUEUE = [
    ("scheduling: {mode: queue, queue: {order: fcfs, §alpha: 3}}\n", "'alpha' has no effect with order fcfs; set scheduling.queue.order: aging, or leave it out (at $.scheduling.queue.alpha)"),
    (MODEL + "scheduling: {mode: queue, queue: {gate_ms: 9, §gate_steps: 3}}\n", "'gate_steps' has no effect with gate_ms; set one of them (at $.scheduling.queue.gate_steps)"),
    ("scheduling: {mode: queue, queue: {order: hrrn, §hold_ratio: 0.7}}\n", "order hrrn keeps no request back: its ratio grows while it waits; set hold_ratio: 0 or another order (at $.scheduling.queue.hold_ratio)"),
    ("scheduling: {mode: queue, queue: {levels: [{priority: 1}, {priority: 2}, {priority: §1}]}}\n", "priority 1 is in levels[0] already (at $.scheduling.queue.levels[2].priority)"),
    ("scheduling: {mode: queue, queue: {levels: [{priority: §2147483648}]}}\n", "no request has priority 2147483648: it must fit 32 bits (at $.scheduling.queue.levels[0].priority)"),
    (MODEL + "scheduling: {mode: queue, queue: {gate_ms: 9, §gate_tokens: 3}}\n", "'gate_tokens' has no effect with gate_ms; set one of them (at $.scheduling.queue.gate_tokens)"),
    ("policy: {preset: random}\nscheduling: {mode: queue, queue: {§hold_ratio: 0.7}}\n", "'hold_ratio' compares costs, and this policy has none; set policy.cost or another preset, or leave it out (at $.scheduling.queue.hold_ratio)"),
    ("scheduling: {mode: queue, queue: {§timeout_action: delay}}\n", "'timeout_action' has no effect without a time-out; set timeout_s, or leave it out (at $.scheduling.queue.timeout_action)"),
    ("scheduling: {mode: queue, queue: {levels: [{priority: 1, §timeout_action: delay}]}}\n", "'timeout_action' has no effect without a time-out; set timeout_s, or leave it out (at $.scheduling.queue.levels[0].timeout_action)"),
    ("admission: {max_queue_depth: 8}\nscheduling: {mode: queue, queue: {hold_until_queued: §9}}\n", "9 are never queued, so nothing would ever be sent: admission.max_queue_depth is 8 (at $.scheduling.queue.hold_until_queued)"),
    ("admission: {max_in_flight: 8}\nscheduling: {mode: queue, queue: {hold_until_queued: §9}}\n", "9 are never queued, so nothing would ever be sent: admission.max_in_flight is 8 (at $.scheduling.queue.hold_until_queued)"),
]  # fmt: skip

BATCH = [
    ("preferred_sizes: [4, §2]", "2 is not above 4; list each size once, in ascending order (at $.scheduling.batch.preferred_sizes[1])"),
    ("preferred_sizes: [2, 4, §4]", "4 is not above 4; list each size once, in ascending order (at $.scheduling.batch.preferred_sizes[2])"),
    ("preferred_sizes: [8, §9]", "no batch gets 9 sequences; raise batch.max_requests, 8 (at $.scheduling.batch.preferred_sizes[1])"),
    ("max_requests: 2, preferred_sizes: [§4, 8]", "no batch gets 4 sequences; raise batch.max_requests, 2 (at $.scheduling.batch.preferred_sizes[0])"),
]  # fmt: skip

SLO = [
    ("slo: {ttft: [{max_prompt_tokens: 9, ttft_ms: 1}, {max_prompt_tokens: §8, ttft_ms: 2}]}\n", "8 is not above 9; list objectives by rising length (at $.slo.ttft[1].max_prompt_tokens)"),
    ("slo: {ttft: [{max_prompt_tokens: 9, ttft_ms: 1}, {max_prompt_tokens: §9, ttft_ms: 2}]}\n", "9 is not above 9; list objectives by rising length (at $.slo.ttft[1].max_prompt_tokens)"),
    ("slo: {ttft: [§{ttft_ms: 1}, {max_prompt_tokens: 8, ttft_ms: 2}]}\n", "only the last objective may be for any length; set max_prompt_tokens (at $.slo.ttft[0].max_prompt_tokens)"),
    ("slo: {ttft: [{max_prompt_tokens: §null, ttft_ms: 1}, {ttft_ms: 2}]}\n", "only the last objective may be for any length; set max_prompt_tokens (at $.slo.ttft[0].max_prompt_tokens)"),
    (MODEL + "slo: {mode: enforce, margin_ms: §600, ttft: [{ttft_ms: 300}], priorities: [{priority: 1, factor: 2}]}\n", "600 ms leave nothing of the longest objective, 600 ms: no request would be in time (at $.slo.margin_ms)"),
    ("slo: {priorities: [{priority: §-2147483649, factor: 1}]}\n", "no request has priority -2147483649: it must fit 32 bits (at $.slo.priorities[0].priority)"),
    ("response_cache: {max_entry_bytes: §519}\n", "519 bytes hold no answer: the smallest takes 520 (at $.response_cache.max_entry_bytes)"),
    ("response_cache: {max_bytes: §519}\n", "519 bytes hold no answer: the smallest takes 520 (at $.response_cache.max_bytes)"),
    ("failure: {reroute: false, resume: false, §max_attempts: 7}\n", "'max_attempts' has no effect with reroute and resume off; switch one of them on, or leave it out (at $.failure.max_attempts)"),
    ("slo: {priorities: [{priority: 1, factor: 1}, {priority: §1, factor: 2}]}\n", "priority 1 is in priorities[0] already (at $.slo.priorities[1].priority)"),
]  # fmt: skip

ORDER = [
    ("ordering: §preserve\n", "ordering preserve needs limits.default_deadline_s: one request without an end would hold back all answers behind it (at $.ordering)"),
    (PRESERVE + "scheduling: {mode: queue, queue: {order: §spf}}\n", "ordering preserve needs scheduling.queue.order: fcfs; order spf would only make answers wait for those before them (at $.scheduling.queue.order)"),
    (PRESERVE + "§scheduling: {mode: batch}\n", "ordering preserve needs scheduling.queue.order: fcfs; order aging would only make answers wait for those before them (at $.scheduling.queue.order)"),
    (PRESERVE + "scheduling:\n  mode: queue\n  queue: {order: fcfs, §levels: [{priority: 1}]}\n", "ordering preserve has no levels: answers leave in order of arrival whatever their priority; remove them (at $.scheduling.queue.levels)"),
    (PRESERVE + "scheduling: {mode: queue, queue: {order: fcfs, timeout_s: 5, timeout_action: §delay}}\n", "ordering preserve can't put a request behind later ones; set timeout_action: reject (at $.scheduling.queue.timeout_action)"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "message"), PREDICTIONS + MODES + QUEUE + SLO + ORDER)
def test_refused(section, message):
    assert refused(section) == message


@pytest.mark.parametrize(("keys", "message"), BATCH)
def test_refused_batches(keys, message):
    assert refused(f"scheduling: {{mode: batch, batch: {{{keys}}}}}\n") == message


FORMULAS = [
    ("predictor: {prefill_ms: §promt_tokens}\n", "$.predictor.prefill_ms"),
    ("predictor: {prefill_ms: 3 + §prompt_tokens}\n", "$.predictor.prefill_ms"),
    ("predictor: {prefill_ms: 'sum(§batch_size)'}\n", "$.predictor.prefill_ms"),
    ('predictor: {prefill_ms: "batch_size\\t + §ctx_tokens"}\n', "$.predictor.prefill_ms"),
    ("predictor:\n  prefill_ms: |\n    batch_size\n      + §)\n", "$.predictor.prefill_ms"),
    ("predictor: {prefill_ms: '1', step_ms: 8 + §batch_size}\n", "$.predictor.step_ms"),
    ("predictor:\n  prefill_ms: '1'\n  step_ms: >-\n    in_flight_decode\n    * §kv_usage\n", "$.predictor.step_ms"),
]


@pytest.mark.parametrize(("section", "at"), FORMULAS)
def test_formula_errors_point_into_the_formula(section, at):
    assert refused(section).endswith(f"(at {at})")


def test_an_error_in_a_request_s_variable_says_what_to_write():
    assert "sum(...)" in refused("predictor: {prefill_ms: 3 + §prompt_tokens}\n")


ACCEPTED = [
    "scheduling: {mode: queue}\n",
    "scheduling: {mode: batch, batch: {preferred_sizes: [2, 8]}}\n",
    "scheduling: {mode: direct, queue: {order: aging, levels: []}, batch: {max_requests: 8}}\n",
    *(f"scheduling: {{mode: queue, queue: {{order: {order}}}}}\n" for order in ("fcfs", "aging", "hrrn", "spf", "edf")),
    "scheduling: {mode: queue, queue: {order: hrrn, hold_ratio: 0}}\n",
    "scheduling: {mode: queue, queue: {order: spf, hold_ratio: 0.7}}\n",
    MODEL + "policy: {preset: predicted}\n",
    MODEL + "policy: {cost: queued_ms + prefill_ms + step_ms * mean_out_tokens}\n",
    MODEL + "scheduling: {mode: queue, queue: {gate_ms: 9}}\n",
    MODEL + "scheduling: {mode: batch, queue: {gate_steps: 9}, batch: {max_predicted_ms: 5}}\n",
    MODEL + "slo: {mode: enforce, ttft: [{max_prompt_tokens: 9, ttft_ms: 5}, {ttft_ms: 1}]}\n",
    "slo: {ttft: [{max_prompt_tokens: 9, ttft_ms: 5}]}\n",
    "scheduling: {mode: queue, queue: {timeout_action: delay, levels: [{priority: 1, timeout_s: 5}]}}\n",
    "scheduling: {mode: queue, queue: {timeout_s: 5, levels: [{priority: 1, timeout_action: delay}]}}\n",
    "admission: {max_queue_depth: 8}\nscheduling: {mode: queue, queue: {hold_until_queued: 8}}\n",
    "response_cache: {max_bytes: 520, max_entry_bytes: 520}\n",
    "failure: {reroute: false, max_attempts: 7}\n",
    MODEL + "slo: {mode: enforce, margin_ms: 599, ttft: [{ttft_ms: 300}], priorities: [{priority: 1, factor: 2}]}\n",
    PRESERVE,
    PRESERVE + "scheduling: {mode: queue, queue: {order: fcfs, fair: true, timeout_s: 5}}\nresponse_cache: {}\n",
    PRESERVE + "preserve: {domain: session, max_places: 9}\n",
    "preserve: {domain: gateway}\n",
    "admission: {tenants: {named: {a: {weight: 0.5}, b: {}}}}\n",
]


@pytest.mark.parametrize("section", ACCEPTED)
def test_accepted_and_so_is_what_it_comes_to(section):
    config = parse_config(BASE + section, "f")
    again = parse_config(json.dumps(effective_config(config)), "again")
    assert list(check(again)) == []


def test_a_fragment_is_held_to_the_same_rules():
    with pytest.raises(ConfigError, match=r"^f:1:18: preset predicted needs a predictor"):
        parse_fragment("policy: {preset: predicted}\n", "f")
    parse_fragment("policy: {preset: predicted}\n" + MODEL, "f")


def test_every_key_of_a_switched_off_section_is_found():
    """Also those that a later version adds: nobody has to list them."""
    text = BASE + (
        "scheduling: {mode: batch, queue: {order: fcfs, fair: false, kv_limit: 0.5}, batch: {max_requests: 2}}\n"
    )
    effective = effective_config(parse_config(text, "f"))
    effective["scheduling"]["mode"] = "direct"
    with pytest.raises(ConfigError) as caught:
        parse_config(json.dumps(effective), "f")
    assert caught.value.at == "$.scheduling.queue.order"
    effective["scheduling"]["mode"] = "queue"
    with pytest.raises(ConfigError) as caught:
        parse_config(json.dumps(effective), "f")
    assert caught.value.at == "$.scheduling.batch.max_requests"


def test_problems_come_in_the_order_of_the_file():
    text = BASE + (
        "policy: {cost: in_flight}\nslo: {ttft: [{ttft_ms: 1}]}\nscheduling: {mode: batch}\n" + MODEL + PRESERVE
    )
    good = effective_config(parse_config(text.replace("mode: batch", "mode: batch, queue: {order: fcfs}"), "f"))
    good["policy"]["cost"] = "queued_ms"
    good["predictor"] = None
    good["scheduling"]["queue"].update(order="hrrn", alpha=3.0, hold_ratio=0.5, timeout_s=5.0, timeout_action="delay")
    good["scheduling"]["batch"].update(preferred_sizes=[9])
    good["slo"].update(mode="shadow", ttft=[])
    good["limits"]["default_deadline_s"] = None
    config = msgspec.convert(good, Config)
    assert [format_loc(problem.loc) for problem in check(config)] == [
        "$.policy.cost",
        "$.scheduling.queue.alpha",
        "$.scheduling.queue.hold_ratio",
        "$.scheduling.batch.preferred_sizes[0]",
        "$.slo.mode",
        "$.slo.mode",
        "$.scheduling.queue.order",
        "$.scheduling.queue.timeout_action",
        "$.ordering",
    ]


# --- remarks -----------------------------------------------------------------------------------------

QUEUED = MODEL + "scheduling: {mode: queue}\n"
UNREAD = "slo.ttft and slo.priorities are read by nothing: slo.mode is off, and scheduling.queue.order is not edf"
REMARKS = [
    (MODEL, []),
    (QUEUED, []),
    (MODEL + "scheduling: {mode: batch}\n", []),
    (
        QUEUED + "gateways: 3\n",
        ["scheduling.mode queue with gateways 3: each gateway orders its own requests only, and the gain of late binding is lost; direct is the mode for several gateways"],
    ),
    (
        "scheduling: {mode: batch}\n",
        ["scheduling.mode batch without predictor.prefill_ms is not calibrated: order and gate count prompt tokens instead of time"],
    ),
    (
        "predictor: {prefill_ms: '1'}\nscheduling: {mode: queue}\n",
        ["predictor.step_ms is not set: gate_steps counts in each rank's measured time between batches"],
    ),
    ("predictor: {prefill_ms: '1'}\nscheduling: {mode: queue, queue: {gate_ms: 5}}\n", []),
    ("predictor: {prefill_ms: '1'}\n", []),
    (
        MODEL + "scheduling: {mode: queue, queue: {max_wait_s: null}}\n",
        ["scheduling.queue.max_wait_s null: nothing ends the wait of requests that others keep overtaking, such as those of low priority"],
    ),
    (
        MODEL + "scheduling: {mode: queue, queue: {hold_until_queued: 8}}\n",
        ["scheduling.queue.hold_until_queued 8 is for tests: nothing is sent before that many are queued"],
    ),
    (
        QUEUED + "admission: {max_in_flight: 100}\n",
        ["admission.max_queue_depth 4096 is never reached: max_in_flight 100 counts queued sequences too"],
    ),
    (QUEUED + "admission: {max_in_flight: 100, max_queue_depth: 100}\n", []),
    ("admission: {max_in_flight: 100}\n", []),
    (
        MODEL + "scheduling: {mode: queue, queue: {levels: [{priority: 4, max_depth: 5000}, {priority: 5, max_depth: 9}]}}\n",
        ["scheduling.queue.levels: max_depth 5000 of priority 4 is never reached: admission.max_queue_depth is 4096"],
    ),
    (
        MODEL + "scheduling: {mode: batch}\nadmission: {max_queue_depth: 7}\n",
        ["scheduling.batch.max_requests 8 is never reached: admission.max_queue_depth is 7"],
    ),
    (
        "admission: {max_prompt_tokens: 4095, max_kv_tokens: 4096}\n",
        ["admission.max_prompt_tokens 4095 is below model.max_context_tokens 4096: single requests above it are always refused"],
    ),
    (
        "admission: {tenants: {named: {a: {max_in_flight: 16385, max_prompt_tokens: 9}, b: {max_in_flight: 16384}}}}\n",
        ["admission.tenants.named.a: max_in_flight 16385 is never reached: admission.max_in_flight is 16384"],
    ),
    (
        "slo: {ttft: [{max_prompt_tokens: 4095, ttft_ms: 5}]}\n",
        [UNREAD, "slo.ttft: prompts of more than 4095 tokens have no objective"],
    ),
    ("slo: {ttft: [{max_prompt_tokens: 4096, ttft_ms: 5}]}\n", [UNREAD]),
    ("slo: {priorities: [{priority: 1, factor: 2}]}\n", [UNREAD]),
    (QUEUED.replace("mode: queue", "mode: queue, queue: {order: edf}") + "slo: {ttft: [{ttft_ms: 5}]}\n", []),
    (
        MODEL + "slo: {mode: shadow, margin_ms: 5, ttft: [{max_prompt_tokens: 9, ttft_ms: 5}, {ttft_ms: 6}]}\n",
        ["slo.margin_ms 5 leaves nothing of the objective of 5 ms: such requests are always late, unless their priority's factor is high enough"],
    ),
    (PRESERVE, []),
    (
        PRESERVE + "gateways: 2\n",
        ["ordering preserve with gateways 2: each gateway keeps the order of its own answers only"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("section", "expected"), REMARKS)
def test_remarks(section, expected):
    assert cautions(parse_config(BASE + section, "f")) == expected


@pytest.mark.parametrize(
    ("keys", "section", "expected"),
    [
        ("coupled: true", "", []),
        (
            "coupled: true",
            QUEUED,
            ["group a is coupled: scheduling.mode queue was not tested with ranks that step together"],
        ),
        ("budget: {max_requests: 1}", "", ["group a: budget.max_requests 1 leaves some of its 2 ranks idle"]),
        ("budget: {max_requests: 2}", "", []),
    ],
)
def test_remarks_on_groups(keys, section, expected):
    text = BASE.replace("ranks: 2", f"ranks: 2\n    {keys}")
    assert cautions(parse_config(text + section, "f")) == expected
