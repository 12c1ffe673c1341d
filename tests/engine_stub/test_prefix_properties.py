"""Random histories over random configurations with a model that reads its text from the paged pool."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_stub.scheduler import Request, SchedulerConfig
from tests.support.paged_model import PagedDriver, expected

CONFIGS = st.fixed_dictionaries(
    {
        "max_active": st.integers(1, 6),
        "max_batch_size": st.one_of(st.none(), st.integers(1, 4)),
        "token_budget": st.one_of(st.none(), st.integers(1, 24)),
        "prefill_chunk_size": st.one_of(st.none(), st.integers(1, 9)),
        "max_prefills_per_tick": st.one_of(st.none(), st.integers(1, 3)),
        "kv_tokens": st.integers(48, 160),
        "block_size": st.sampled_from([1, 4, 16]),
        "kv_admission": st.sampled_from(["reserve", "optimistic", "optimistic", "single"]),
        "prefix_cache": st.sampled_from([True, True, False]),
        "force_batched": st.booleans(),
    }
)
# Prompts are cut out of a few texts, so that they share beginnings of all lengths.
SUBMIT = st.tuples(
    st.just("submit"), st.integers(0, 2), st.integers(1, 24), st.integers(0, 3), st.integers(1, 12), st.booleans()
)
ABORT = st.tuples(st.sampled_from(["abort", "abort-in-step"]), st.integers(0, 9))
FAIL = st.tuples(st.just("fail"))
RESET = st.tuples(st.just("reset"))
STEP = st.tuples(st.just("step"))
ACTIONS = st.lists(st.one_of(SUBMIT, SUBMIT, SUBMIT, ABORT, STEP, STEP, STEP, FAIL, RESET), max_size=50)


class History(PagedDriver):
    """What was accepted, and what has ended without a row of its own."""

    def __init__(self, config):
        super().__init__(SchedulerConfig(**config))
        self.requests = {}
        self.aborted = set()

    def start(self, text, length, tail, max_tokens, uses_cache):
        prompt = [(17 * text + place * place) % 50 for place in range(length)] + [900 + tail] * tail
        req = Request(
            id=f"r{len(self.requests)}", prompt_ids=prompt, max_tokens=max_tokens, uses_prefix_cache=uses_cache
        )
        if self.submit(req)[0].is_accepted:
            self.requests[req.id] = req

    def cancel(self, number):
        live = sorted(self.scheduler.live_ids)
        if live:
            name = live[number % len(live)]
            assert self.scheduler.abort(name)
            assert not self.scheduler.abort(name)
            self.aborted.add(name)

    def fail(self):
        plan = self.scheduler.plan()
        if plan is not None:
            rows = self.scheduler.fail(plan)
            for sequence, finish in zip(rows.sequences, rows.finishes, strict=True):
                self.finishes[sequence.id].append(finish)
        self.scheduler.check()

    def act(self, action, *details):
        match action:
            case "submit":
                self.start(*details)
            case "abort":
                self.cancel(*details)
            case "abort-in-step":
                self.step(between=lambda: self.cancel(*details))
            case "fail":
                self.fail()
            case "reset":
                self.scheduler.reset_prefix_cache()
            case "step":
                self.step()


@settings(max_examples=300, deadline=None)
@given(CONFIGS, ACTIONS)
def test_no_history_spoils_a_token_or_leaks_a_block(config, actions):
    """High water within the budget, one terminal per accepted id, every block back, every token right."""
    history = History(config)
    for action in actions:
        history.act(*action)
    history.run()
    scheduler = history.scheduler
    pool, kv = scheduler.pool, scheduler.kv
    assert scheduler.live_count == 0
    assert (pool.used, pool.promised, kv.used_tokens) == (0, 0, 0)
    assert pool.available == pool.total
    assert pool.high_water <= pool.total
    assert kv.high_water_tokens <= scheduler.config.capacity_tokens
    for name, req in history.requests.items():
        ends, tokens = history.finishes[name], history.tokens[name]
        if name in history.aborted:
            assert ends == []
        else:
            assert len(ends) == 1, "exactly one terminal"
            assert ends[0] in ("length", "error", *(("cache_miss",) if config["kv_admission"] == "single" else ()))
        whole = expected(req)
        assert tokens == (whole if ends == ["length"] else whole[: len(tokens)])
    assert history.finishes.keys() | history.tokens.keys() <= history.requests.keys()
    budget = config["token_budget"]
    assert budget is None or all(plan.prefill_tokens + len(plan.decodes) <= budget for plan in history.plans)


SHAPES = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 38), st.integers(1, 12)), min_size=1, max_size=8)


@settings(max_examples=80, deadline=None)
@given(SHAPES, st.sampled_from([None, 1, 3, 7]), st.sampled_from([1, 4, 16]), st.sampled_from([None, 5]), st.booleans())
def test_a_partial_prefill_emits_nothing_and_its_boundary_changes_nothing(shapes, chunk, block, budget, cache):
    driver = PagedDriver(
        prefill_chunk_size=chunk,
        block_size=block,
        token_budget=budget,
        prefix_cache=cache,
        max_active=3,
        kv_tokens=4000,
    )
    requests = [
        Request(id=f"r{number}", prompt_ids=[(text + place) % 50 for place in range(length)], max_tokens=max_tokens)
        for number, (text, length, max_tokens) in enumerate(shapes)
    ]
    driver.submit(*requests)
    while True:
        seen = {name: len(tokens) for name, tokens in driver.tokens.items()}
        plan = driver.step()
        if plan is None:
            break
        partial = {piece.sequence.id for piece in plan.prefills if not piece.is_last}
        assert all(len(driver.tokens[name]) == seen.get(name, 0) for name in partial)
        running = {sequence.id for sequence in plan.decodes}
        assert all(len(driver.tokens[name]) == seen[name] + 1 for name in running)
    assert [driver.tokens[req.id] for req in requests] == [expected(req) for req in requests]
    assert all(gap == 1 for req in requests for gap in driver.gaps(req.id)), "live sequences decode in every tick"


def test_one_output_set_over_the_whole_product():
    """Chunk x block x budget x slots, with ragged prompts: 72 configurations, one set of tokens.

    In each of them, beside the plain run, one with little KV (so that sequences are preempted), with
    prompts that begin alike (so that they hit the prefix cache) and with an abort in the middle.
    """
    prompts = [[(number // 3 + place) % 50 for place in range(3 + 5 * number)] for number in range(8)]
    requests = [Request(id=f"r{number}", prompt_ids=prompt, max_tokens=6) for number, prompt in enumerate(prompts)]
    outputs = set()
    cells = preemptions = hits = 0
    for chunk, block, budget, slots in itertools.product((0, 1, 3, 7), (1, 4, 16), (0, 5), (1, 3, 8)):
        cells += 1
        caps = {"prefill_chunk_size": chunk, "block_size": block, "token_budget": budget, "max_active": slots}
        for kv_tokens in (2000, 48):
            driver = PagedDriver(kv_tokens=kv_tokens, **caps)
            driver.submit(*requests[:4], Request(id="gone", prompt_ids=prompts[5], max_tokens=20), *requests[4:])
            for _ in range(9):
                driver.step()
            driver.scheduler.abort("gone")
            driver.run()
            outputs.add(tuple(tuple(driver.tokens[req.id]) for req in requests))
            preemptions += driver.scheduler.preemptions
            hits += driver.scheduler.kv.prefix.stats.hits
    assert cells == 72
    assert outputs == {tuple(tuple(expected(req)) for req in requests)}
    assert min(preemptions, hits) > 72, "the runs were not tame"
