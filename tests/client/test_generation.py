"""What has arrived for a request is counted off once: when it is read, or when nobody will read it."""

import asyncio

import grpc
import pytest

from gateway.client.errors import GenerationError
from gateway.client.generation import Generation
from gateway.client.outputs import Outputs
from gateway.v1 import gateway_pb2
from tests.support.calls import make_request

ABORTED = GenerationError(grpc.StatusCode.ABORTED, "aborted", reason="ABORTED")


def output(tokens, *, is_last=False):
    finish = gateway_pb2.Finish() if is_last else None
    return gateway_pb2.GenerateResponse(request_id="a", token_ids=range(tokens), finish=finish)


class Site:
    """A generation, what the stream would have of it, and how many tokens it has counted off."""

    def __init__(self):
        self.read_tokens = 0
        self.aborts = 0
        self.outputs = Outputs(make_request([1], 8, request_id="a"), self._on_read)
        self.generation = Generation(self.outputs, self._on_abort)

    def _on_read(self, tokens):
        self.read_tokens += tokens

    def _on_abort(self, outputs):
        self.aborts += 1


async def test_what_comes_after_leaving_counts_as_read():
    site = Site()
    site.outputs.put(output(3))
    site.outputs.put(output(4))
    async with site.generation:
        await anext(site.generation)
        assert site.read_tokens == 3
    assert (site.aborts, site.read_tokens) == (1, 7)
    site.outputs.put(output(5))
    site.outputs.put(output(6, is_last=True))
    assert site.read_tokens == 18
    assert site.generation.is_ended
    assert await site.generation.tokens() == []


async def test_who_waits_for_an_output_when_it_is_left_hears_of_the_end():
    site = Site()
    waiting = asyncio.create_task(site.generation.tokens())
    await asyncio.sleep(0)
    async with site.generation:
        pass
    site.outputs.put(output(2))
    site.outputs.fail(ABORTED)
    with pytest.raises(GenerationError, match="ABORTED"):
        await waiting
    assert site.read_tokens == 2


async def test_a_reader_that_is_cancelled_loses_nothing():
    site = Site()
    waiting = asyncio.create_task(anext(site.generation))
    await asyncio.sleep(0)
    site.outputs.put(output(2))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (site.read_tokens, len((await anext(site.generation)).token_ids), site.read_tokens) == (0, 2, 2)


@pytest.mark.parametrize("is_ended", [False, True])
async def test_one_that_is_let_go_of_counts_as_read(is_ended):
    site = Site()
    site.outputs.put(output(3, is_last=is_ended))
    del site.generation
    await asyncio.sleep(0)
    assert (site.aborts, site.read_tokens) == (0, 3)
    if not is_ended:
        site.outputs.put(output(4))
        assert site.read_tokens == 7


async def test_one_that_only_its_reader_holds_is_not_let_go_of():
    site = Site()
    reading = asyncio.create_task(site.generation.tokens())
    del site.generation
    await asyncio.sleep(0)
    site.outputs.put(output(2))
    await asyncio.sleep(0)
    site.outputs.put(output(3, is_last=True))
    assert await reading == [0, 1, 0, 1, 2]


def test_it_may_be_let_go_of_after_its_loop():
    """What `__del__` raises fails the test: pytest warns of it, and warnings are errors."""

    async def make():
        return Site()

    loop = asyncio.new_event_loop()
    site = loop.run_until_complete(make())
    loop.close()
    site.outputs.put(output(3))
    del site.generation
    assert site.read_tokens == 0
