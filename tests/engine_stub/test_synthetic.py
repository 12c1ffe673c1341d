import pytest

from engine_stub.backend import registry
from engine_stub.backend.synthetic import AHEAD, StepTime, SyntheticBackend
from engine_stub.config import Model, StubConfig
from engine_stub.scheduler import Scheduler, SchedulerConfig
from engine_stub.tokens import expected_logprob
from tests.support.stub_scheduler import VOCAB_SIZE, Driver, expected, request


def test_step_time_of_a_prefill_and_of_its_decodes():
    """Closed form for one request: prompt 100, then decodes with 100, 101, ... stored positions."""
    coefficients = StepTime(
        fixed_ms=5.0,
        per_prefill_token_us=10.0,
        per_decode_row_us=20.0,
        per_context_token_ns=1000.0,
        per_prefill_context_ns=100.0,
    )
    scheduler = Scheduler(SchedulerConfig())
    backend = SyntheticBackend(vocab_size=VOCAB_SIZE, step_time=coefficients)
    scheduler.submit(request("a", prompt_len=100, max_tokens=3))
    durations = []
    while (plan := scheduler.plan()) is not None:
        output = backend.forward(plan)
        durations.append(output.duration_ms)
        scheduler.commit(plan, output)
    assert durations == pytest.approx([5 + 1.0 + 100 * 50.5 * 1e-4, 5 + 0.02 + 0.1, 5 + 0.02 + 0.101])


def test_chunking_a_prompt_does_not_change_its_quadratic_part():
    whole, chunked = Driver(), Driver(token_budget=7)
    for driver in (whole, chunked):
        driver.submit(request("a", prompt_len=40, max_tokens=1))
        driver.run()
    assert len(chunked.plans) == 6
    parts = [sum(plan.prefill_context for plan in driver.plans) for driver in (whole, chunked)]
    assert parts == [40 * 41 / 2] * 2


def test_default_coefficients_are_the_documented_estimate():
    assert StepTime() == StepTime(
        fixed_ms=6.5,
        per_prefill_token_us=30.0,
        per_decode_row_us=20.0,
        per_context_token_ns=49.0,
        per_prefill_context_ns=1.05,
    )


def test_streams_longer_than_one_refill_have_no_seam():
    driver = Driver()
    req = request("a", max_tokens=3 * AHEAD + 5)
    driver.submit(req)
    driver.run()
    assert driver.tokens["a"] == expected(req)


def test_asking_again_for_the_same_step_gives_the_same_tokens():
    scheduler = Scheduler(SchedulerConfig())
    backend = SyntheticBackend(vocab_size=VOCAB_SIZE)
    scheduler.submit(request("a", max_tokens=200))
    for _ in range(AHEAD + 2):
        plan = scheduler.plan()
        first = backend.forward(plan)
        assert backend.forward(plan) == first
        scheduler.commit(plan, first)


def test_logprobs_come_only_when_asked_for():
    scheduler = Scheduler(SchedulerConfig())
    backend = SyntheticBackend(vocab_size=VOCAB_SIZE)
    scheduler.submit(request("plain"))
    plan = scheduler.plan()
    output = backend.forward(plan)
    assert (output.decode_logprobs, output.prefill_logprobs) == (None, None)
    scheduler.commit(plan, output)
    scheduler.submit(request("asks", logprobs=2))
    plan = scheduler.plan()
    output = backend.forward(plan)
    assert output.decode_logprobs == [None]
    ((token, value), second) = output.prefill_logprobs[0]
    assert (token, value) == (output.prefill_tokens[0], expected_logprob(token))
    assert second[1] == value - 0.25
    scheduler.commit(plan, output)
    plan = scheduler.plan()
    output = backend.forward(plan)
    assert [top and top[0][0] for top in output.decode_logprobs] == [None, output.decode_tokens[1]]


def test_excluded_ids_are_the_eos_ids_unless_named():
    assert Model(eos_token_ids=(1, 2)).never_emitted == (1, 2)
    assert Model(eos_token_ids=(1, 2), excluded_token_ids=()).never_emitted == ()
    assert Model(excluded_token_ids=(7,)).never_emitted == (7,)


def test_an_unknown_backend_says_what_there_is():
    with pytest.raises(registry.BackendError, match=r"'gpu' is not known; available: .*synthetic"):
        registry.create("gpu", StubConfig())
