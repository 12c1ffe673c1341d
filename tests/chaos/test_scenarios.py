"""One of four ranks is lost at full load. Figures are printed (`pytest -s`), not asserted: hosts differ."""

import pytest

from tests.chaos.scenarios import SCENARIOS

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("protocol", ["tokenspeed", "vllm"])
@pytest.mark.parametrize("name", SCENARIOS)
async def test_only_its_own_requests_notice_and_none_of_them_fails(name, protocol):
    stage = await SCENARIOS[name](protocol)
    print(f"\n{name}, {protocol}: {stage.figures}")
    assert not stage.problems, "\n".join(stage.problems[:20])
