"""The check at the end of every test here: does it find what a test leaves behind?"""

import asyncio

import pytest

from engine_stub.faults import Faults
from gateway.core.events import RequestArrived
from gateway.types import Sampling
from tests.support import stack as stack_module
from tests.support.by_hand import report
from tests.support.calls import Generation, generate, make_request
from tests.support.stack import assert_quiescent, expected, running_gateway, stub_config, until

FIRST = expected([1, 2, 3], 1)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(stack_module, "WAIT_S", 0.1)


class Sink:
    """A client without a connection."""

    def flush(self, _):
        return

    def end(self, _):
        return


def submit(stack):
    arrived = RequestArrived(
        client_key="c", request_id="r", prompt_token_ids=[1, 2, 3], sampling=Sampling(max_tokens=4), sink=Sink()
    )
    return stack.gateway.driver.submit(arrived)


async def finds(stack, *texts):
    with pytest.raises(AssertionError) as caught:
        await assert_quiescent(stack)
    for text in texts:
        assert text in str(caught.value)


async def test_it_finds_a_request_that_nobody_ended(protocol, impatient):
    async with running_gateway(protocol, ranks=1, auto_step=False) as stack:
        submit(stack)
        await stack.ranks[0].wait_until(lambda: stack.ranks[0].live_ids)
        await finds(stack, "live requests: 1", "charged attempts: 1", "in_flight: [1]", "rank 0 live", "accepted and")
        (wire_id,) = stack.ranks[0].live_ids
        await report(stack, 0, [(wire_id, FIRST, "length")], None)


async def test_it_finds_a_request_that_only_the_rank_still_has(protocol, impatient):
    stub = stub_config(faults=Faults(silent=True, ignore_aborts=1))
    async with running_gateway(protocol, ranks=1, stub=stub) as stack:
        generation = Generation(stack.client(), make_request())
        await stack.ranks[0].wait_until(lambda: stack.ranks[0].live_ids)
        generation.call.cancel()
        await stack.ranks[0].wait_until(lambda: stack.ranks[0].received_aborts)
        await finds(stack, "rank 0 live")
        await stack.ranks[0].kill()
        await until(lambda: not stack.ready_ranks())


async def test_it_finds_a_task_and_a_missing_log_line(protocol, impatient):
    async with running_gateway(protocol, ranks=1) as stack:
        task = asyncio.create_task(asyncio.sleep(60))
        await generate(stack.client(), make_request())
        stack.logs.entries.clear()
        await finds(stack, "tasks", "log lines and outcomes differ")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        stack.logs.entries.append({"event": "request_ended", "outcome": "ok", "log_level": "info"})


async def test_it_finds_a_defect_that_was_only_logged(protocol, impatient):
    async with running_gateway(protocol, ranks=1) as stack:
        stack.gateway.log.error("something_broke")
        await finds(stack, "something_broke")
        stack.logs.entries.clear()


async def test_it_finds_an_exception_that_a_callback_swallowed(protocol, impatient):
    async with running_gateway(protocol, ranks=1) as stack:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(0)
        await finds(stack, "division by zero")
        stack.loop_errors.clear()


async def test_it_finds_a_request_that_is_kept_after_its_end(protocol):
    kept = []

    async def run():
        async with running_gateway(protocol, ranks=1) as stack:
            kept.append(submit(stack))
            await until(lambda: not stack.router.live_count)

    with pytest.raises(AssertionError, match="'r'"):
        await run()


async def test_a_body_that_hangs_is_ended_and_cleaned_up_after(protocol, monkeypatch):
    monkeypatch.setattr(stack_module, "BODY_S", 0.2)

    async def run():
        async with running_gateway(protocol, ranks=1, auto_step=False) as stack:
            await generate(stack.client(), make_request())

    with pytest.raises(TimeoutError):
        await run()
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()}, "the call to end with its channel")


async def test_it_runs_by_itself_and_not_after_a_failed_body(protocol, impatient):
    async def run(*, fails):
        async with running_gateway(protocol, ranks=1, auto_step=False) as stack:
            submit(stack)
            if fails:
                raise ZeroDivisionError

    with pytest.raises(AssertionError, match="live requests: 1"):
        await run(fails=False)
    with pytest.raises(ZeroDivisionError):
        await run(fails=True)
