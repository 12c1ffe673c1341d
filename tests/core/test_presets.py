"""Presets against the peers' published rules, written here a second time; completing of settings."""

from random import Random

import msgspec
import pytest

from gateway.config.schema import Policy as PolicySettings
from gateway.config.schema import PresetName, TieTolerance
from gateway.core.formula import FormulaError
from gateway.core.presets import PRESETS, PolicyError, resolve
from tests.support.policies import charge, make_policy, make_table, randomise, report
from tests.support.states import predict

TRIALS = 300


def test_every_name_of_the_schema_is_a_preset():
    assert set(PRESETS) == set(PresetName.__args__)
    for name in PRESETS:
        assert resolve(PolicySettings(preset=name)).preset == name


# ---- the peers ----------------------------------------------------------------------------------


class SmgClient:
    """smg-project/smg engine client: strict minimum in scan order, the scan's start moves on each time."""

    def __init__(self):
        self.scan_start = 0

    def score(self, own, running, waiting, usage, _gateways):
        score = float(max(own, waiting + running))
        if waiting > 0:
            score += waiting * 6.0 * max(0.0, usage - 0.5)
        return score

    def select(self, ranks, gateways):
        best, best_score = None, None
        for step in range(len(ranks)):
            rank = (self.scan_start + step) % len(ranks)
            score = self.score(*ranks[rank], gateways)
            if best_score is None or score < best_score:
                best, best_score = rank, score
        self.scan_start += 1
        return best


class VllmClient(SmgClient):
    """vllm v1 core client with its internal balancer: own requests count once per frontend."""

    def score(self, own, running, waiting, usage, gateways):
        return max(gateways * own, waiting + running) + 6.0 * waiting * max(0.0, usage - 0.5)


