"""Accounts of tenants: who has one, for how long, and what share it has."""

import random

import msgspec
import pytest

from gateway.config.scheduling import Tenants as Settings
from gateway.core.tenants import OVERFLOW, RECHECK_S, Account, Tenants


def make_tenants(**settings):
    return Tenants(msgspec.convert(settings, Settings, strict=False))


def test_named_tenants_have_their_settings_and_others_the_defaults():
    tenants = make_tenants(default={"weight": 2, "max_in_flight": 7}, named={"gold": {"weight": 5}})
    gold, other, nameless = (tenants.account(name, 0.0) for name in ("gold", "other", ""))
    assert (gold.name, gold.weight, gold.settings.max_in_flight) == ("gold", 5.0, None)
    assert (other.name, other.weight, other.settings.max_in_flight) == ("other", 2.0, 7)
    assert (nameless.name, nameless.weight) == ("", 2.0)


def test_a_tenant_keeps_its_account():
    tenants = make_tenants()
    assert tenants.account("a", 0.0) is tenants.account("a", 1.0)
    assert tenants.account("a", 0.0) is not tenants.account("b", 0.0)
    assert tenants.account("a", 2.5).last_seen_at == 2.5


def test_shares_are_weights_among_the_active():
    tenants = make_tenants(named={"gold": {"weight": 3}, "unseen": {"weight": 100}})
    gold, other = tenants.account("gold", 0.0), tenants.account("other", 0.0)
    assert tenants.share(gold, 0.0) == 0.75
    assert tenants.share(other, 0.0) == 0.25
    assert tenants.share(tenants.account("third", 0.0), 0.0) == 0.2
    assert tenants.active() == [gold, other, tenants.account("third", 0.0)]


def test_an_idle_tenant_counts_until_active_s_after_its_last_request():
    tenants = make_tenants(active_s=5)
    a = tenants.account("a", 0.0)
    b = tenants.account("b", 1.0)
    tenants.account("a", 3.0)
    assert tenants.share(b, 5.5) == 0.5
    assert tenants.share(a, 6.0) == 1.0, "b is idle"
    assert tenants.share(b, 6.0) == 0.5, "whoever asks counts itself"
    assert tenants.share(b, 8.0) == 1.0, "a is idle, too"


@pytest.mark.parametrize("count", ["in_flight", "queued", "prompt_tokens", "kv_tokens"])
def test_a_tenant_with_something_queued_or_in_flight_counts_however_long_ago_it_was_seen(count):
    tenants = make_tenants(active_s=5)
    busy, other = tenants.account("busy", 0.0), tenants.account("other", 0.0)
    setattr(busy, count, 1)
    for now in range(10, 100):
        assert tenants.share(other, float(now)) == 0.5
    assert tenants.account("busy", 99.0) is busy
    setattr(busy, count, 0)
    assert tenants.share(other, 99.0 + 5.0) == 1.0


def test_an_end_is_noticed_soon():
    tenants = make_tenants(active_s=5)
    busy = tenants.account("busy", 0.0)
    busy.in_flight = 1
    assert tenants.share(busy, 20.0) == 1.0
    busy.in_flight = 0
    other = tenants.account("other", 20.0 + RECHECK_S)
    assert tenants.share(other, 20.0 + RECHECK_S) == 1.0


def test_beyond_the_bound_newcomers_share_one_account():
    tenants = make_tenants(max_tracked=2, named={"gold": {}}, default={"weight": 2})
    a, b = tenants.account("a", 0.0), tenants.account("b", 0.0)
    shared = tenants.account("c", 0.0)
    assert shared is tenants.account("d", 0.0)
    assert (shared.name, shared.weight, tenants.overflowed) == (OVERFLOW, 2.0, 2)
    assert tenants.account("a", 0.0) is a
    assert tenants.account("gold", 0.0).name == "gold", "named ones always have theirs"
    assert tenants.account("", 0.0).name == ""
    assert tenants.share(b, 0.0) == pytest.approx(2 / 9)


def test_idle_accounts_are_recycled_and_busy_ones_are_not():
    tenants = make_tenants(max_tracked=2, active_s=5)
    busy, idle = tenants.account("busy", 0.0), tenants.account("idle", 0.0)
    busy.in_flight = 1
    assert tenants.account("new", 4.9).name == OVERFLOW
    assert tenants.account("new", 5.0).name == "new"
    assert tenants.account("busy", 5.0) is busy
    assert tenants.account("idle", 5.0).name == OVERFLOW
    assert idle.name == "idle", "what is still held of it stays what it was"


def test_a_tenant_that_is_called_like_the_shared_account_is_one_of_its_own():
    tenants = make_tenants(max_tracked=1, active_s=5)
    own = tenants.account(OVERFLOW, 0.0)
    shared = tenants.account("other", 0.0)
    assert own is not shared
    tenants.account(OVERFLOW, 4.0)
    assert tenants.share(shared, 6.0) == 0.5, "the shared one is idle"
    assert tenants.account(OVERFLOW, 6.0) is own


@pytest.mark.parametrize("weight", [1e-300, 1e-9, 1e300])
def test_extreme_weights_still_make_shares(weight):
    tenants = make_tenants(named={"odd": {"weight": weight}})
    odd, plain = tenants.account("odd", 0.0), tenants.account("plain", 0.0)
    assert 0 < tenants.share(odd, 0.0) <= 1
    assert 0 < tenants.share(plain, 0.0) <= 1
    assert (tenants.share(odd, 0.0) > tenants.share(plain, 0.0)) == (weight > 1)


def test_any_number_of_tenants_leaves_bounded_state_and_exact_sums():
    rng = random.Random(2)
    tenants = make_tenants(max_tracked=50, active_s=3, named={"gold": {"weight": 0.1}, "tin": {"weight": 1 / 3}})
    now, live = 0.0, []
    for step in range(20_000):
        now += rng.random() / 50
        name = rng.choice(("gold", "tin", "", f"t{rng.randrange(200)}", f"once{step}"))
        account = tenants.account(name, now)
        if rng.random() < 0.5:
            account.in_flight += 1
            live.append(account)
        while len(live) > 20:
            live.pop(rng.randrange(len(live))).in_flight -= 1
        assert len(tenants._tracked) <= 50
        assert len(tenants._due) <= 54
        assert 0 < tenants.share(account, now) <= 1
    assert tenants.overflowed > 0
    for account in live:
        account.in_flight -= 1
    later = now + 100.0
    tenants.share(account, later)
    assert tenants.active() == []
    assert tenants._active_units == 0
    assert tenants._tracked == {}
    assert tenants.share(account, later) == 1.0


def test_the_work_per_call_does_not_grow_with_the_tenants(monkeypatch):
    """Accounts are looked at when they are due, each at most once a second: no scan per request."""
    tenants = make_tenants(active_s=5, max_tracked=1024)
    for number in range(1024):
        tenants.account(f"t{number}", 0.0)
    looked_at = []
    monkeypatch.setattr(Account, "is_busy", property(lambda account: looked_at.append(account) or True))
    for call in range(3000):
        tenants.account("t1", 6.0 + call / 1000)
    assert 1000 < len(looked_at) < 1024 * 4
