"""Rules and remarks on what happens between a request's arrival and its rank, and on the order of answers.

A key that another one switches off is an error, unless it says what its default says anyway: `effective_config` writes
every key out, and its result must stay a valid file.
"""

import re
from collections.abc import Callable, Iterator

from msgspec import Struct

from gateway.config.errors import Loc, Problem
from gateway.config.scheduling import Batch, Preserve, Queue, Slo
from gateway.config.schema import Config
from gateway.core.formula import FormulaError
from gateway.core.predictor_formula import compile_prefill, compile_step
from gateway.core.presets import PRESETS

_QUEUE: Loc = ("scheduling", "queue")
_BATCH: Loc = ("scheduling", "batch")
_PREDICTED = frozenset({"queued_ms", "prefill_ms", "step_ms", "mean_out_tokens"})
"""Variables of cost formulas that mean nothing without a prefill model."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NEEDED = "needs a predictor: set predictor.prefill_ms"


def check_scheduling(config: Config) -> Iterator[Problem]:
    """Yield what can't work in `predictor`, `scheduling`, `slo` and `preserve`, and what needs a predictor."""
    yield from _check_cost(config)
    yield from _check_predictor(config)
    yield from _check_mode(config)
    yield from _check_queue(config)
    yield from _check_batch(config)
    yield from _check_slo(config)
    yield from _check_order_of_answers(config)


def _check_cost(config: Config) -> Iterator[Problem]:
    policy = config.policy
    if config.predictor is not None:
        return
    for found in _NAME.finditer(policy.cost or ""):
        if found[0] in _PREDICTED:
            yield Problem(("policy", "cost"), f"'{found[0]}' {_NEEDED}", offset=found.start())
    preset = PRESETS.get(policy.preset) if policy.preset is not None else None
    if preset is not None and not _PREDICTED.isdisjoint(_NAME.findall(preset.cost or "")):
        yield Problem(("policy", "preset"), f"preset {policy.preset} {_NEEDED}")


def _check_predictor(config: Config) -> Iterator[Problem]:
    if config.predictor is None:
        return
    yield from _check_formula("prefill_ms", config.predictor.prefill_ms, compile_prefill)
    if config.predictor.step_ms is not None:
        yield from _check_formula("step_ms", config.predictor.step_ms, compile_step)


def _check_formula(key: str, text: str, compile_text: Callable[[str], object]) -> Iterator[Problem]:
    try:
        compile_text(text)
    except FormulaError as error:
        yield Problem(("predictor", key), error.message, offset=error.column - 1)


def _check_mode(config: Config) -> Iterator[Problem]:
    scheduling = config.scheduling
    if scheduling.mode == "direct":
        yield from _without_effect(_QUEUE, scheduling.queue, Queue(), "mode direct; set scheduling.mode: queue")
    if scheduling.mode != "batch":
        why = f"mode {scheduling.mode}; set scheduling.mode: batch"
        yield from _without_effect(_BATCH, scheduling.batch, Batch(), why)


def _without_effect(
    loc: Loc, settings: Struct, defaults: Struct, why: str, *, only: tuple[str, ...] = ()
) -> Iterator[Problem]:
    """A problem for each key (of `only`, if given) that is not its default. `why`: what switches it off, what to set."""
    for name in only or settings.__struct_fields__:
        if getattr(settings, name) != getattr(defaults, name):
            yield Problem((*loc, name), f"'{name}' has no effect with {why}, or leave it out", at_key=True)


