"""YAML (and thereby JSON) text -> plain data, with the position of everything in it.

The C parser makes the node tree; this module reads it: duplicate keys, tags and
what could blow up (size, depth, aliases) are refused here, with the place. Nothing of the schema is
known yet.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import yaml

from gateway.config.errors import ConfigError, Loc, format_loc, show
from gateway.config.offsets import source_index
from gateway.config.scalars import read_plain

MAX_FILE_BYTES = 1024 * 1024
MAX_VALUES = 100_000
"""Values after aliases are expanded: far above any sensible file, far below what hurts."""
MAX_DEPTH = 32

_PLAIN = "plain scalar"
_STRING = "tag:yaml.org,2002:str"
_SEQUENCE = "tag:yaml.org,2002:seq"
_MAPPING = "tag:yaml.org,2002:map"
_MERGE = "<<"
_LINE_BREAK = re.compile(r"\r\n|[\n\r\x85\u2028\u2029]")
_UNPRINTABLE = re.compile(r"[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

# A NUL ends a path for the system; none of them belongs into a setting. Line breaks and tabs do: formulas may have them.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_TAB_PROBLEMS = ("that cannot start any token", "that violates indentation", "where an indentation space is expected")
Entry = tuple[yaml.ScalarNode, yaml.Node]


class _Loader(yaml.CSafeLoader):
    """Composes nodes only. Unquoted scalars get a tag that no file can write: a space is not allowed there."""

    yaml_implicit_resolvers = {None: [(_PLAIN, re.compile(""))]}  # noqa: RUF012 (PyYAML's own protocol)


class Document:
    """One parsed file: `data` is made of dict, list, str, int, float, bool and None."""

    def __init__(self, text: str, path: Path | str) -> None:
        # The parser skips a byte order mark without counting it, so positions would be off by one.
        self.text = text.removeprefix("\ufeff")
        self.path = path
        self._keys: dict[Loc, yaml.Node] = {}
        self._nodes: dict[Loc, yaml.Node] = {}
        self._values = 0
        root = _compose(self.text, path)
        if root is None:
            raise ConfigError(path, 1, 1, "the file is empty")
        self.data = self._build(root, ())

    def error(self, loc: Loc, message: str, *, at_key: bool = False, offset: int | None = None) -> ConfigError:
        """Make the error for a place, or for its nearest parent that the file has.

        `at_key` points at the key instead of the value; `offset` (characters from 0) points into the
        text of a scalar.
        """
        known = loc
        while known and known not in self._nodes:
            known = known[:-1]
        node = self._nodes[known]
        if offset is not None and known == loc and isinstance(node, yaml.ScalarNode):
            index = source_index(self.text, node.start_mark.index, node.end_mark.index, node.style, node.value, offset)
            line, column = position(self.text, index)
            return ConfigError(self.path, line, column, message, at=format_loc(loc))
        marked = self._keys.get(known, node) if at_key or known != loc else node
        return ConfigError(
            self.path, marked.start_mark.line + 1, marked.start_mark.column + 1, message, at=format_loc(loc)
        )

    def is_plain(self, loc: Loc) -> bool:
        """Whether the value is an unquoted scalar."""
        node = self._nodes.get(loc)
        return isinstance(node, yaml.ScalarNode) and node.tag == _PLAIN

    def source(self, loc: Loc) -> str:
        """Text of a scalar as the file writes it, without quotes; empty for anything else."""
        node = self._nodes.get(loc)
        return cast("str", node.value) if isinstance(node, yaml.ScalarNode) else ""

    def _build(self, node: yaml.Node, loc: Loc) -> object:
        self._nodes[loc] = node
        self._values += 1
        if self._values > MAX_VALUES:
            raise self.error(loc, f"more than {MAX_VALUES} values (aliases count each time)")
        if len(loc) > MAX_DEPTH:
            raise self.error(loc, f"nested deeper than {MAX_DEPTH} levels, or an alias contains itself")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, loc)
        if isinstance(node, yaml.SequenceNode) and node.tag == _SEQUENCE:
            return [self._build(item, (*loc, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode) and node.tag == _MAPPING:
            return self._mapping(node, loc)
        raise self._tag_error(node, loc)

    def _scalar(self, node: yaml.ScalarNode, loc: Loc) -> object:
        if node.tag == _STRING:
            if _CONTROL.search(node.value):
                raise self.error(loc, "control characters are not allowed")
            return node.value
        if node.tag != _PLAIN:
            raise self._tag_error(node, loc)
        return read_plain(node.value)

    def _mapping(self, node: yaml.MappingNode, loc: Loc) -> dict[str, object]:
        result: dict[str, object] = {}
        for key, value in self._entries(node, loc, 0):
            here = (*loc, key.value)
            self._keys[here] = key
            result[key.value] = self._build(value, here)
        return result

    def _entries(self, node: yaml.MappingNode, loc: Loc, depth: int) -> Iterator[Entry]:
        """Key and value nodes of a mapping; what `<<` merges in comes last and never overrides."""
        own: dict[str, Entry] = {}
        merged: list[yaml.Node] = []
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag not in {_PLAIN, _STRING}:
                raise self._mark_error(key, loc, "keys must be text")
            if key.value in own:
                first = own[key.value][0].start_mark.line + 1
                raise self._mark_error(
                    key, (*loc, key.value), f"duplicate key {show(key.value)}, first on line {first}"
                )
            own[key.value] = (key, value)
            if key.value == _MERGE and key.tag == _PLAIN:
                merged = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if merged:
            del own[_MERGE]
        yield from own.values()
        seen = set(own)
        for source in merged:
            for key, value in self._merge_source(source, loc, depth):
                if key.value not in seen:
                    seen.add(key.value)
                    yield key, value

    def _merge_source(self, source: yaml.Node, loc: Loc, depth: int) -> list[Entry]:
        if not isinstance(source, yaml.MappingNode) or source.tag != _MAPPING:
            raise self._mark_error(source, loc, "`<<` merges mappings only")
        if depth > MAX_DEPTH:
            raise self._mark_error(source, loc, "`<<` merges a mapping into itself")
        entries = list(self._entries(source, loc, depth + 1))
        self._values += len(entries) + 1
        if self._values > MAX_VALUES:
            raise self._mark_error(source, loc, f"more than {MAX_VALUES} values (aliases count each time)")
        return entries

    def _mark_error(self, node: yaml.Node, loc: Loc, message: str) -> ConfigError:
        mark = node.start_mark
        return ConfigError(self.path, mark.line + 1, mark.column + 1, message, at=format_loc(loc))

    def _tag_error(self, node: yaml.Node, loc: Loc) -> ConfigError:
        return self._mark_error(node, loc, f"the tag {show(node.tag)} is not supported")


def position(text: str, index: int) -> tuple[int, int]:
    """Line and column, from 1, of a character index; lines end where YAML ends them."""
    line, start = 1, 0
    for found in _LINE_BREAK.finditer(text, 0, index):
        line, start = line + 1, found.end()
    return line, index - start + 1


def read_text(path: Path) -> str:
    """Read a file of at most `MAX_FILE_BYTES` as UTF-8. Raises `ConfigError`."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(path, None, None, error.strerror or str(error)) from None
    return decode_text(raw, path)


