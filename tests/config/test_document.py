"""YAML and JSON text to data with positions; what is refused before the schema is looked at."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import document
from gateway.config.document import Document, decode_text, position, read_text
from gateway.config.errors import ConfigError
from tests.support.config_cases import unmark


def parse(text):
    return Document(text, "f.yaml").data


def test_plain_data():
    text = 'a: {b: [1, 2.5, true, ~, "1"], "c d": text}\ne:\n'
    assert parse(text) == {"a": {"b": [1, 2.5, True, None, "1"], "c d": "text"}, "e": None}


@pytest.mark.parametrize(
    ("marked", "message"),
    [
        ("§", "the file is empty"),
        ("§# only a comment\n", "the file is empty"),
        ("a: 1\nb: 2\n§a: 3\n", "duplicate key 'a', first on line 1 (at $.a)"),
        ('x: [{a: 1, §"a": 2}]\n', "duplicate key 'a', first on line 1 (at $.x[0].a)"),
        ("a: §!!python/name:os.system x\n", "the tag 'tag:yaml.org,2002:python/name:os.system' is not supported (at $.a)"),
        ("a: §!!set {x}\n", "the tag 'tag:yaml.org,2002:set' is not supported (at $.a)"),
        ("a: §!!int 5\n", "the tag 'tag:yaml.org,2002:int' is not supported (at $.a)"),
        ("a: §!x [1]\n", "the tag '!x' is not supported (at $.a)"),
        ("§!!int 5: a\n", "keys must be text (at $)"),
        ("? §[a]\n: b\n", "keys must be text (at $)"),
        ("a: b§: c\n", "mapping values are not allowed in this context"),
        ("a: §*nowhere\n", "found undefined alias"),
        ("a: 1\n§--- \nb: 2\n", "expected a single document in the stream, but found another document"),
        ("a: [1,\n§", "while parsing a flow node, did not find expected node content"),
        ("a: b\n§\tc: d\n", "tabs can't indent YAML; use spaces"),
        ("é:\n§\tb: 1\n", "tabs can't indent YAML; use spaces"),
        ("a:\n §\tb: 1\n", "tabs can't indent YAML; use spaces"),
        ("a: |\n§\tb\n", "tabs can't indent YAML; use spaces"),
        ("a: §@b\n", "while scanning for the next token, found character that cannot start any token"),
        ("a: &§\tb\n", "while scanning an anchor, did not find expected alphabetic or numeric character"),
        ("a: x§\x00\n", "the character U+0000 is not allowed"),
        ("é: 1\n😀: §\x07\n", "the character U+0007 is not allowed"),
        ("a: x§\ud800\n", "the character U+D800 is not allowed"),
        ("a: §&a [*a]\n", "nested deeper than 32 levels, or an alias contains itself (at $.a" + "[0]" * 32 + ")"),
        ("a: {<<: [§[1]]}\n", "`<<` merges mappings only (at $.a)"),
        ("a: {<<: §text}\n", "`<<` merges mappings only (at $.a)"),
    ],
)  # fmt: skip
def test_refused_at(marked, message):
    text, line, column = unmark(marked)
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert str(caught.value) == f"f.yaml:{line}:{column}: {message}"


def test_line_breaks_of_every_system_count_the_same():
    for line_break in ("\n", "\r\n", "\r"):
        with pytest.raises(ConfigError) as caught:
            parse(line_break.join(["a: 1", "b: 2", "a: 3"]))
        assert (caught.value.line, caught.value.column) == (3, 1)
        assert position(f"x{line_break}{line_break}yz", len(f"x{line_break}{line_break}y")) == (3, 2)


def test_deep_nesting_is_refused_not_a_crash():
    for text in (
        "[" * 100_000,
        "- " * 100_000 + "a",
        "{a: " * 900 + "}" * 900,
        "\n".join(" " * n + "a:" for n in range(900)),
    ):
        with pytest.raises(ConfigError):
            parse(text)


def test_alias_bomb_is_refused():
    lines = ["a0: &a0 [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 25)]
    with pytest.raises(ConfigError, match="more than 100000 values"):
        parse("\n".join(lines))


def test_merge_bomb_is_refused():
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 25)]
    with pytest.raises(ConfigError, match="more than 100000 values"):
        parse("\n".join(lines))


def test_merge_into_itself_is_refused():
    with pytest.raises(ConfigError, match="merges a mapping into itself"):
        parse("a: &a {<<: *a}")


def test_aliases_and_merges():
    text = "a: &a {x: 1, y: 2}\nb: *a\nc: {<<: *a, y: 3}\nd: {<<: [{x: 7}, *a], z: 1}\n"
    assert parse(text) == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 2},
        "c": {"x": 1, "y": 3},
        "d": {"x": 7, "y": 2, "z": 1},
    }
    assert parse('"<<": 1') == {"<<": 1}


def test_keys_are_text_whatever_they_look_like():
    assert parse("1: a\non: b\n~: c\n") == {"1": "a", "on": "b", "~": "c"}


def test_error_falls_back_to_the_nearest_place_in_the_file():
    found = Document("a:\n  b: 1\n", "f").error(("a", "missing", 3), "no")
    assert (found.line, found.column, found.at) == (1, 1, "$.a.missing[3]")
    root = Document("x: 1", "f").error(("missing",), "no")
    assert (root.line, root.column) == (1, 1)


def test_byte_order_mark_takes_no_column():
    document = Document("\ufeffa: 'x y'", "f")
    assert document.data == {"a": "x y"}
    assert str(document.error(("a",), "no", offset=2)) == "f:1:7: no (at $.a)"


def test_size_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(document, "MAX_FILE_BYTES", 10)
    path = tmp_path / "big.yaml"
    path.write_text("a: 5678901")
    assert parse(read_text(path)) == {"a": 5678901}
    path.write_text("a: 56789012")
    with pytest.raises(ConfigError, match=r"big\.yaml: larger than 10 bytes"):
        read_text(path)
    with pytest.raises(ConfigError, match="larger than 10 bytes"):
        parse("a: 56789012")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml: No such file or directory"):
        read_text(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_text(tmp_path)


def test_bytes_that_are_not_utf8():
    with pytest.raises(ConfigError) as caught:
        decode_text("a: 1\né: ".encode() + b"\xff", "f.yaml")
    assert str(caught.value) == "f.yaml:2:4: not UTF-8 text"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], min_codepoint=0x20, max_codepoint=0xFFFF, exclude_characters="\x7f\ufffe\uffff"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc_ é:#-", max_size=5).filter(lambda key: key != "<<"), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip


@given(json_values.filter(lambda value: value is not None), st.sampled_from([None, 0, 2, "\t"]), st.booleans())
def test_json_is_read_as_json(value, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only or not _printable(value))
    assert parse(text) == json.loads(text)


def _printable(value):
    return document._UNPRINTABLE.search(json.dumps(value, ensure_ascii=False)) is None


@given(st.text(st.characters(codec="utf-8"), max_size=200) | st.text("a1:-[]{},&*!|>'\"%#@`?<= \n\t", max_size=60))
def test_any_text_gives_data_or_a_config_error(text):
    failure = None
    try:
        parse(text)
    except ConfigError as error:
        failure = error
    assert failure is None or failure.line is None or (failure.line >= 1 and failure.column >= 1)


@pytest.mark.parametrize("escape", ["\\0", "\\x07", "\\x7f", "\\e"])
def test_control_characters_are_refused_where_they_stand(escape):
    with pytest.raises(ConfigError, match=r"^f\.yaml:2:4: control characters are not allowed"):
        Document(f'a: 1\nb: "x{escape}y"\n', "f.yaml")


def test_line_breaks_and_tabs_are_text():
    assert Document('a: "x\\n\\ty"', "f.yaml").data == {"a": "x\n\ty"}
