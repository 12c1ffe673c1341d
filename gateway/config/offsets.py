"""Where a character of a scalar's value stands in the file.

YAML only ever adds or folds whitespace between a scalar's source and its value, apart from quotes and
escapes. So the n-th character of the value that is not whitespace is the n-th such character of the
source, in every style (plain, quoted, literal, folded, one line or many).
"""

import re
from collections.abc import Iterator

_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)+")
_BLOCK_HEADER = re.compile(r"[|>][^\n\r]*")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|\r\n|.)", re.DOTALL)
_WHITESPACE_ESCAPES = frozenset([r"\t", r"\n", r"\r", r"\v", r"\f", r"\N", r"\_", r"\L", r"\P"]) | {
    "\\ ",
    "\\\t",
    "\\\n",
    "\\\r",
    "\\\r\n",
}


def source_index(text: str, start: int, end: int, style: str | None, value: str, offset: int) -> int:
    """Index in `text` of character `offset` of a scalar whose source is `text[start:end]`.

    `style` is PyYAML's: None for plain, a quote, `|` or `>`. An offset at or behind the value's end
    gives the position after its last visible character.
    """
    wanted = sum(not character.isspace() for character in value[:offset])
    last = start
    for number, (index, length) in enumerate(_visible(text, start, end, style)):
        if number == wanted:
            return index
        last = index + length
    return last


def _visible(text: str, start: int, end: int, style: str | None) -> Iterator[tuple[int, int]]:
    """Index and source length of each character of the value that is not whitespace."""
    if properties := _PROPERTIES.match(text, start, end):
        start = properties.end()
    if style in {"'", '"'}:
        start, end = start + 1, end - 1
    elif style in {"|", ">"} and (header := _BLOCK_HEADER.match(text, start, end)):
        start = header.end()
    index = start
    while index < end:
        length, is_visible = _character(text, index, end, style)
        if is_visible:
            yield index, length
        index += length


def _character(text: str, index: int, end: int, style: str | None) -> tuple[int, bool]:
    if style == '"' and (escape := _ESCAPE.match(text, index, end)):
        code = escape[1] or escape[2] or escape[3]
        is_space = chr(int(code, 16)).isspace() if code else escape.group() in _WHITESPACE_ESCAPES
        return escape.end() - index, not is_space
    if style == "'" and text.startswith("''", index, end):
        return 2, True
    return 1, not text[index].isspace()
