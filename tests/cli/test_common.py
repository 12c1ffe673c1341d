"""Numbers and tables for people."""

import pytest

from gateway.cli.common import format_number, format_table


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (3.0, "3"), (0.25, "0.25"), (1 / 3, "0.333333"), ("inf", "inf"), (1e18, "1e+18"), (-2.0, "-2"), (float("inf"), "inf")],
)  # fmt: skip
def test_format_number(value, text):
    assert format_number(value) == text


def test_format_table():
    assert (
        format_table(["A", "NAME"], [["100", "x"], ["2", "longer"]], frozenset({1})) == "  A  NAME\n100  x\n  2  longer"
    )
    assert format_table(["A"], [], frozenset()) == "A"
