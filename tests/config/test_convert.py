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


NAME = Annotated[str, Meta(pattern="^[a-z]+$", title="lower case")]


class Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    named: Annotated[dict[NAME, Inner], Meta(max_length=2)] = msgspec.field(default_factory=dict)
    deep: dict[NAME, Inner] | None = None


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
        ("items: [x]", "f:1:9: expected mapping, got the text 'x' (at $.items[0])"),
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


def load_named(text):
    document = Document(text, "f")
    return convert(document, document.data, Named)


def test_mappings_with_free_keys():
    assert load_named("named: {a: {size: 2}, b: {}}") == Named(named={"a": Inner(2), "b": Inner()})
    assert load_named("named: {}\ndeep: null") == Named()
    assert load_named("deep: {a: {}}") == Named(deep={"a": Inner()})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("named: {a: {size: x}}", "f:1:19: expected whole number, got the text 'x' (at $.named.a.size)"),
        ("named: {a: {}, b: {size: 1.5}}", "f:1:26: expected whole number, got 1.5 (at $.named.b.size)"),
        ("named: {a: {sise: 1}}", "f:1:13: unknown key 'sise'; did you mean 'size'? (at $.named.a.sise)"),
        ("named: {a: {}, B: {}}", "f:1:16: expected lower case, got 'B' (at $.named.B)"),
        ("named: {'': {}}", "f:1:9: expected lower case, got '' (at $.named[''])"),
        ("named: {1: {}}", "f:1:9: expected lower case, got '1' (at $.named['1'])"),
        ("named: {a: }", "f:1:9: 'a' has no value; write {} for the defaults (at $.named.a)"),
        ("named: {a: 5}", "f:1:12: expected mapping, got 5 (at $.named.a)"),
        ("named: {a: [1]}", "f:1:12: expected mapping, got a list (at $.named.a)"),
        ("named: [a]", "f:1:8: expected mapping, got a list (at $.named)"),
        ("named: {a: {}, b: {}, c: {}}", "f:1:8: expected mapping of length <= 2, got 3 entries (at $.named)"),
        ("deep: {a: {size: true}}", "f:1:18: expected whole number, got true (at $.deep.a.size)"),
        ("deep: [1]", "f:1:7: expected mapping or null, got a list (at $.deep)"),
        ("named: {a: {}, a: {}}", "f:1:16: duplicate key 'a', first on line 1 (at $.named.a)"),
    ],
)
def test_faults_in_mappings_with_free_keys(text, message):
    with pytest.raises(ConfigError) as caught:
        load_named(text)
    assert str(caught.value) == message