@pytest.mark.parametrize(("preset", "peer", "gateways"), [("smg", SmgClient, 1), ("vllm", VllmClient, 3)])
def test_rotating_peers(preset, peer, gateways):
    random = Random(7)
    for _ in range(TRIALS // 10):
        table = make_table(random.randrange(1, 17))
        policy = make_policy(table, PolicySettings(preset=preset), gateways=gateways)
        reference = peer()
        for _ in range(10):
            randomise(table, random)
            # Small numbers make ties, which is where the scan order matters.
            if random.random() < 0.5:
                for column in (table.in_flight, table.reported_waiting, table.reported_running):
                    column[:] = [value % 3 for value in column]
            ranks = list(
                zip(table.in_flight, table.reported_running, table.reported_waiting, table.kv_usage, strict=True)
            )
            decision = policy.decide(0.0, prompt_tokens=10, max_tokens=10)
            assert decision.costs == pytest.approx([reference.score(*rank, gateways) for rank in ranks])
            assert decision.rank == reference.select(ranks, gateways)


def test_smg_ignores_usage_without_waiting_and_waits_for_no_report():
    table = make_table(3)
    charge(table, 0, prompt_tokens=150_000)
    report(table, 1, running=2, waiting=0, kv=0.9)
    report(table, 2, running=2, waiting=1, kv=0.9)
    decision = make_policy(table, PolicySettings(preset="smg")).decide(0.0, prompt_tokens=10, max_tokens=10)
    assert decision.costs == [1, 2, pytest.approx(3 + 6 * 0.4)]


class VllmOldClient:
    """vllm before mid 2026: [waiting, running] pairs, each own send adds the number of frontends to waiting."""

    def __init__(self, pairs, gateways):
        self.pairs = [list(pair) for pair in pairs]
        self.gateways = gateways

    def select(self):
        scores = [4 * waiting + running for waiting, running in self.pairs]
        rank = scores.index(min(scores))
        self.pairs[rank][0] += self.gateways
        return rank


def test_vllm_4w_r():
    random = Random(8)
    for _ in range(TRIALS):
        table = make_table(random.randrange(1, 17))
        randomise(table, random)
        table.sent_since_snapshot[:] = [0] * table.size
        gateways = random.choice([1, 1, 2, 5])
        policy = make_policy(table, PolicySettings(preset="vllm_4w_r"), gateways=gateways)
        pairs = zip(table.reported_waiting, table.reported_running, strict=True)
        reference = VllmOldClient(pairs, gateways)
        for _ in range(4):
            decision = policy.decide(0.0, prompt_tokens=10, max_tokens=10)
            assert decision.rank == reference.select()
            charge(table, decision.rank)


def test_lmetric():
    random = Random(9)
    for _ in range(TRIALS):
        table = make_table(random.randrange(1, 17))
        randomise(table, random)
        prompt, cached = random.randrange(1, 3000), random.choice([0, 0, 500])
        decision = make_policy(table).decide(0.0, prompt_tokens=prompt, max_tokens=1, cached_tokens=cached)
        pending = [queued + max(1, prompt - cached) for queued in table.queued_tokens]
        costs = [tokens * (n + 1) for tokens, n in zip(pending, table.in_flight, strict=True)]
        assert decision.costs == costs
        assert costs[decision.rank] == min(costs)


class Predicted:
    """The formula of our own simulations for ranks that run independently, in seconds and one rank at a time."""

    def __init__(self, ranks):
        self.ranks = ranks

    def queued_s(self, pending_us, head_us, waits_s):
        """Half of the head's time counts as done, and at most its prediction."""
        done_s = min(head_us / 1e6, 0.5 * waits_s) if waits_s is not None else 0.0
        return pending_us / 1e6 - done_s

    def costs_ms(self, prefill_s):
        queued = [self.queued_s(pending, head, waits) for pending, head, waits, _ in self.ranks]
        u = 1 / (1 + min(queued) / 0.1)
        return [
            1000 * (q * (1 + 0.2 * u * n) + prefill_s * (1 + 0.4 * u * n))
            for q, (_, _, _, n) in zip(queued, self.ranks, strict=True)
        ]


def test_predicted():
    random = Random(11)
    for _ in range(TRIALS):
        table = make_table(random.randrange(1, 17))
        randomise(table, random)
        predict(table, random)
        now = 100.0 + random.choice([0.0, 0.1, 3.0])
        waits = [None if since is None else now - since for since in table.head_since]
        reference = Predicted(list(zip(table.pending_us, table.head_us, waits, table.in_flight, strict=True)))
        prefill_ms = random.choice([0.0, random.uniform(0, 900)])
        policy = make_policy(table, PolicySettings(preset="predicted"))
        decision = policy.decide(now, prompt_tokens=10, max_tokens=10, prefill_ms=prefill_ms)
        costs = reference.costs_ms(prefill_ms / 1e3)
        assert decision.costs == pytest.approx(costs, abs=1e-6)
        assert costs[decision.rank] == pytest.approx(min(costs), abs=1e-6)


def test_predicted_spreads_a_burst_by_time_and_breaks_ties_at_random():
    table = make_table(4)
    policy = make_policy(table, PolicySettings(preset="predicted"))
    firsts = {policy.decide(0.0, prompt_tokens=10, max_tokens=1, prefill_ms=5.0).rank for _ in range(60)}
    assert firsts == {0, 1, 2, 3}
    for prefill_us in (90_000, 10_000, 20_000, 30_000):
        rank = policy.decide(0.0, prompt_tokens=10, max_tokens=1, prefill_ms=prefill_us / 1e3).rank
        charge(table, rank)
        table.pending_us[rank] += prefill_us
        table.set_head(rank, 0.0, prefill_us)
    assert table.in_flight == [1, 1, 1, 1]
    next_rank = policy.decide(0.0, prompt_tokens=10, max_tokens=1, prefill_ms=5.0).rank
    assert table.pending_us[next_rank] == 10_000


def test_least_in_flight():
    random = Random(10)
    for _ in range(TRIALS):
        table = make_table(random.randrange(1, 17))
        randomise(table, random)
        decision = make_policy(table, PolicySettings(preset="least_in_flight")).decide(
            0.0, prompt_tokens=10, max_tokens=10
        )
        assert table.in_flight[decision.rank] == min(table.in_flight)


# ---- completing settings ------------------------------------------------------------------------


def test_keys_beside_the_preset_win():
    tolerance = TieTolerance(relative=0.1)
    resolved = resolve(
        PolicySettings(preset="smg", tie_break="first", objective="max", tie_tolerance=tolerance, seed=4)
    )
    assert resolved.formula.text == PRESETS["smg"].cost
    assert (resolved.picker, resolved.tie_break, resolved.objective) == ("argmin", "first", "max")
    assert (resolved.tie_tolerance, resolved.seed) == (tolerance, 4)
    assert resolve(PolicySettings(preset="lmetric", cost="in_flight", picker="p2c")).formula.text == "in_flight"


def test_defaults_of_a_cost_of_ones_own():
    resolved = resolve(PolicySettings(cost="waiting"))
    assert (resolved.preset, resolved.picker, resolved.tie_break, resolved.objective) == (
        None,
        "argmin",
        "random",
        "min",
    )
    assert resolved.tie_tolerance == TieTolerance(relative=1e-9, absolute=0.0)


def test_costless_pickers_drop_the_presets_cost():
    resolved = resolve(PolicySettings(preset="lmetric", picker="random"))
    assert (resolved.picker, resolved.formula) == ("random", None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (PolicySettings(), "picker argmin needs policy.cost or a policy.preset"),
        (PolicySettings(picker="p2c"), "picker p2c needs policy.cost"),
        (PolicySettings(preset="random", picker="argmin"), "picker argmin needs policy.cost"),
        (PolicySettings(picker="random", cost="in_flight"), "picker random uses no cost"),
        (PolicySettings(preset="round_robin", cost="in_flight"), "picker round_robin uses no cost"),
    ],
)
def test_keys_that_make_no_policy(settings, message):
    with pytest.raises(PolicyError, match=message):
        resolve(settings)


def test_a_bad_cost_names_its_column():
    with pytest.raises(FormulaError) as caught:
        resolve(PolicySettings(cost="1 + waitin"))
    assert caught.value.column == 5


def test_presets_are_plain_settings():
    # What is shown of a preset can be pasted into a configuration file.
    for name, preset in PRESETS.items():
        shown = {key: value for key, value in msgspec.to_builtins(preset).items() if value is not None}
        pasted = resolve(msgspec.convert(shown, PolicySettings))
        named = resolve(PolicySettings(preset=name))
        assert (pasted.picker, pasted.tie_break) == (named.picker, named.tie_break)
        assert (pasted.formula and pasted.formula.text) == (named.formula and named.formula.text)
