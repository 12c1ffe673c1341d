"""Plain data -> a settings Struct, with errors that say where and what instead.

msgspec has the last word on every value. Before it, one walk along the Struct's fields finds what
msgspec can't say well: unknown keys (with a suggestion), missing keys, keys without a value and empty
strings.
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect

from gateway.config.document import Document
from gateway.config.errors import ConfigError, Loc, show
from gateway.config.scalars import explain_text

T = TypeVar("T")

_AT = re.compile(r"(.*) - at `\$([^`]*)`", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_WORDS = {
    "object": "mapping",
    "array": "list",
    "str": "text",
    "bool": "true or false",
    "int": "whole number",
    "float": "number",
}
_MAX_LISTED = 16


def convert(document: Document, data: object, into: type[T]) -> T:
    """Make a Struct of `data`, whose positions `document` knows. Raises `ConfigError`."""
    return _convert(document, data, into, ())


def suggest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest known word, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def unwrap(kind: inspect.Type) -> tuple[inspect.Type, str | None, bool]:
    """Strip metadata and null from a type: the bare type, its title (format in words), whether null is allowed."""
    title: str | None = None
    is_optional = False
    while isinstance(kind, inspect.Metadata | inspect.UnionType):
        if isinstance(kind, inspect.Metadata):
            title = title or (kind.extra_json_schema or {}).get("title")
            kind = kind.type
        else:
            is_optional = True
            (kind,) = (member for member in kind.types if not isinstance(member, inspect.NoneType))
    return kind, title, is_optional


def _convert(document: Document, data: object, into: type[T], base: Loc) -> T:
    kind = inspect.type_info(into)
    assert isinstance(kind, inspect.StructType)
    data = _walk(document, data, kind, base)
    try:
        return msgspec.convert(data, into)
    except msgspec.ValidationError as error:
        raise _translate(document, data, kind, str(error), base) from None


def _walk(document: Document, data: object, kind: inspect.Type, loc: Loc) -> object:
    """Check keys from here down; returns the data without the keys that are as good as absent.

    Values of a mapping with free keys come back converted: msgspec would not say in which of them it found a fault.
    """
    bare, _, _ = unwrap(kind)
    if isinstance(bare, inspect.StructType) and isinstance(data, dict):
        return _walk_struct(document, data, bare, loc)
    if isinstance(bare, inspect.VarTupleType) and isinstance(data, list):
        return [_walk(document, item, bare.item_type, (*loc, index)) for index, item in enumerate(data)]
    if isinstance(bare, inspect.DictType) and isinstance(data, dict):
        return _walk_named(document, data, bare, loc)
    return data


def _walk_named(document: Document, data: dict[str, object], kind: inspect.DictType, loc: Loc) -> dict[str, object]:
    key_kind, title, _ = unwrap(kind.key_type)
    assert isinstance(key_kind, inspect.StrType)
    assert isinstance(kind.value_type, inspect.StructType)
    into = kind.value_type.cls
    result: dict[str, object] = {}
    for key, value in data.items():
        here = (*loc, key)
        if not re.search(key_kind.pattern or "", key):
            raise document.error(here, f"expected {title}, got {show(key)}", at_key=True)
        if value is None:
            raise document.error(here, f"{show(key)} has no value; write {{}} for the defaults", at_key=True)
        result[key] = _convert(document, value, into, here)
    return result


def _walk_struct(document: Document, data: dict[str, object], kind: inspect.StructType, loc: Loc) -> dict[str, object]:
    fields = {field.encode_name: field for field in kind.fields}
    for key in data:
        if key not in fields:
            advice = suggest(key, fields) or f"; known here: {', '.join(fields)}"
            raise document.error((*loc, key), f"unknown key {show(key)}{advice}", at_key=True)
    result: dict[str, object] = {}
    for name, field in fields.items():
        here = (*loc, name)
        if name not in data:
            if field.required:
                raise document.error(loc, f"missing key '{name}'", at_key=True)
        elif not _is_unset(document, data[name], field, here):
            result[name] = _walk(document, data[name], field.type, here)
    return result


def _is_unset(document: Document, value: object, field: inspect.Field, loc: Loc) -> bool:
    """Whether an empty value means the same as leaving the key out. Raises where it could mean anything else."""
    bare, _, is_optional = unwrap(field.type)
    name = field.encode_name
    if value is None and not is_optional:
        advice = "it is required" if field.required else "leave the key out for its default"
        raise document.error(loc, f"'{name}' has no value; {advice}", at_key=True)
    if value != "" or not isinstance(bare, inspect.StrType | inspect.LiteralType):
        return False
    if is_optional and field.default is None:
        return True
    if field.required:
        raise document.error(loc, f"'{name}' is empty; it is required")
    switch = "write null to switch it off, or " if is_optional else ""
    raise document.error(loc, f"'{name}' is empty; {switch}leave the key out for its default")


def _translate(document: Document, data: object, kind: inspect.Type, text: str, base: Loc) -> ConfigError:
    """Turn msgspec's message into one with a position, the value, and what is allowed. `base` is where `data` stands."""
    found = _AT.fullmatch(text)
    inner: Loc = ()
    if found:
        text = found[1]
        inner = tuple(name or int(index) for name, index in _STEP.findall(found[2]))
    value, bare, title, is_optional = _lookup(data, kind, inner)
    loc = (*base, *inner)
    if isinstance(bare, inspect.LiteralType):
        allowed = [*bare.values, *([None] if is_optional else [])]
        return document.error(loc, _unknown_value(value, allowed))
    if title is not None:
        return document.error(loc, f"expected {title}{_got(document, value, loc, bare)}")
    expected = re.sub(r"`([^`]*)`", lambda match: _in_words(match[1]), text.partition(", got")[0])
    return document.error(loc, f"{expected[:1].lower()}{expected[1:]}{_got(document, value, loc, bare)}")


