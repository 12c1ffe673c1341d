"""Remarks on what happens between a request's arrival and its rank, and on the order of answers: legal, but surprising."""

from collections.abc import Iterator

from gateway.config.schema import Config


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
    slo = config.slo
    if slo.mode == "off" and (slo.ttft or slo.priorities) and config.scheduling.queue.order != "edf":
        yield "slo.ttft and slo.priorities are read by nothing: slo.mode is off, and scheduling.queue.order is not edf"
    if slo.mode != "off":
        for bucket in slo.ttft:
            if bucket.ttft_ms <= slo.margin_ms:
                yield (
                    f"slo.margin_ms {slo.margin_ms:g} leaves nothing of the objective of {bucket.ttft_ms:g} ms: such"
                    " requests are always late, unless their priority's factor is high enough"
                )
    last = config.slo.ttft[-1].max_prompt_tokens if config.slo.ttft else None
    if last is not None and last < config.model.max_context_tokens:
        yield f"slo.ttft: prompts of more than {last} tokens have no objective"
    if config.ordering == "preserve" and config.gateways > 1:
        yield f"ordering preserve with gateways {config.gateways}: each gateway keeps the order of its own answers only"
