"""Unquoted scalars: one meaning in every YAML version, or text."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.scalars import explain_text, read_plain


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None), ("~", None), ("null", None), ("NULL", None),
        ("true", True), ("False", False),
        ("0", 0), ("-17", -17), ("+5", 5), ("9223372036854775807", 2**63 - 1),
        ("1.5", 1.5), ("1e-9", 1e-9), ("-2E+3", -2000.0), ("1.", 1.0), (".5", 0.5), ("0.0", 0.0),
        ("127.0.0.1:50051", "127.0.0.1:50051"), ("y", "y"), ("n", "n"), ("tRUE", "tRUE"), ("1.2.3", "1.2.3"),
        ("2026-01-02", "2026-01-02"), ("e5", "e5"), ("-", "-"), ("inf", "inf"), ("8080:90", "8080:90"),
    ],
)  # fmt: skip
def test_read(text, value):
    result = read_plain(text)
    assert (type(result), result) == (type(value), value)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("on", "true or false"), ("Off", "true or false"), ("YES", "true or false"), ("no", "true or false"),
        ("12:30", "base 60"), ("1:02:03", "base 60"), ("190:20:30.15", "base 60"),
        ("010", "octal"), ("-07", "octal"), ("0_1", "octal"), ("089", "octal"),
        ("0x1f", "decimal"), ("0b101", "decimal"), ("0o17", "decimal"), ("1_000", "without _"),
        (".inf", "finite"), ("-.INF", "finite"), (".nan", "finite"), ("1e999", "finite"), ("-1e999", "finite"),
        ("9223372036854775808", "64 bits"), ("9" * 5000, "64 bits"),
    ],
)  # fmt: skip
def test_traps_are_text_with_advice(text, advice):
    assert read_plain(text) == text
    assert advice in explain_text(text)


def test_ordinary_text_needs_no_advice():
    assert [explain_text(text) for text in ("lmetric", "127.0.0.1:50051", "/var/run", "a b")] == [None] * 4


@given(st.from_regex(r"[-+]?[0-9_:.eExXobB+-]{1,12}", fullmatch=True) | st.sampled_from(["true", "null", "yes", "~"]))
def test_agrees_with_yaml_1_1_or_is_text(text):
    """What is read as a number, boolean or null means the same to PyYAML, or is text there (`1e5`)."""
    ours = read_plain(text)
    if not isinstance(ours, str):
        theirs = yaml.safe_load(f"[{text}]")[0] if text else None
        assert theirs in (ours, text)
