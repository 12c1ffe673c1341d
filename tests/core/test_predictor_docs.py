"""docs/scheduling.md lists the names that prediction formulas have, and its formulas work."""

import re
from pathlib import Path

import pytest

from gateway.core.predictor_formula import PREFILL_VARIABLES, STEP_VARIABLES, compile_prefill, compile_step

TEXT = (Path(__file__).parents[2] / "docs" / "scheduling.md").read_text(encoding="utf-8")
SECTION = re.split(r"^## ", TEXT.split("\n## Predictor\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def test_variables():
    cells = [
        [cell.strip(" `") for cell in row.split("|")[1:4]]
        for row in re.findall(r"^\| `\w+` \|.*", SECTION, re.MULTILINE)
    ]
    prefill = {
        name: ("request" if named.is_of_request else "batch", named.unit) for name, named in PREFILL_VARIABLES.items()
    }
    step = {name: ("step", named.unit) for name, named in STEP_VARIABLES.items()}
    assert {name: (of, unit) for name, of, unit in cells} == prefill | step


@pytest.mark.parametrize("text", re.findall(r"^\| `(\d[^`]+)` \|", SECTION, re.MULTILINE))
def test_example_formulas_are_times(text):
    formula = compile_prefill(text)
    assert 0 < formula.single(1000, 100, 900, 1) < formula.batch([(1000, 100, 900, 1), (30_000, 0, 30_000, 0)]) < 60_000


def test_example_settings_compile():
    compile_prefill(re.search(r'prefill_ms: "(.+?)"', SECTION)[1])
    compile_step(re.search(r'step_ms: "(.+?)"', SECTION)[1])