def decode_text(raw: bytes, path: Path | str) -> str:
    """Decode a file's bytes. Raises `ConfigError` where they are too many or not UTF-8."""
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(path, None, None, f"larger than {MAX_FILE_BYTES} bytes")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode("utf-8")
        raise ConfigError(path, *position(before, len(before)), "not UTF-8 text") from None


def _compose(text: str, path: Path | str) -> yaml.Node | None:
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(path, None, None, f"larger than {MAX_FILE_BYTES} bytes")
    if found := _UNPRINTABLE.search(text):
        code = ord(found.group())
        raise ConfigError(path, *position(text, found.start()), f"the character U+{code:04X} is not allowed")
    loader = _Loader(text)
    try:
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, text, path) from None
    finally:
        loader.dispose()


def _syntax_error(error: yaml.MarkedYAMLError, text: str, path: Path | str) -> ConfigError:
    assert error.problem_mark is not None
    message = ", ".join(part for part in (error.context, error.problem) if part)
    # Most of the parser's words for this don't name the tab, which few editors show.
    if message.endswith(_TAB_PROBLEMS) and text.startswith("\t", error.problem_mark.index):
        message = "tabs can't indent YAML; use spaces"
    return ConfigError(path, error.problem_mark.line + 1, error.problem_mark.column + 1, message)
