"""Error cases of the configuration: text with a mark where the error must point."""

from typing import NamedTuple

MARK = "§"

BASE = """\
version: 1
model: {name: m, max_context_tokens: 4096, vocab_size: 100}
groups:
  - name: a
    protocol: vllm
    handshake: tcp://127.0.0.1:5570
    ranks: 2
"""
"""The shortest valid configuration."""


class Marked(NamedTuple):
    """Text without its mark, and where the mark stood (from 1)."""

    text: str
    line: int
    column: int


def unmark(text: str) -> Marked:
    """Take the one mark out of a text."""
    before, mark, after = text.partition(MARK)
    assert mark, "the case has no mark"
    assert MARK not in after, "the case has two marks"
    return Marked(before + after, before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)
