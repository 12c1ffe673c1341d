"""docs/policies.md lists exactly what the code has."""

import re
from pathlib import Path

import pytest

from gateway.config.schema import Policy as PolicySettings
from gateway.core.eligibility import REASONS
from gateway.core.formula import compile_cost
from gateway.core.presets import PRESETS
from gateway.core.variables import AGGREGATES, FUNCTIONS, VARIABLES
from tests.support.policies import make_policy, make_table

TEXT = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")


def section(title):
    return re.split(r"^## ", TEXT.split(f"\n## {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def first_cells(title):
    return [row.split("|")[1].strip() for row in section(title).splitlines() if row.startswith("| `")]


def test_variables():
    rows = {
        row.split("|")[1].strip(" `"): row.split("|")[2].strip()
        for row in section("Variables").splitlines()[4:]
        if row.startswith("| `")
    }
    assert rows == {variable.name: variable.unit for variable in VARIABLES.values()}


def test_functions():
    named = set(re.findall(r"`(\w+)\(", section("Operators and functions")))
    assert named == {*FUNCTIONS, *AGGREGATES}


def test_presets():
    assert {cell.strip("`") for cell in first_cells("Presets")} == set(PRESETS)
    for row in section("Presets").splitlines():
        cells = [cell.strip() for cell in row.split("|")]
        if not row.startswith("| `"):
            continue
        preset = PRESETS[cells[1].strip("`")]
        assert cells[3] == preset.picker
        assert cells[4] == (preset.tie_break or "none")


def test_reasons():
    assert {cell.strip("`") for cell in first_cells("Filters")} == set(REASONS)


@pytest.mark.parametrize(
    "block", re.findall(r"^```\n(.+?)^```", section("Write your own"), flags=re.MULTILINE | re.DOTALL)
)
def test_example_formulas_run(block):
    decision = make_policy(make_table(2), PolicySettings(cost=block)).decide(0.0, prompt_tokens=5, max_tokens=5)
    assert decision.costs == [5, 5]
    assert not compile_cost(block).can_be_non_finite
