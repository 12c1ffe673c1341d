"""What the router asks for by itself: health and load."""

import pytest

from tests.support.peers import RANKS, until

pytestmark = pytest.mark.peers


def test_probes_succeed(router):
    def probes(result):
        return router.metric("smg_worker_health_checks_total", result=result)

    succeeded, failed = probes("success"), probes("failure")
    until(lambda: probes("success") >= succeeded + 2, "two more health probes")
    assert probes("failure") == failed
    assert len(router.healthy_engines()) == 1


def test_the_polled_load_is_the_ranks(site, router):
    until(lambda: router.reported_running() == {router.engine_url: {0: 0, 1: 0}}, "a poll that shows idle ranks")
    with router.stream("/generate", {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4000}}) as stream:
        next(iter(stream))
        (busy,) = [rank for rank, count in enumerate(site.in_flight()) if count]
        wanted = {router.engine_url: {rank: int(rank == busy) for rank in range(RANKS)}}
        until(lambda: router.reported_running() == wanted, f"a poll that shows work on rank {busy} only")
    # A rank says nothing after its last row, and the last thing that it said was "busy".
    until(lambda: router.reported_running() == {router.engine_url: {0: 0, 1: 0}}, "a poll that shows idle ranks again")


def test_every_rank_of_a_dp_aware_router_is_polled(site, dp_router):
    urls = [f"{dp_router.engine_url}@{rank}" for rank in range(RANKS)]
    until(lambda: sorted(dp_router.reported_running()) == urls, "a poll of every rank")
    assert all(set(loads) == set(range(RANKS)) for loads in dp_router.reported_running().values())


def test_a_lost_rank_takes_the_gateway_out_and_its_return_brings_it_back(site, router):
    site.ranks("kill", rank=1)
    try:
        until(lambda: site.ready_ranks() == [0], "rank 1 to be LOST")
        until(lambda: not router.healthy_engines(), "the router to see fewer than min_ready ranks")
    finally:
        site.ranks("restart", rank=1)
        site.wait_ready()
    until(lambda: router.healthy_engines() == [router.engine_url], "the router to see a healthy gateway")
    (answer,) = router.post("/generate", {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}})
    assert answer["output_ids"] == site.expected([5, 6, 7], 4)
