"""Shares of tenants: by weight while they have a backlog, no credit for idleness, nobody shut out."""

import random
from collections import Counter

import pytest

from tests.support.queueing import ANY, Waiting


def backlog(waiting, tenant, count, tokens=100, **more):
    return [waiting.push(tenant, tokens=tokens, **more) for _ in range(count)]


def served_tokens(waiting, services):
    """Tokens served by tenant."""
    tokens = Counter()
    for _ in range(services):
        entry = waiting.serve()
        tokens[entry.account.name] += entry.service_tokens
    return tokens


def test_equal_tenants_take_turns():
    waiting = Waiting(order="fcfs")
    backlog(waiting, "a", 3)
    backlog(waiting, "b", 3)
    assert [entry.account.name for entry in waiting.order()] == list("ababab")
    waiting.serve()
    assert [entry.account.name for entry in waiting.order()] == list("babab"), "among equals the one served last waits"


def test_a_newcomer_is_next_however_long_the_others_backlog_is():
    waiting = Waiting(order="fcfs")
    backlog(waiting, "flood", 500)
    served_tokens(waiting, 100)
    newcomer = waiting.push("small")
    assert newcomer in waiting.order()[:2]


def test_a_newcomer_gets_one_entry_in_and_then_takes_turns():
    waiting = Waiting(order="fcfs")
    backlog(waiting, "a", 10)
    backlog(waiting, "b", 10)
    served_tokens(waiting, 4)
    backlog(waiting, "new", 3)
    assert [entry.account.name for entry in waiting.order()][:7] == ["new", "a", "b", "new", "a", "b", "new"]


@pytest.mark.parametrize("order", ["fcfs", "aging", "spf", "hrrn"])
def test_tokens_are_shared_by_weight_while_there_is_a_backlog(order):
    rng = random.Random(11)
    waiting = Waiting(weights={"gold": 3, "bronze": 1}, order=order, max_wait_s=None)
    for _ in range(400):
        # The heavier tenant also sends the longer requests: entries are no measure of a share.
        waiting.push("gold", tokens=rng.randint(100, 4000), prefill_ms=rng.uniform(1, 100))
        waiting.push("bronze", tokens=rng.randint(10, 400), prefill_ms=rng.uniform(1, 100))
    tokens = served_tokens(waiting, 300)
    assert waiting.tenants.account("gold", waiting.now).tag, "it was charged"
    assert 2.7 < tokens["gold"] / tokens["bronze"] < 3.3


def test_shares_hold_with_many_tenants_of_different_weights():
    rng = random.Random(5)
    weights = {"a": 0.5, "b": 1, "c": 2, "d": 4}
    waiting = Waiting(weights=weights, order="fcfs", max_wait_s=None)
    for _ in range(600):
        for tenant in weights:
            waiting.push(tenant, tokens=rng.randint(1, 1000))
    tokens = served_tokens(waiting, 900)
    for tenant, weight in weights.items():
        assert tokens[tenant] / sum(tokens.values()) == pytest.approx(weight / 7.5, rel=0.1)


def test_a_tenant_that_was_idle_gets_its_share_and_no_more():
    waiting = Waiting(order="fcfs", max_wait_s=None)
    backlog(waiting, "idle", 1)
    backlog(waiting, "busy", 600)
    served_tokens(waiting, 300)
    backlog(waiting, "idle", 100)
    tokens = served_tokens(waiting, 100)
    assert abs(tokens["idle"] - tokens["busy"]) <= 200, "one entry of each to and fro"


def test_the_idle_ones_share_goes_to_the_others():
    waiting = Waiting(weights={"a": 3, "b": 1, "idle": 100}, order="fcfs", max_wait_s=None)
    backlog(waiting, "a", 200)
    backlog(waiting, "b", 200)
    tokens = served_tokens(waiting, 200)
    assert 2.7 < tokens["a"] / tokens["b"] < 3.3


