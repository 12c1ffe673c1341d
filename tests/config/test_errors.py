"""How places and values are written in messages."""

import pytest

from gateway.config.errors import ConfigError, format_loc, show


def test_error_prints_like_a_compiler():
    assert str(ConfigError("g.yaml", 3, 7, "no", at="$.a")) == "g.yaml:3:7: no (at $.a)"
    assert str(ConfigError("g.yaml", 3, 7, "no")) == "g.yaml:3:7: no"
    assert str(ConfigError("g.yaml", None, None, "no")) == "g.yaml: no"


@pytest.mark.parametrize(
    ("loc", "text"),
    [
        ((), "$"),
        (("groups", 0, "name"), "$.groups[0].name"),
        (("two words", "a.b", ""), "$['two words']['a.b']['']"),
        (("new\nline",), r"$['new\nline']"),
        (("x" * 60,), "$." + "x" * 60),
        (("x" * 61, "b"), "$['" + "x" * 59 + "...].b"),
    ],
)
def test_places_are_json_paths(loc, text):
    assert format_loc(loc) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (None, "null"), (1, "1"), ("a\nb", r"'a\nb'"), ("x" * 100, "'" + "x" * 59 + "...")],
)
def test_values_stay_on_one_line_and_short(value, text):
    assert show(value) == text
