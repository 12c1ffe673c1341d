"""The names of the metrics obey the rules, and only bounded things are labels."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gateway.edges import metrics_catalogue as catalogue
from tests.support.metrics_world import busy_world

ROOT = Path(__file__).parents[2]

# --- the rules of naming (https://prometheus.io/docs/practices/naming, and promtool's linter) -------

ABBREVIATED = {
    *(
        "s",
        "m",
        "h",
        "d",
        "b",
        "ms",
        "us",
        "ns",
        "sec",
        "msec",
        "usec",
        "nsec",
        "min",
        "hr",
        "milliseconds",
        "microseconds",
    ),
    *(
        "kb",
        "mb",
        "gb",
        "tb",
        "pb",
        "kib",
        "mib",
        "gib",
        "kilobytes",
        "megabytes",
        "percent",
        "pct",
        "minutes",
        "hours",
    ),
}


UNITS = ("seconds", "sequences")


def lint(spec):
    """What the linter would object to."""
    name, words = spec.full_name, spec.full_name.split("_")
    if not spec.help.strip() or not spec.help.endswith("."):
        yield "no help text, or not a sentence"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or "__" in name:
        yield "not snake_case"
    if (spec.kind == "counter") != name.endswith("_total"):
        yield "counters end in _total, nothing else does"
    if any(name.endswith(suffix) for suffix in ("_count", "_sum", "_bucket", "_created")):
        yield "a reserved suffix"
    if set(words) & ABBREVIATED:
        yield "not a base unit"
    if set(words) & {"gauge", "counter", "histogram", "summary"}:
        yield "the type in the name"
    if spec.kind in ("histogram", "summary") and words[-1] not in UNITS:
        yield "no unit"
    if set(spec.labels) & {"le", "quantile", "job", "instance"}:
        yield "a reserved label"
    if any(f"_by_{label}" in name for label in spec.labels):
        yield "a label's name in the name"
    if len(spec.labels) != len(set(spec.labels)):
        yield "a label twice"


@pytest.mark.parametrize("spec", catalogue.CATALOGUE, ids=lambda spec: spec.name)
def test_names_obey_the_rules(spec):
    assert list(lint(spec)) == []


def test_the_lint_finds_what_it_looks_for():
    bad = (
        ("wait_ms", "gauge", "A wait.", ()),
        ("x_total", "gauge", "X.", ()),
        ("x", "counter", "X.", ()),
        ("x_count", "gauge", "X.", ()),
        ("x", "gauge", "", ()),
        ("X", "gauge", "X.", ()),
        ("x", "histogram", "X.", ()),
        ("x", "gauge", "X.", ("le",)),
        ("x_gauge", "gauge", "X.", ()),
        ("x_by_reason_total", "counter", "X.", ("reason",)),
    )
    for values in bad:
        assert len(list(lint(catalogue.Spec(*values)))) == 1, values


def test_names_are_unique():
    names = [spec.full_name.removesuffix("_total") for spec in catalogue.CATALOGUE]
    assert len(names) == len(set(names))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_agrees():
    run = subprocess.run(
        ["promtool", "check", "metrics"], input=busy_world().scrape(), capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_only_bounded_things_are_labels():
    text = busy_world().scrape()
    assert "_created" not in text
    assert "r1" not in re.findall(r'"([^"]*)"', text), "a request id is a label"
