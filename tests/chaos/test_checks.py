"""What is taken for growth of the gateway's memory."""

from tests.chaos.checks import Memory, memory_growth

WARM_S, MIB = 60.0, 1 << 20


def judged(size_at):
    """The growth and the problems of five minutes in which the gateway has `size_at(s)` MiB."""
    memory = Memory()
    memory.samples = [(half / 2, int(size_at(half / 2) * MIB)) for half in range(600)]
    return memory_growth(memory, WARM_S)


def test_what_bursts_take_and_give_back_is_no_growth():
    growth, problems = judged(lambda at_s: 80 if 264 <= at_s < 280 or at_s >= 290 else 75)
    assert (growth, problems) == (0.0, [])


def test_a_leak_is_growth():
    growth, (problem,) = judged(lambda at_s: 75 + at_s / 40)
    assert growth > 0.05
    assert "grew" in problem


def test_what_is_kept_once_is_growth():
    growth, (problem,) = judged(lambda at_s: 79 if at_s > 150 else 75)
    assert growth > 0.05
    assert "75 to 79 MiB" in problem


def test_a_bounce_has_a_bound():
    _, (problem,) = judged(lambda at_s: 95 if 200 <= at_s < 203 else 75)
    assert "95 MiB at one time" in problem


def test_short_runs_are_not_judged():
    memory = Memory()
    memory.samples = [(half / 2, (75 + half) * MIB) for half in range(150)]
    growth, problems = memory_growth(memory, WARM_S)
    assert growth > 0.05
    assert problems == []
