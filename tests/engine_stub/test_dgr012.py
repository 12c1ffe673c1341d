"""DGR-012's tick policy and KV manager: eviction, budgets, bounded runs, byte identity."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_stub.backend import BackendInfo, registry
from engine_stub.config import StubConfig
from engine_stub.recipe import PartialShardsError, check_whole, recipe_fingerprint
from engine_stub.running import NoProgressError, run_to_completion, tick_bound
from engine_stub.scheduler import Scheduler, SchedulerConfig
from tests.engine_stub.test_profiles import profile
from tests.support.paged_model import PagedDriver, PagedModel, expected
from tests.support.stub_scheduler import request


def dgr(**changes):
    return PagedDriver(profile("dgr012", **changes))


class TestEviction:
    def test_the_youngest_loses_its_kv_and_the_others_never_notice(self):
        driver = dgr(max_active=3, kv_tokens=60)
        requests = [request(name, prompt_len=12, max_tokens=30) for name in "abc"]
        driver.submit(*requests)
        driver.run()
        assert driver.finishes == {"a": ["length"], "b": ["cache_miss"], "c": ["cache_miss"]}
        assert driver.tokens["a"] == expected(requests[0])
        assert set(driver.gaps("a")) == {1}
        for req in requests[1:]:
            got = driver.tokens[req.id]
            assert got == expected(req)[: len(got)], "an exact prefix"
        assert driver.scheduler.pool.high_water <= 60

    def test_a_victim_can_be_prefilled_again_with_what_it_got(self):
        driver = dgr(max_active=2, kv_tokens=40)
        first, victim = (request(name, prompt_len=8, max_tokens=24) for name in ("first", "victim"))
        driver.submit(first, victim)
        driver.run()
        assert driver.finishes["victim"] == ["cache_miss"]
        got = driver.tokens["victim"]
        again = request("again", max_tokens=24 - len(got))
        again = type(again)(id="again", prompt_ids=[*victim.prompt_ids, *got], max_tokens=24 - len(got))
        driver.submit(again)
        driver.run()
        assert got + driver.tokens["again"] == expected(victim)

    def test_a_prompt_waits_in_its_slot_while_older_ones_hold_the_kv(self):
        driver = dgr(max_active=2, kv_tokens=32)
        driver.submit(request("a", prompt_len=20, max_tokens=12), request("b", prompt_len=20, max_tokens=12))
        driver.run()
        assert driver.finishes == {"a": ["length"], "b": ["length"]}
        assert driver.row_steps["b"][0] > driver.row_steps["a"][-1]

    def test_a_tick_that_evicts_starts_nothing_new(self):
        driver = dgr(max_active=4, kv_tokens=64, max_prefills_per_tick=None)
        driver.submit(*(request(f"r{number}", prompt_len=12, max_tokens=40) for number in range(8)))
        seen = 0
        while (plan := driver.step()) is not None:
            misses = driver.scheduler.finishes["cache_miss"]
            if misses > seen:
                assert not plan.prefills
                seen = misses
        assert seen > 0
        assert all(len(ends) == 1 for ends in driver.finishes.values())
        assert len(driver.finishes) == 8


class TestBoundedRun:
    def test_it_returns_the_tokens_of_all(self):
        scheduler = Scheduler(profile("dgr012"))
        requests = [request(f"r{number}", max_tokens=5 + number) for number in range(5)]
        for req in requests:
            scheduler.submit(req)
        tokens = run_to_completion(scheduler, PagedModel(scheduler.config), tick_bound(requests))
        assert tokens == {req.id: expected(req) for req in requests}

    def test_it_raises_when_nothing_can_be_planned(self):
        scheduler = Scheduler(SchedulerConfig(hold_until_queued=2))
        scheduler.submit(request("a"))
        with pytest.raises(NoProgressError, match="1 sequences are live and nothing can be planned"):
            run_to_completion(scheduler, PagedModel(scheduler.config), 100)

    def test_it_raises_when_the_ticks_run_out(self):
        scheduler = Scheduler(SchedulerConfig())
        scheduler.submit(request("a", max_tokens=10))
        with pytest.raises(NoProgressError, match="after 9 ticks"):
            run_to_completion(scheduler, PagedModel(scheduler.config), 9)
        assert scheduler.steps == 9

    def test_nothing_to_do_is_done(self):
        scheduler = Scheduler(SchedulerConfig())
        assert run_to_completion(scheduler, PagedModel(scheduler.config), 1) == {}


class TestRecipe:
    INFO = BackendInfo(
        name="x", numerics="exact", batch_invariant=True, kv_bytes_per_token=8, recipe={"layers": 2, "weights": "abc"}
    )

    def with_recipe(self, **recipe):
        return BackendInfo(name="y", numerics="exact", batch_invariant=True, kv_bytes_per_token=1, recipe=recipe)

    def test_equal_recipes_have_equal_fingerprints_whatever_the_order_of_keys(self):
        assert recipe_fingerprint(self.INFO) == recipe_fingerprint(self.with_recipe(weights="abc", layers=2))
        assert len(recipe_fingerprint(self.INFO)) == 32

    @pytest.mark.parametrize("recipe", [{}, {"layers": 3, "weights": "abc"}, {"layers": 2, "weights": "abd"}])
    def test_other_recipes_have_others(self, recipe):
        assert recipe_fingerprint(self.INFO) != recipe_fingerprint(self.with_recipe(**recipe))

    @pytest.mark.parametrize(("index", "count"), [(0, 2), (1, 2), (3, 8)])
    def test_a_partial_shard_is_refused(self, index, count, monkeypatch):
        info = BackendInfo(
            name="half",
            numerics="exact",
            batch_invariant=True,
            kv_bytes_per_token=8,
            shard_index=index,
            shard_count=count,
        )
        with pytest.raises(PartialShardsError, match=f"shard {index} of {count}"):
            check_whole(info)
        shard = PagedModel(SchedulerConfig())
        shard.info = info
        monkeypatch.setattr(registry, "_make", lambda _name, _config: shard)
        with pytest.raises(registry.BackendError, match="load the whole model"):
            registry.create("half", StubConfig())

    def test_a_whole_model_is_not(self):
        check_whole(self.INFO)


SHAPES = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 14)), min_size=1, max_size=9)


@settings(max_examples=120, deadline=None)
@given(SHAPES, st.integers(1, 5), st.integers(26, 60), st.sampled_from([1, 4]), st.integers(0, 40))
def test_single_never_exceeds_its_budget_and_ends_everything_once(shapes, slots, kv_tokens, block_size, abort_at):
    driver = dgr(max_active=slots, kv_tokens=kv_tokens, block_size=block_size, max_queue_depth=None)
    requests = {}
    for number, (prompt_len, max_tokens) in enumerate(shapes):
        req = request(f"r{number}", prompt_len, max_tokens)
        if driver.submit(req)[0].is_accepted:
            requests[req.id] = req
        if number % 2:
            driver.step()
    aborted = set()
    for number in range(abort_at):
        if driver.step() is None:
            break
        live = sorted(driver.scheduler.live_ids)
        if live and number == abort_at - 1:
            driver.scheduler.abort(live[0])
            aborted.add(live[0])
    driver.run()
    pool = driver.scheduler.pool
    assert pool.high_water <= pool.total
    assert driver.scheduler.kv.high_water_tokens <= kv_tokens
    assert (pool.used, driver.scheduler.kv.used_tokens) == (0, 0)
    for name, req in requests.items():
        ends = driver.finishes[name]
        assert ends in ([["length"], ["cache_miss"]] if name not in aborted else [[]])
        whole = expected(req)
        assert driver.tokens[name] == (whole if ends == ["length"] else whole[: len(driver.tokens[name])])