def _lookup(data: object, kind: inspect.Type, loc: Loc) -> tuple[object, inspect.Type, str | None, bool]:
    """Value and type at a place that msgspec named."""
    bare, title, is_optional = unwrap(kind)
    for step in loc:
        data = cast("Any", data)[step]
        if isinstance(bare, inspect.StructType):
            kind = next(field.type for field in bare.fields if field.encode_name == step)
        else:
            kind = cast("inspect.VarTupleType", bare).item_type
        bare, title, is_optional = unwrap(kind)
    return data, bare, title, is_optional


def _unknown_value(value: object, allowed: Sequence[object]) -> str:
    words = ", ".join(str(item) if isinstance(item, str) else show(item) for item in allowed[:_MAX_LISTED])
    advice = suggest(value, (item for item in allowed if isinstance(item, str))) if isinstance(value, str) else ""
    return f"unknown value {show(value)}; expected {'one of ' if len(allowed) > 1 else ''}{words}{advice}"


def _in_words(expected: str) -> str:
    return " or ".join(_WORDS.get(name, name) for name in expected.split(" | "))


def _got(document: Document, value: object, loc: Loc, bare: inspect.Type) -> str:
    if isinstance(value, dict):
        return ", got a mapping" if not isinstance(bare, inspect.DictType) else f", got {len(value)} entries"
    if isinstance(value, list):
        return ", got a list" if not isinstance(bare, inspect.VarTupleType) else f", got {len(value)} items"
    if isinstance(bare, inspect.StrType) and not isinstance(value, str):
        source = document.source(loc)
        hint = f'; quote it if it is text: "{source}"' if re.search(bare.pattern or ".", source) else ""
        return f", got {show(value)}{hint}"
    if isinstance(value, str) and not isinstance(bare, inspect.StrType):
        if isinstance(bare, inspect.StructType):
            advice = _as_mapping(value, loc, bare)
        elif document.is_plain(loc):
            advice = explain_text(value)
        else:
            is_number = isinstance(bare, inspect.IntType | inspect.FloatType)
            advice = "numbers are written without quotes" if is_number else None
        return f", got the text {show(value)}" + (f"; {advice}" if advice else "")
    return f", got {show(value)}"


def _as_mapping(value: str, loc: Loc, kind: inspect.StructType) -> str | None:
    """How to write a section of which only the main choice, its first key, was given."""
    first = kind.fields[0]
    bare, _, _ = unwrap(first.type)
    if not isinstance(bare, inspect.LiteralType) or value not in bare.values:
        return None
    section = f"{loc[-1]}: " if loc and isinstance(loc[-1], str) else ""
    return f"write {section}{{{first.encode_name}: {value}}}"
