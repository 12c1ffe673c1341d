"""The token stream of the synthetic model: a stable function of the text so far, the same on every rank.

`token = mix(crc32(all preceding tokens), position, seed) mod usable vocabulary`, where the checksum runs
over the preceding tokens as little-endian 32-bit words (prompt and emitted tokens alike), `position` is
their number, and `mix` is a 64-bit multiply-shift with position and seed folded in. Two properties follow, and both are what clients and tests rely on:

* every byte of an answer can be checked from the prompt, the seed and the count alone;
* the stream continues: `prompt + emitted` has the same checksum and length as the state that emitted
  them, so an attempt resumed elsewhere with `prompt + emitted` goes on exactly where the first stopped.

No seed and seed 0 are the same stream; the temperature is ignored. Nothing depends on the process,
the rank, the request id or the batch.
"""

import sys
from array import array
from collections.abc import Sequence
from struct import Struct
from zlib import crc32

_SEED_MASK = (1 << 52) - 1
_SEED_FACTOR = 0x165667B19E3779F9
_CHECKSUM_FACTOR = 0x9E3779B1
_pack_token = Struct("<I").pack


def checksum(token_ids: Sequence[int], start: int = 0) -> int:
    """CRC-32 of token ids as little-endian 32-bit words, continued from `start`. Ids are 0 <= id < 2^32."""
    words = array("I", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return crc32(words.tobytes(), start)


def usable_ids(vocab_size: int, excluded: Sequence[int] = ()) -> tuple[int, tuple[int, ...]]:
    """How many ids the stream draws from, and the excluded ones in the order `generate` needs.

    Raises ValueError when nothing is left.
    """
    skipped = tuple(sorted({token for token in excluded if 0 <= token < vocab_size}))
    usable = vocab_size - len(skipped)
    if usable < 1:
        raise ValueError(f"every id below vocab_size {vocab_size} is excluded: allow at least one")
    return usable, skipped


def generate(
    state: int, position: int, count: int, seed: int | None, usable: int, skipped: tuple[int, ...]
) -> tuple[list[int], int]:
    """The next `count` tokens after `position` tokens with checksum `state`, and the checksum after them."""
    first = position + ((seed or 0) * _SEED_FACTOR & _SEED_MASK)
    tokens: list[int] = []
    for index in range(first, first + count):
        token = (state * _CHECKSUM_FACTOR >> 12 ^ index) % usable
        for excluded in skipped:
            if token >= excluded:
                token += 1
        tokens.append(token)
        state = crc32(_pack_token(token), state)
    return tokens, state


def expected_tokens(
    prompt_ids: Sequence[int], sampling_seed: int | None, count: int, vocab_size: int, excluded: Sequence[int] = ()
) -> list[int]:
    """The first `count` tokens that any rank emits for this prompt, before EOS and stop ids are applied."""
    usable, skipped = usable_ids(vocab_size, excluded)
    return generate(checksum(prompt_ids), len(prompt_ids), count, sampling_seed, usable, skipped)[0]


def expected_logprob(token: int) -> float:
    """The log probability reported with a token: a multiple of 1/256 in (-4, 0], exact in every float format."""
    return -((token * 0x9E3779B1 >> 16) % 1024) / 256


def expected_top_logprobs(token: int, count: int, vocab_size: int) -> list[tuple[int, float]]:
    """The `count` best candidates with the chosen token first: (token id, logprob), each 1/4 below the one before."""
    best = expected_logprob(token)
    return [((token + rank) % vocab_size, best - rank / 4) for rank in range(count)]