def _check_queue(config: Config) -> Iterator[Problem]:
    queue, defaults = config.scheduling.queue, Queue()
    if queue.order != "aging" and queue.alpha != defaults.alpha:
        yield Problem(
            (*_QUEUE, "alpha"),
            f"'alpha' has no effect with order {queue.order}; set scheduling.queue.order: aging, or leave it out",
            at_key=True,
        )
    if config.predictor is None:
        for name in ("gate_steps", "gate_ms"):
            if getattr(queue, name) != getattr(defaults, name):
                yield Problem((*_QUEUE, name), f"'{name}' {_NEEDED}, or gate_tokens in its place", at_key=True)
    elif queue.gate_ms is not None and queue.gate_steps != defaults.gate_steps:
        yield Problem((*_QUEUE, "gate_steps"), "'gate_steps' has no effect with gate_ms; set one of them", at_key=True)
    if not queue.hold_ratio and config.scheduling.mode != "direct":
        why = "no hold_ratio; set scheduling.queue.hold_ratio"
        yield from _without_effect(_QUEUE, queue, defaults, why, only=("max_hold_s",))
    if queue.order == "hrrn" and queue.hold_ratio:
        yield Problem(
            (*_QUEUE, "hold_ratio"),
            "order hrrn keeps no request back: its ratio grows while it waits; set hold_ratio: 0 or another order",
            at_key=True,
        )
    yield from _check_priorities((*_QUEUE, "levels"), [level.priority for level in queue.levels])


def _check_priorities(loc: Loc, priorities: list[int]) -> Iterator[Problem]:
    for number, priority in enumerate(priorities):
        if (first := priorities.index(priority)) != number:
            yield Problem((*loc, number, "priority"), f"priority {priority} is in {loc[-1]}[{first}] already")


def _check_batch(config: Config) -> Iterator[Problem]:
    batch = config.scheduling.batch
    if batch.max_predicted_ms is not None and config.predictor is None:
        yield Problem(
            (*_BATCH, "max_predicted_ms"), f"'max_predicted_ms' {_NEEDED}, or max_tokens instead", at_key=True
        )
    previous = 0
    for number, size in enumerate(batch.preferred_sizes):
        loc = (*_BATCH, "preferred_sizes", number)
        if size <= previous:
            yield Problem(loc, f"{size} is not above {previous}; list each size once, in ascending order")
        elif size > batch.max_requests:
            yield Problem(loc, f"no batch gets {size} sequences; raise batch.max_requests, {batch.max_requests}")
        previous = size


def _check_slo(config: Config) -> Iterator[Problem]:
    slo = config.slo
    if slo.mode != "off" and config.predictor is None:
        yield Problem(("slo", "mode"), f"slo.mode {slo.mode} {_NEEDED}")
    if slo.mode != "off" and not slo.ttft:
        yield Problem(("slo", "mode"), f"slo.mode {slo.mode} needs an objective: set slo.ttft")
    if slo.mode == "off":
        why = "slo.mode off; set slo.mode: shadow or enforce"
        yield from _without_effect(("slo",), slo, Slo(), why, only=("margin_ms",))
    yield from _check_objectives(slo)
    yield from _check_priorities(("slo", "priorities"), [item.priority for item in slo.priorities])


def _check_objectives(slo: Slo) -> Iterator[Problem]:
    previous = 0
    for number, bucket in enumerate(slo.ttft):
        loc: Loc = ("slo", "ttft", number, "max_prompt_tokens")
        if bucket.max_prompt_tokens is None:
            if number < len(slo.ttft) - 1:
                yield Problem(loc, "only the last objective may be for any length; set max_prompt_tokens")
        elif bucket.max_prompt_tokens <= previous:
            yield Problem(loc, f"{bucket.max_prompt_tokens} is not above {previous}; list objectives by rising length")
        else:
            previous = bucket.max_prompt_tokens


def _check_order_of_answers(config: Config) -> Iterator[Problem]:
    """With preserved order, what could hold answers back for ever or asks for another order is refused."""
    if config.ordering == "none":
        why = "ordering none; set ordering: preserve"
        yield from _without_effect(("preserve",), config.preserve, Preserve(), why)
        return
    scheduling, queue = config.scheduling, config.scheduling.queue
    if scheduling.mode != "direct" and queue.order != "fcfs":
        yield Problem(
            (*_QUEUE, "order"),
            f"ordering preserve needs scheduling.queue.order: fcfs; order {queue.order} would only make answers wait"
            " for those before them",
        )
    if queue.levels:
        yield Problem(
            (*_QUEUE, "levels"),
            "ordering preserve has no levels: answers leave in order of arrival whatever their priority; remove them",
            at_key=True,
        )
    if queue.timeout_action == "delay":
        yield Problem(
            (*_QUEUE, "timeout_action"),
            "ordering preserve can't put a request behind later ones; set timeout_action: reject",
        )
    if config.limits.default_deadline_s is None:
        yield Problem(
            ("ordering",),
            "ordering preserve needs limits.default_deadline_s: one request without an end would hold back all answers"
            " behind it",
        )


