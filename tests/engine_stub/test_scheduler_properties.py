"""Random submissions, aborts (also while a step runs) and steps, over random configurations of the machine."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.stub_scheduler import Driver, expected, request

CONFIGS = st.fixed_dictionaries(
    {
        "max_active": st.integers(1, 5),
        "max_batch_size": st.one_of(st.none(), st.integers(1, 4)),
        "token_budget": st.one_of(st.none(), st.integers(1, 24)),
        "prefill_chunk_size": st.one_of(st.none(), st.integers(1, 9)),
        "max_prefills_per_tick": st.one_of(st.none(), st.integers(1, 3)),
        "kv_tokens": st.integers(20, 120),
        "block_size": st.sampled_from([1, 4, 16]),
        "kv_admission": st.sampled_from(["reserve", "optimistic"]),
        "max_queue_depth": st.one_of(st.none(), st.integers(0, 4)),
    }
)
SUBMIT = st.tuples(st.just("submit"), st.integers(0, 7), st.integers(1, 30), st.integers(1, 25))
ABORT = st.tuples(st.sampled_from(["abort", "abort-in-step"]), st.integers(0, 7))
STEP = st.tuples(st.just("step"))


class History(Driver):
    """Keeps what was promised to every accepted submission."""

    def __init__(self, **config):
        super().__init__(**config)
        self.accepted = {}
        self.aborted = set()
        self.names = 0

    def start(self, slot, prompt_len, max_tokens):
        """Submit under a name that is reused by slot while it is live, and never afterwards."""
        live = {name for name in self.scheduler.live_ids if name.startswith(f"{slot}-")}
        if live:
            assert not self.submit(request(live.pop()))[0].is_accepted
            return
        self.names += 1
        req = request(f"{slot}-{self.names}", prompt_len, max_tokens)
        if self.submit(req)[0].is_accepted:
            self.accepted[req.id] = req

    def cancel(self, slot):
        for name in [name for name in self.scheduler.live_ids if name.startswith(f"{slot}-")]:
            assert self.scheduler.abort(name)
            self.aborted.add(name)


@settings(max_examples=250, deadline=None)
@given(CONFIGS, st.lists(st.one_of(SUBMIT, SUBMIT, ABORT, STEP, STEP, STEP), max_size=60))
def test_any_history_ends_clean(config, actions):
    history = History(**config)
    for action, *details in actions:
        match action:
            case "submit":
                history.start(*details)
            case "abort":
                history.cancel(*details)
            case "abort-in-step":
                history.step(between=lambda: history.cancel(*details))  # noqa: B023 - called in this iteration
            case "step":
                history.step()
    history.run()
    pool = history.scheduler.pool
    assert history.scheduler.live_count == 0
    assert pool.used == pool.promised == 0
    assert pool.high_water <= pool.total
    for name, req in history.accepted.items():
        if name in history.aborted:
            assert history.finishes[name] == []
            assert history.tokens[name] == expected(req)[: len(history.tokens[name])]
        else:
            assert history.finishes[name] == ["length"], "exactly one end"
            assert history.tokens[name] == expected(req)
    assert history.tokens.keys() <= history.accepted.keys()
    budget = config["token_budget"]
    assert budget is None or all(plan.prefill_tokens + len(plan.decodes) <= budget for plan in history.plans)


@settings(max_examples=100, deadline=None)
@given(CONFIGS, st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=8))
def test_running_sequences_get_a_token_in_every_step(config, shapes):
    """Holds while nothing truncates the decode set and nothing is preempted."""
    unbounded = {"max_batch_size": None, "kv_admission": "reserve", "token_budget": 8, "max_active": 5}
    driver = Driver(**{**config, **unbounded})
    for number, (prompt_len, max_tokens) in enumerate(shapes):
        driver.submit(request(f"r{number}", prompt_len, max_tokens))
        driver.step()
    driver.run()
    assert all(gap == 1 for name in driver.row_steps for gap in driver.gaps(name))


@settings(max_examples=60, deadline=None)
@given(CONFIGS, st.integers(0, 5))
def test_tokens_do_not_depend_on_the_configuration(config, offset):
    requests = [request(f"r{number}", 3 + 2 * number, 10 + offset, seed=offset) for number in range(4)]
    driver = Driver(**{**config, "max_queue_depth": None, "kv_tokens": max(config["kv_tokens"], 32)})
    assert all(admission.is_accepted for admission in driver.submit(*requests))
    driver.run()
    assert [driver.tokens[req.id] for req in requests] == [expected(req) for req in requests]
