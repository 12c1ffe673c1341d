"""Choosing a token from logits. Draws are deterministic, so frequencies over many positions are too."""

import math
from collections import Counter

import numpy as np
import pytest

from engine_stub.model import sampling
from engine_stub.scheduler.sequence import GREEDY, Sampling
from tests.support.models import item


def logits_of(*probabilities):
    return np.log(np.array(probabilities))


def choose(logits, position=0, excluded=(), seed=1, **fields):
    settings = {"sampling": Sampling(), "seed": seed} | fields
    return sampling.choose(np.array(logits, dtype=np.float64), item([0], position - 1, [0], **settings), excluded)[0]


def drawn(logits, count=500, **settings):
    """Relative frequencies over positions."""
    fields = {"sampling": Sampling(**settings)}
    counts = Counter(choose(logits, position, **fields) for position in range(1, count + 1))
    return {token: number / count for token, number in sorted(counts.items())}


def test_greedy_takes_the_lowest_of_equals():
    assert choose([0.0, 2.0, 1.0, 2.0], sampling=GREEDY) == 1


def test_draws_follow_the_distribution():
    shares = drawn(logits_of(0.5, 0.3, 0.15, 0.05), 4000)
    for token, probability in enumerate((0.5, 0.3, 0.15, 0.05)):
        assert shares[token] == pytest.approx(probability, abs=4 * math.sqrt(probability / 4000))


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_sharpens_and_flattens(temperature):
    weights = [probability ** (1 / temperature) for probability in (0.6, 0.3, 0.1)]
    shares = drawn(logits_of(0.6, 0.3, 0.1), 2000, temperature=temperature)
    for token, weight in enumerate(weights):
        assert shares[token] == pytest.approx(weight / sum(weights), abs=0.04)


def test_a_tiny_temperature_is_greedy():
    assert drawn([0.0, 1.0, 0.999], count=200, temperature=1e-8) == {1: 1.0}


