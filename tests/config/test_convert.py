"""Plain data to any settings Struct; the loader's tests cover the messages of `Config`."""

from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta, inspect

from gateway.config.convert import convert, suggest, unwrap
from gateway.config.document import Document
from gateway.config.errors import ConfigError


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int = 1


class Outer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    items: tuple[Inner, ...] = ()
    extra: Inner | None = None
    mode: Literal["a", "b"] | None = None
    label: Annotated[str | None, Meta(title="a label")] = None


def load(text):
    document = Document(text, "f")
    return convert(document, document.data, Outer)


def test_nested_mappings_lists_and_optional_ones():
    assert load("items: [{size: 2}, {}]\nextra: {size: 3}\nmode: a\nlabel: x\n") == Outer(
        items=(Inner(2), Inner(1)), extra=Inner(3), mode="a", label="x"
    )
    assert load("extra: null\nmode: ''\nlabel: ''\n") == Outer()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("items: [{}, {sise: 1}]", "f:1:14: unknown key 'sise'; did you mean 'size'? (at $.items[1].sise)"),
        ("extra: {sise: 1}", "f:1:9: unknown key 'sise'; did you mean 'size'? (at $.extra.sise)"),
        ("items: [1]", "f:1:9: expected mapping, got 1 (at $.items[0])"),
        ("extra: [1]", "f:1:8: expected mapping or null, got a list (at $.extra)"),
        ("label: 3", 'f:1:8: expected a label, got 3; quote it if it is text: "3" (at $.label)'),
        ("mode: c", "f:1:7: unknown value 'c'; expected one of a, b, null (at $.mode)"),
        ("mode: 1", "f:1:7: unknown value 1; expected one of a, b, null (at $.mode)"),
        ("items: [{size: '1 - at `$.x`'}]", "f:1:16: expected whole number, got the text '1 - at `$.x`'; numbers are written without quotes (at $.items[0].size)"),
        ("mode: 'c - at `$.x`'", "f:1:7: unknown value 'c - at `$.x`'; expected one of a, b, null (at $.mode)"),
        ("'label` - at `$.mode': 1", "f:1:1: unknown key 'label` - at `$.mode'; known here: items, extra, mode, label (at $['label` - at `$.mode'])"),
    ],
)  # fmt: skip
def test_messages(text, message):
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert str(caught.value) == message


def test_suggestions_are_for_close_words_only():
    assert suggest("rnks", ["ranks", "name"]) == "; did you mean 'ranks'?"
    assert suggest("zzz", ["ranks", "name"]) == ""


def test_unwrap_sees_through_metadata_and_null():
    fields = {field.name: field.type for field in inspect.type_info(Outer).fields}
    assert unwrap(fields["label"]) == (inspect.StrType(), "a label", True)
    assert unwrap(fields["mode"]) == (inspect.LiteralType(("a", "b")), None, True)