def test_a_tenant_pays_for_a_large_entry_before_it_is_next_again():
    waiting = Waiting(order="fcfs")
    backlog(waiting, "large", 2, tokens=1000)
    backlog(waiting, "small", 12, tokens=100)
    names = [entry.account.name for entry in waiting.order()]
    assert names[:2] == ["large", "small"]
    assert names.index("large", 1) == 11


def test_leaving_without_service_costs_nothing():
    waiting = Waiting(order="fcfs")
    a, b = backlog(waiting, "a", 3, tokens=500), backlog(waiting, "b", 3, tokens=500)
    waiting.queue.remove(a[0])
    assert waiting.order() == [a[1], b[0], a[2], b[1], b[2]]


def test_a_tenant_that_was_passed_over_keeps_the_credit_of_one_entry():
    """Its rank was shut while others got thousands of tokens. When it opens, it must not have the gateway to itself."""
    waiting = Waiting(order="fcfs", max_wait_s=None)
    backlog(waiting, "pinned", 300, pin=0)
    backlog(waiting, "other", 600)
    for _ in range(200):
        assert waiting.serve({None}).account.name == "other"
    first = waiting.serve()
    assert first.account.name == "pinned", "it is behind"
    tokens = served_tokens(waiting, 100)
    assert abs(tokens["pinned"] - tokens["other"]) <= 200


def waits_beside_a_flood(**settings):
    """Longest waits (s) of a tenant that sends one request a second and of one that sent 500 s of service at once."""
    waiting = Waiting(order="aging", **settings)
    backlog(waiting, "flood", 2000)
    longest = Counter()

    def waited(entry):
        longest[entry.account.name] = max(longest[entry.account.name], waiting.now - entry.enqueued_at)

    for service in range(1600):
        if service % 4 == 0:
            waiting.push("light")
        waited(waiting.serve())
        waiting.now += 0.25
    for entry in waiting.order():
        waited(entry)
    return longest


def test_a_flood_that_is_overdue_costs_a_light_tenant_nothing():
    longest = waits_beside_a_flood(max_wait_s=10)
    assert longest["flood"] > 300
    assert longest["light"] <= 0.25, "one service, at most"
    assert longest == waits_beside_a_flood(max_wait_s=None)


def test_without_fairness_a_flood_that_is_overdue_goes_first():
    """What the test above is about: the same traffic with one rule for all."""
    assert waits_beside_a_flood(max_wait_s=10, fair=False)["light"] > 10


def test_tokens_are_shared_by_weight_while_all_is_overdue():
    rng = random.Random(12)
    waiting = Waiting(weights={"gold": 3, "bronze": 1}, order="spf", max_wait_s=10)
    for _ in range(400):
        waiting.push("gold", tokens=rng.randint(100, 4000), prefill_ms=rng.uniform(1, 100))
        waiting.push("bronze", tokens=rng.randint(10, 400), prefill_ms=rng.uniform(1, 100))
    waiting.now += 11.0
    tokens = served_tokens(waiting, 300)
    assert 2.7 < tokens["gold"] / tokens["bronze"] < 3.3


def test_an_overdue_entry_waits_for_its_tenants_turn():
    waiting = Waiting(order="spf", max_wait_s=10)
    backlog(waiting, "a", 1, tokens=1000)
    waiting.serve()
    old = waiting.push("a", prefill_ms=90.0)
    waiting.now += 11.0
    new, *others = waiting.push("a", prefill_ms=1.0), *backlog(waiting, "b", 5)
    assert waiting.order() == [*others, old, new]


def test_late_service_is_in_turn_and_gives_the_idle_no_credit():
    waiting = Waiting(order="fcfs", max_wait_s=None, timeout_s=1, timeout_action="delay")
    backlog(waiting, "a", 100)
    waiting.now += 11.0
    waiting.queue.expired(waiting.now)
    served_tokens(waiting, 100)
    backlog(waiting, "new", 50)
    backlog(waiting, "a", 50)
    tokens = served_tokens(waiting, 40)
    assert abs(tokens["new"] - tokens["a"]) <= 200