def scheduling_remarks(config: Config) -> Iterator[str]:
    """Legal settings of these sections that may surprise, one sentence each."""
    if config.scheduling.mode != "direct":
        yield from _queue_remarks(config)
        yield from _depth_remarks(config)
    yield from _budget_remarks(config)
    yield from _answer_remarks(config)


def _queue_remarks(config: Config) -> Iterator[str]:
    mode, queue, predictor = config.scheduling.mode, config.scheduling.queue, config.predictor
    if config.gateways > 1:
        yield (
            f"scheduling.mode {mode} with gateways {config.gateways}: each gateway orders its own requests only, and the"
            " gain of late binding is lost; direct is the mode for several gateways"
        )
    for group in config.groups:
        if group.coupled:
            yield f"group {group.name} is coupled: scheduling.mode {mode} was not tested with ranks that step together"
    if predictor is None:
        yield (
            f"scheduling.mode {mode} without predictor.prefill_ms is not calibrated: order and gate count prompt tokens"
            " instead of time"
        )
    elif predictor.step_ms is None and queue.gate_ms is None:
        yield "predictor.step_ms is not set: gate_steps counts in each rank's measured time between batches"
    if queue.max_wait_s is None:
        yield (
            "scheduling.queue.max_wait_s null: nothing ends the wait of requests that others keep overtaking, such as"
            " those of low priority"
        )
    if queue.hold_until_queued is not None:
        yield (
            f"scheduling.queue.hold_until_queued {queue.hold_until_queued} is for tests: nothing is sent before that"
            " many are queued"
        )


def _depth_remarks(config: Config) -> Iterator[str]:
    admission, scheduling = config.admission, config.scheduling
    depth = admission.max_queue_depth
    if depth > admission.max_in_flight:
        yield (
            f"admission.max_queue_depth {depth} is never reached: max_in_flight {admission.max_in_flight} counts queued"
            " sequences too"
        )
    for level in scheduling.queue.levels:
        if level.max_depth is not None and level.max_depth > depth:
            yield (
                f"scheduling.queue.levels: max_depth {level.max_depth} of priority {level.priority} is never reached:"
                f" admission.max_queue_depth is {depth}"
            )
    if scheduling.mode == "batch" and depth < scheduling.batch.max_requests:
        yield (
            f"scheduling.batch.max_requests {scheduling.batch.max_requests} is never reached: admission.max_queue_depth"
            f" is {depth}"
        )


def _budget_remarks(config: Config) -> Iterator[str]:
    admission, context = config.admission, config.model.max_context_tokens
    for name in ("max_prompt_tokens", "max_kv_tokens"):
        limit: int | None = getattr(admission, name)
        if limit is not None and limit < context:
            yield (
                f"admission.{name} {limit} is below model.max_context_tokens {context}: single requests above it are"
                " always refused"
            )
    for group in config.groups:
        most = group.budget.max_requests
        if most is not None and most < group.ranks:
            yield f"group {group.name}: budget.max_requests {most} leaves some of its {group.ranks} ranks idle"
    for tenant, settings in admission.tenants.named.items():
        for name in ("max_in_flight", "max_prompt_tokens", "max_kv_tokens", "max_queue_depth"):
            most, total = getattr(settings, name), getattr(admission, name)
            if most is not None and total is not None and most > total:
                yield f"admission.tenants.named.{tenant}: {name} {most} is never reached: admission.{name} is {total}"


def _answer_remarks(config: Config) -> Iterator[str]:
    last = config.slo.ttft[-1].max_prompt_tokens if config.slo.ttft else None
    if last is not None and last < config.model.max_context_tokens:
        yield f"slo.ttft: prompts of more than {last} tokens have no objective"
    if config.ordering == "preserve" and config.gateways > 1:
        yield f"ordering preserve with gateways {config.gateways}: each gateway keeps the order of its own answers only"
