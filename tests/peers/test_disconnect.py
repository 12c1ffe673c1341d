"""A client that drops its HTTP connection stops the work at the rank, not only its own stream.

Each answer would take about 25 s, far longer than the rank is given to hear of the abort before it could
have finished on its own.
"""

import pytest

from tests.support.peers import RANKS, until

pytestmark = pytest.mark.peers
LENGTH = 4000
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": LENGTH},
    "/generate": {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": LENGTH}},
}


class Abandoned:
    """What a request that is running now leaves once its client is gone."""

    def __init__(self, site):
        self._site = site
        self._before = site.ranks()

    def running(self, count):
        """Wait for `count` sequences with tokens on the ranks; returns how many each rank has."""

        def live():
            states = self._site.ranks()
            is_begun = all(
                now["tokens_generated"] > before["tokens_generated"]
                for now, before in zip(states, self._before, strict=True)
                if now["live"]
            )
            counts = [len(state["live"]) for state in states]
            return counts if sum(counts) == count and is_begun else None

        counts = until(live, f"{count} running sequences")
        assert self._site.in_flight() == counts
        return counts

    def check(self, running):
        """Every rank was told to abort what it ran, holds nothing and had made but a part of it."""
        until(lambda: not any(state["live"] for state in self._site.ranks()), "the ranks to drop the request")
        states = self._site.ranks()
        aborted = [
            now["aborts_received"] - old["aborts_received"] for now, old in zip(states, self._before, strict=True)
        ]
        tokens = sum(
            now["tokens_generated"] - old["tokens_generated"] for now, old in zip(states, self._before, strict=True)
        )
        assert aborted == running
        assert tokens < sum(running) * LENGTH
        until(lambda: self._site.in_flight() == [0] * RANKS, "the charges to be released")
        (line,) = [line for line in self._site.log_lines() if line["event"] == "request_ended"][-1:]
        assert line["outcome"] in ("ABORTED", "CANCELLED")
        assert line["completion_tokens"] < sum(running) * LENGTH


@pytest.fixture
def abandoned(site):
    return Abandoned(site)


@pytest.mark.parametrize("path", BODIES)
def test_a_dropped_stream_reaches_the_rank_as_abort(router, abandoned, path):
    with router.stream(path, BODIES[path]) as stream:
        next(iter(stream))
        running = abandoned.running(1)
        stream.drop()
    abandoned.check(running)


@pytest.mark.parametrize("path", BODIES)
def test_a_dropped_unary_call_reaches_the_rank_as_abort(router, abandoned, path):
    connection = router.send(path, BODIES[path])
    running = abandoned.running(1)
    connection.close()
    abandoned.check(running)


def test_every_choice_of_a_dropped_stream_is_aborted(router, abandoned):
    path = "/v1/chat/completions"
    with router.stream(path, BODIES[path] | {"n": 3}) as stream:
        next(iter(stream))
        running = abandoned.running(3)
        stream.drop()
    assert all(running)  # on both ranks
    abandoned.check(running)


def test_a_dropped_pinned_stream_is_aborted_on_its_rank(dp_router, abandoned):
    with dp_router.stream("/generate", BODIES["/generate"]) as stream:
        next(iter(stream))
        running = abandoned.running(1)
        stream.drop()
    abandoned.check(running)
