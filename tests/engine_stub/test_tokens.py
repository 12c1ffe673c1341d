import itertools
import zlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_stub.tokens import (
    checksum,
    expected_logprob,
    expected_tokens,
    expected_top_logprobs,
    generate,
    usable_ids,
)

PROMPTS = st.lists(st.integers(0, 31_999), min_size=1, max_size=40)


def by_definition(prompt, seed, count, vocab_size):
    """The documented formula, spelled out over the whole text for every token."""
    text = list(prompt)
    for _ in range(count):
        state = zlib.crc32(b"".join(token.to_bytes(4, "little") for token in text))
        salt = (seed * 0x165667B19E3779F9) % 2**52
        text.append(((state * 0x9E3779B1 // 2**12) ^ (len(text) + salt)) % vocab_size)
    return text[len(prompt) :]


def test_the_stream_is_pinned():
    """The stream is public: a change breaks every client that checks its bytes."""
    assert expected_tokens([1, 2, 3], None, 6, 32_000) == [5445, 545, 2090, 13669, 10658, 31106]
    assert by_definition([1, 2, 3], 0, 6, 32_000) == [5445, 545, 2090, 13669, 10658, 31106]


@given(PROMPTS, st.integers(-(2**63), 2**63), st.integers(1, 200_000))
def test_the_stream_follows_its_definition(prompt, seed, vocab_size):
    assert expected_tokens(prompt, seed, 12, vocab_size) == by_definition(prompt, seed, 12, vocab_size)


@given(PROMPTS, st.one_of(st.none(), st.integers(-(2**63), 2**63)), st.integers(0, 30), st.integers(0, 30))
def test_resuming_with_prompt_and_emitted_tokens_continues_the_stream(prompt, seed, first, rest):
    whole = expected_tokens(prompt, seed, first + rest, 32_000)
    assert expected_tokens([*prompt, *whole[:first]], seed, rest, 32_000) == whole[first:]


@given(PROMPTS, st.integers(1, 40))
def test_generating_in_pieces_gives_the_same_tokens(prompt, piece):
    usable, skipped = usable_ids(5000, (7, 9))
    state, position, tokens = checksum(prompt), len(prompt), []
    while len(tokens) < 100:
        more, state = generate(state, position + len(tokens), piece, 3, usable, skipped)
        tokens += more
    assert tokens[:100] == expected_tokens(prompt, 3, 100, 5000, (7, 9))


@given(PROMPTS, st.integers(0, 31_999))
def test_every_token_of_the_prompt_matters(prompt, token):
    if prompt[0] != token:
        changed = [token, *prompt[1:]]
        assert expected_tokens(changed, None, 8, 2**31) != expected_tokens(prompt, None, 8, 2**31)


@pytest.mark.parametrize(("seed", "same"), [(None, True), (0, True), (1, False), (-1, False)])
def test_no_seed_and_seed_zero_are_one_stream(seed, same):
    assert (expected_tokens([5], seed, 16, 50_000) == expected_tokens([5], None, 16, 50_000)) is same


def test_excluded_ids_never_come_and_all_others_do():
    counts = Counter(expected_tokens([1], None, 4000, 16, excluded=(0, 7, 15, 99)))
    assert set(counts) == set(range(16)) - {0, 7, 15}
    assert min(counts.values()) > 200


def test_excluding_every_id_is_refused():
    with pytest.raises(ValueError, match="vocab_size 2"):
        usable_ids(2, (0, 1))


def test_a_long_stream_does_not_run_in_circles():
    tokens = expected_tokens([1], None, 100_000, 128_256)
    assert len(set(itertools.pairwise(tokens))) > 99_990


def test_logprobs_are_exact_and_ordered():
    top = expected_top_logprobs(99, 3, 100)
    assert top == [(99, expected_logprob(99)), (0, expected_logprob(99) - 0.25), (1, expected_logprob(99) - 0.5)]
    assert all(-4 < expected_logprob(token) <= 0 and expected_logprob(token) * 256 % 1 == 0 for token in range(500))
