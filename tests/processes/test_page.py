"""The page while processes end, with processes that the test plays."""

import asyncio

import pytest

from gateway.processes import exposition
from gateway.processes.page import MergedPage
from tests.processes.test_plan import config_of
from tests.support.fake_children import FakeChild

WAIT_S = 20.0


def counted(count):
    return f"# HELP rankgate_x_total X.\n# TYPE rankgate_x_total counter\nrankgate_x_total {count}\n"


@pytest.fixture
async def children():
    made = [FakeChild(number, {}) for number in range(2)]
    for child, count in zip(made, (2, 3), strict=True):
        await child.start({})
        child.page = counted(count)
    return made


async def total(page):
    """A scrape, as one of the server's threads does it."""
    families = await asyncio.wait_for(asyncio.to_thread(lambda: list(page.collect())), WAIT_S)
    (family,) = [family for family in families if family.name == "rankgate_x"]
    return sum(sample.value for sample in family.samples)


async def end(page, child):
    """As the supervisor does."""
    child.kill()
    await child.wait()
    page.retire(child.number)


async def test_what_a_process_had_counted_stays(children):
    page = MergedPage(config_of("vllm"), children)
    assert await total(page) == 5
    for child in children:
        await end(page, child)
        assert await total(page) == 5
    await children[1].start({})
    children[1].page = counted(1)
    assert await total(page) == 6
    await end(page, children[1])
    assert await total(page) == 6


@pytest.mark.parametrize("already", [False, True])
async def test_a_process_that_ends_during_a_scrape_counts_once(children, already, monkeypatch):
    page = MergedPage(config_of("vllm"), children)
    assert await total(page) == 5
    if already:
        await end(page, children[0])
    loop, read = asyncio.get_running_loop(), exposition.read

    def read_late(pages):
        """The scrape's thread has the pages, and has added up nothing yet."""
        monkeypatch.setattr(exposition, "read", read)
        asyncio.run_coroutine_threadsafe(end(page, children[1]), loop).result(WAIT_S)
        return read(pages)

    monkeypatch.setattr(exposition, "read", read_late)
    assert await total(page) == 5
    assert await total(page) == 5, "and from then on"
