"""With `--dp-aware` the router chooses the rank: the gateway shows its ranks and honours every pin."""

from collections import Counter

import pytest

from tests.support.peers import RANKS

pytestmark = pytest.mark.peers
PARAMS = {"max_new_tokens": 6}


def test_every_rank_is_registered(family, dp_router):
    engines = dp_router.engines()
    assert sorted(engines) == [f"{dp_router.engine_url}@{rank}" for rank in range(RANKS)]
    assert {engine["dp_rank"] for engine in engines.values()} == set(range(RANKS))
    assert {(engine["dp_size"], engine["runtime_type"]) for engine in engines.values()} == {(RANKS, family)}


def test_requests_go_to_the_rank_that_the_router_chose(site, dp_router):
    before = [rank["adds_received"] for rank in site.ranks()]
    wanted = site.expected([3, 2, 1], 6)
    request_ids = []
    for number in range(4 * RANKS):
        if number % 2:
            (answer,) = dp_router.post("/generate", {"input_ids": [3, 2, 1], "sampling_params": PARAMS})
            assert answer["output_ids"] == wanted
            request_ids.append(answer["meta_info"]["id"])
        else:
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6}
            with dp_router.stream("/v1/chat/completions", body) as stream:
                events = list(stream)
            request_ids.append(events[0]["id"])
    pins = Counter()
    for request_id in request_ids:
        (decision,) = site.decisions(request_id)
        assert decision["pinned_rank"] == decision["rank"] == site.ended(request_id)["rank"]
        pins[decision["rank"]] += 1
    received = [rank["adds_received"] - count for rank, count in zip(site.ranks(), before, strict=True)]
    assert pins == dict.fromkeys(range(RANKS), 4)  # the router's policy is round robin
    assert received == [4] * RANKS


def test_a_pin_outweighs_the_gateways_own_choice(site, router, dp_router):
    body = {"input_ids": [1, 2, 3], "sampling_params": PARAMS}
    with router.stream("/generate", {"input_ids": [4] * 512, "sampling_params": {"max_new_tokens": 4000}}) as stream:
        next(iter(stream))
        (busy,) = [rank for rank, count in enumerate(site.in_flight()) if count]
        pinned_answers = [dp_router.post("/generate", body) for _ in range(RANKS)]
        own = router.post("/generate", body)
    pinned = [decision for answer in pinned_answers for decision in site.decisions(answer[0]["meta_info"]["id"])]
    assert sorted(decision["rank"] for decision in pinned) == list(range(RANKS))
    assert all(decision["rank"] == decision["pinned_rank"] for decision in pinned)
    assert [decision["rank"] for decision in site.decisions(own[0]["meta_info"]["id"])] == [1 - busy]


def test_all_choices_of_a_request_go_to_its_rank(site, dp_router):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "n": 3}
    answer = dp_router.post("/v1/chat/completions", body)
    decisions = site.decisions(answer["id"])
    assert len(decisions) == 3
    assert len({(decision["rank"], decision["pinned_rank"]) for decision in decisions}) == 1
    assert decisions[0]["rank"] == decisions[0]["pinned_rank"]
