"""Rules on what happens between a request's arrival and its rank, and on the order of answers.

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
from gateway.core.presets import PRESETS, resolve
from gateway.core.response_cache import SMALLEST_BYTES

_QUEUE: Loc = ("scheduling", "queue")
_BATCH: Loc = ("scheduling", "batch")
_PREDICTED = frozenset({"queued_ms", "prefill_ms", "step_ms", "mean_out_tokens"})
"""Variables of cost formulas that mean nothing without a prefill model."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LEAST_PRIORITY, _MOST_PRIORITY = -(2**31), 2**31 - 1
"""What a request's field can carry."""
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
    yield from _check_response_cache(config)


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
    elif queue.gate_ms is not None:
        for name in ("gate_steps", "gate_tokens"):
            if getattr(queue, name) != getattr(defaults, name):
                yield Problem((*_QUEUE, name), f"'{name}' has no effect with gate_ms; set one of them", at_key=True)
    if not queue.hold_ratio and config.scheduling.mode != "direct":
        why = "no hold_ratio; set scheduling.queue.hold_ratio"
        yield from _without_effect(_QUEUE, queue, defaults, why, only=("max_hold_s",))
    if queue.order == "hrrn" and queue.hold_ratio:
        yield Problem(
            (*_QUEUE, "hold_ratio"),
            "order hrrn keeps no request back: its ratio grows while it waits; set hold_ratio: 0 or another order",
            at_key=True,
        )
    if queue.hold_ratio and not _has_costs(config):
        yield Problem(
            (*_QUEUE, "hold_ratio"),
            "'hold_ratio' compares costs, and this policy has none; set policy.cost or another preset, or leave it out",
            at_key=True,
        )
    yield from _check_time_outs(queue)
    yield from _check_hold_until(config)
    yield from _check_priorities((*_QUEUE, "levels"), [level.priority for level in queue.levels])


def _has_costs(config: Config) -> bool:
    try:
        return resolve(config.policy).formula is not None
    except ValueError:
        return True  # that it is no policy is said elsewhere


def _check_time_outs(queue: Queue) -> Iterator[Problem]:
    """What is done after a time-out needs one. A call's own is none of the queue's: it ends the call."""
    why = "has no effect without a time-out; set timeout_s, or leave it out"
    inherited = (None, queue.timeout_action)
    uses_own = any(level.timeout_s is not None and level.timeout_action in inherited for level in queue.levels)
    if queue.timeout_action != Queue().timeout_action and queue.timeout_s is None and not uses_own:
        yield Problem((*_QUEUE, "timeout_action"), f"'timeout_action' {why}", at_key=True)
    for number, level in enumerate(queue.levels):
        if level.timeout_action not in inherited and level.timeout_s is None and queue.timeout_s is None:
            yield Problem((*_QUEUE, "levels", number, "timeout_action"), f"'timeout_action' {why}", at_key=True)


def _check_hold_until(config: Config) -> Iterator[Problem]:
    number, admission = config.scheduling.queue.hold_until_queued, config.admission
    for name in ("max_queue_depth", "max_in_flight"):
        limit: int = getattr(admission, name)
        if number is not None and number > limit:
            yield Problem(
                (*_QUEUE, "hold_until_queued"),
                f"{number} are never queued, so nothing would ever be sent: admission.{name} is {limit}",
            )


def _check_priorities(loc: Loc, priorities: list[int]) -> Iterator[Problem]:
    for number, priority in enumerate(priorities):
        if not _LEAST_PRIORITY <= priority <= _MOST_PRIORITY:
            yield Problem((*loc, number, "priority"), f"no request has priority {priority}: it must fit 32 bits")
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
    elif slo.ttft:
        longest = longest_objective_ms(slo)
        if slo.margin_ms >= longest:
            yield Problem(
                ("slo", "margin_ms"),
                f"{slo.margin_ms:g} ms leave nothing of the longest objective, {longest:g} ms: no request would be in time",
            )
    yield from _check_objectives(slo)
    yield from _check_priorities(("slo", "priorities"), [item.priority for item in slo.priorities])


def longest_objective_ms(slo: Slo) -> float:
    """The longest objective that a request can have; priorities that are not listed have a factor of 1."""
    return max(bucket.ttft_ms for bucket in slo.ttft) * max(1.0, *(item.factor for item in slo.priorities), 0.0)


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


def _check_response_cache(config: Config) -> Iterator[Problem]:
    cache = config.response_cache
    for name in ("max_bytes", "max_entry_bytes") if cache is not None else ():
        limit: int = getattr(cache, name)
        if limit < SMALLEST_BYTES:
            yield Problem(
                ("response_cache", name), f"{limit} bytes hold no answer: the smallest takes {SMALLEST_BYTES}"
            )