def test_a_newcomer_does_not_wait_for_a_tenant_that_pays_for_its_last_service():
    waiting = Waiting(order="fcfs")
    backlog(waiting, "large", 1, tokens=9000)
    waiting.serve()
    large, small = backlog(waiting, "large", 1, tokens=9000), backlog(waiting, "small", 2)
    assert waiting.order() == [*small, *large]


def test_without_fairness_there_is_one_order_and_no_charge():
    waiting = Waiting(weights={"a": 100}, order="fcfs", fair=False)
    entries = [waiting.push(tenant, priority=priority) for tenant, priority in (("b", 1), ("b", 0), ("a", 1), ("b", 0))]
    assert waiting.order() == [entries[1], entries[3], entries[0], entries[2]]
    while waiting.serve() is not None:
        waiting.queue.check()
    assert entries[0].account.tag == 0


def test_being_alone_in_the_queue_is_not_free():
    """An entry that leaves before any other comes is charged from the virtual time on, as all are."""
    waiting = Waiting(order="fcfs", max_wait_s=None)
    backlog(waiting, "busy", 3)
    while waiting.serve() is not None:
        pass
    waiting.push("alone")
    waiting.serve()
    alone, other = (waiting.tenants.account(name, waiting.now) for name in ("alone", "other"))
    a, b = waiting.push("alone"), waiting.push("other")
    assert alone.tag > other.tag > 0
    assert waiting.order() == [b, a]


def test_priorities_order_one_tenants_entries_only():
    waiting = Waiting(order="fcfs")
    a = [waiting.push("a", priority=5), waiting.push("a", priority=4)]
    b = [waiting.push("b", priority=-100), waiting.push("b", priority=-100)]
    assert waiting.order() == [a[1], b[0], a[0], b[1]]


@pytest.mark.parametrize("weight", [1e-300, 1e-9, 1e9, 1e300])
def test_extreme_weights_keep_an_order(weight):
    waiting = Waiting(weights={"odd": weight}, order="fcfs", max_wait_s=None)
    backlog(waiting, "odd", 50)
    backlog(waiting, "plain", 50)
    order = waiting.order()
    assert len(order) == 100
    names = [waiting.serve().account.name for _ in range(100)]
    assert names == [entry.account.name for entry in order]
    if weight > 1:
        # Every service costs something, so even then the others' turn comes.
        assert names[:49] in (["odd"] * 49, ["odd", "plain", *["odd"] * 47])


def test_fair_turns_survive_years_of_service():
    """Tags grow for ever; the small steps of a heavy tenant must not vanish in them."""
    waiting = Waiting(weights={"heavy": 1e6, "light": 1e-6}, order="fcfs", max_wait_s=None)
    for _ in range(20):
        waiting.push("light", tokens=1e6)
    for _ in range(19):
        waiting.serve()
    backlog(waiting, "heavy", 10, tokens=1)
    backlog(waiting, "twin", 10, tokens=1)
    before = waiting.tenants.account("heavy", waiting.now).tag
    entry = next(e for e in waiting.queue.in_order(waiting.now, ANY) if e.account.name == "heavy")
    waiting.queue.taken(entry)
    assert waiting.tenants.account("heavy", waiting.now).tag > before


def test_the_foreseen_order_is_that_of_repeated_service_with_overdue_entries_too():
    rng = random.Random(3)
    waiting = Waiting(weights={"a": 2, "c": 0.3}, order="aging", max_wait_s=5)
    for _ in range(60):
        waiting.push(rng.choice("abcd"), tokens=rng.randint(1, 900), pin=rng.choice((None, None, 0, 1)))
        waiting.now += rng.uniform(0, 0.2)
    lanes = {None, 1}
    expected = waiting.order(lanes)
    assert sum(entry.enqueued_at <= waiting.now - 5 for entry in expected) > 5
    assert [waiting.serve(lanes) for _ in expected] == expected
    assert waiting.serve(lanes) is None