def test_top_k_keeps_the_best_and_of_equals_the_lowest_ids():
    assert set(drawn(logits_of(0.1, 0.4, 0.3, 0.2), top_k=2)) == {1, 2}
    assert set(drawn([0.0, 1.0, 1.0, 1.0], top_k=2)) == {1, 2}
    assert set(drawn(logits_of(0.1, 0.4, 0.3, 0.2), top_k=9)) == {0, 1, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    assert set(drawn(logits_of(0.1, 0.4, 0.3, 0.2), top_p=0.69)) == {1, 2}
    assert set(drawn(logits_of(0.1, 0.4, 0.3, 0.2), top_p=0.71)) == {1, 2, 3}
    assert set(drawn(logits_of(0.1, 0.4, 0.3, 0.2), top_p=1e-9)) == {1}


def test_min_p_is_relative_to_the_best():
    assert set(drawn(logits_of(0.1, 0.4, 0.3, 0.2), min_p=0.6)) == {1, 2}
    assert set(drawn(logits_of(0.1, 0.4, 0.3, 0.2), min_p=1.0)) == {1}


def test_top_p_is_taken_of_what_top_k_left():
    """Of 0.4 and 0.3 the first is 0.571 of the whole; of all four it is 0.4."""
    assert set(drawn(logits_of(0.1, 0.4, 0.3, 0.2), top_k=2, top_p=0.5)) == {1}
    assert set(drawn(logits_of(0.1, 0.4, 0.3, 0.2), top_p=0.5)) == {1, 2}


def test_repetition_penalty_counts_prompt_and_output_and_lowers_either_sign():
    fields = {"sampling": Sampling(temperature=0, repetition_penalty=2.0), "prompt_ids": [0], "output_ids": [1]}
    assert choose([3.0, 2.9, 1.6], **fields) == 2
    assert choose([-1.0, -1.1, -1.9], **fields) == 2
    assert choose([3.0, 2.9, 1.4], **fields) == 0


def test_presence_and_frequency_count_the_output_only():
    presence = {"sampling": Sampling(temperature=0, presence_penalty=1.0)}
    assert choose([2.0, 1.5], prompt_ids=[0, 0], **presence) == 0
    assert choose([2.0, 1.5], output_ids=[0, 0], **presence) == 1
    assert choose([3.0, 1.5], output_ids=[0, 0], **presence) == 0
    frequency = {"sampling": Sampling(temperature=0, frequency_penalty=1.0)}
    assert choose([3.0, 1.5], output_ids=[0], **frequency) == 0
    assert choose([3.0, 1.5], output_ids=[0, 0], **frequency) == 1


def test_banned_and_excluded_ids_are_never_chosen():
    assert choose([3.0, 2.0, 1.0], sampling=GREEDY, banned_ids=frozenset({0})) == 1
    assert choose([3.0, 2.0, 1.0], sampling=GREEDY, banned_ids=frozenset({0}), excluded=(1,)) == 2
    with pytest.raises(ValueError, match="every id is banned"):
        choose([3.0, 2.0], sampling=GREEDY, banned_ids=frozenset({0}), excluded=(1,))
    with pytest.raises(ValueError, match="not numbers"):
        choose([3.0, math.nan])


def test_a_draw_is_keyed_by_seed_and_position():
    logits = np.zeros(50)
    by_seed = {tuple(choose(logits, position, seed=seed) for position in range(1, 30)) for seed in range(20)}
    assert len(by_seed) == 20
    again = [choose(logits, position, seed=7) for position in range(29, 0, -1)]
    assert again[::-1] == [choose(logits, position, seed=7) for position in range(1, 30)]
    assert choose(logits, 5, seed=None) == choose(logits, 5, seed=0)
    assert choose(logits, 5, seed=-3) == choose(logits, 5, seed=2**64 - 3)


def test_draws_are_uniform_bits():
    bits = [sampling.draw(1, position) for position in range(2000)]
    assert all(0 <= value < 2**64 for value in bits)
    for place in (0, 31, 63):
        assert sum(value >> place & 1 for value in bits) == pytest.approx(1000, abs=100)


def test_a_draw_on_the_border_belongs_to_the_upper_candidate(monkeypatch):
    """Two equal candidates share the 64-bit draws in halves."""
    for bits, token in ((0, 0), (2**63 - 1, 0), (2**63, 1), (2**64 - 1, 1)):
        monkeypatch.setattr(sampling, "draw", lambda seed, position, bits=bits: bits)
        assert choose([1.0, 1.0]) == token


def test_logprobs_are_those_of_the_untouched_row():
    logits = np.array([0.3, -1.2, 2.5, 0.0, 1.1])
    true = logits - np.log(np.exp(logits).sum())
    chosen = item([0], 0, [0], sampling=Sampling(temperature=0), logprobs=3, banned_ids=frozenset({2}))
    token, top = sampling.choose(logits, chosen)
    assert token == 4
    assert [index for index, _ in top] == [4, 2, 0]
    assert [value for _, value in top] == pytest.approx([true[4], true[2], true[0]], abs=2**-20)
    assert all(value * 2**20 == round(value * 2**20) for _, value in top)


@pytest.mark.parametrize(("count", "length"), [(0, 1), (1, 1), (2, 2), (99, 5)])
def test_logprobs_have_as_many_entries_as_asked_for_and_at_least_the_chosen_one(count, length):
    top = sampling.top_logprobs(np.array([0.0, 3.0, 1.0, 2.0, -1.0]), 1, count)
    assert len(top) == length
    assert top[0][0] == 1
    assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)


def test_large_vocabularies_keep_their_sums():
    """A quarter of a million equal candidates, and one that is twice as likely."""
    logits = np.zeros(250_000)
    logits[7] = math.log(2)
    tokens = [choose(logits, position) for position in range(1, 60)]
    assert len(set(tokens)) > 55
    assert max(tokens) > 240_000
    assert min(tokens) < 10_000
    assert sampling.top_logprobs(logits, 7, 1)[0][1] == pytest.approx(math.log(2 / 250_001), abs=2**-20)


def test_a_wide_nucleus_is_as_wide_as_it_must_be():
    """5000 equal candidates: top-p 0.5 leaves the 2500 lowest ids, more than are looked at first."""
    tokens = {choose(np.zeros(5000), position, sampling=Sampling(top_p=0.5)) for position in range(1, 400)}
    assert max(tokens) == max(token for token in tokens if token < 2500)
    assert max(tokens) > 2300


def test_plain_items_are_those_whose_token_is_the_largest_logit():
    assert sampling.is_plain(item([0], 0, [0]))
    assert not sampling.is_plain(item([0], 0, [0], logprobs=0))
    for settings in ({}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}):
        assert not sampling.is_plain(
            item([0], 0, [0], sampling=Sampling(**({"temperature": 0.0} if settings else {}) | settings))
        )
