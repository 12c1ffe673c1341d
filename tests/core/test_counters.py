"""The counters' shape: what the exporter relies on."""

from gateway.core.counters import Counters


def test_every_counter_starts_at_nothing():
    counters = Counters(3)
    for name in Counters.__slots__:
        value = getattr(counters, name)
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        assert not any(parts), name


def test_lists_and_dicts_are_not_shared():
    counters = Counters(2)
    counters.decisions[0] += 1
    counters.ended["OK"] += 1
    others = (counters.batches, counters.snapshots, counters.clamped, counters.tokens)
    assert all(value == [0, 0] for value in others)
    assert (Counters(2).decisions, Counters(2).ended) == ([0, 0], {"OK": 0})
