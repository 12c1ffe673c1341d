"""The prefix cache: what is found, what is kept, what is evicted, and who may use it."""

import msgspec
import pytest

from engine_stub.config import StubConfig
from engine_stub.running import tick
from engine_stub.scheduler import (
    AllBlocksCleared,
    BlockPool,
    BlocksRemoved,
    BlocksStored,
    Request,
    Scheduler,
    SchedulerConfig,
    Sequence,
)
from tests.support.paged_model import PagedDriver, PagedModel, expected
from tests.support.stub_engine import EngineDriver, add_message, read_batch
from tests.support.stub_scheduler import request

BLOCK = 4


def driver(**changes):
    return PagedDriver(**{"kv_tokens": 400, "block_size": BLOCK, **changes})


def served(made, name, prompt, max_tokens=4, **fields):
    """Run one request to its end; its tokens are checked, and how many prompt tokens were cached is returned."""
    req = Request(id=name, prompt_ids=prompt, max_tokens=max_tokens, **fields)
    (admission,) = made.submit(req)
    assert admission.is_accepted
    sequence = made.scheduler.sequence(name)
    made.run()
    assert made.tokens[name] == expected(req)
    return sequence.cached_tokens


PROMPT = list(range(100, 122))  # 22 tokens: 5 full blocks and 2 more


class TestHits:
    def test_the_second_time_all_full_blocks_are_there(self):
        made = driver()
        assert served(made, "a", PROMPT) == 0
        assert served(made, "b", PROMPT) == 20
        assert [plan.prefill_tokens for plan in made.plans if plan.prefills] == [22, 2]

    def test_a_common_beginning_is_enough(self):
        made = driver()
        served(made, "a", PROMPT)
        assert served(made, "b", [*PROMPT[:9], 7, 7, 7, 7, 7]) == 8
        assert served(made, "c", [7, *PROMPT]) == 0

    @pytest.mark.parametrize("length", [4, 8, 20])
    def test_one_position_is_always_left_to_compute(self, length):
        made = driver()
        served(made, "a", PROMPT)
        assert served(made, "b", PROMPT[:length]) == length - BLOCK

    def test_the_answer_is_cached_too_but_not_its_last_token(self):
        """Text of 10 + 6 tokens: the last one's KV was never stored, so the fourth block is not full."""
        made = driver()
        prompt = PROMPT[:10]
        served(made, "a", prompt, max_tokens=6)
        text = prompt + made.tokens["a"]
        assert len(text) == 4 * BLOCK
        assert served(made, "b", [*text, 1, 2, 3]) == 3 * BLOCK
        served(made, "c", prompt, max_tokens=7)
        assert served(made, "d", [*text, 1, 2, 3]) == 4 * BLOCK

    def test_a_partial_last_block_is_never_shared(self):
        made = driver()
        served(made, "a", PROMPT, max_tokens=1)
        assert len(made.scheduler.kv.prefix) == 5
        assert served(made, "b", [*PROMPT, 5, 6, 7, 8]) == 20

    def test_a_running_sequence_shares_its_prompt_at_once(self):
        made = driver()
        made.submit(Request(id="a", prompt_ids=PROMPT, max_tokens=30))
        made.step()
        made.submit(Request(id="b", prompt_ids=PROMPT, max_tokens=30))
        made.step()
        sequences = [made.scheduler.sequence(name) for name in "ab"]
        assert sequences[0].blocks[:5] == sequences[1].blocks[:5]
        assert made.scheduler.kv.used_tokens == 20 + 3 + 2, "shared positions count once"
        assert made.scheduler.pool.used == 5 + 1 + 1
        made.scheduler.abort("a")
        made.scheduler.check()
        made.run()
        assert made.tokens["b"] == expected(Request(id="b", prompt_ids=PROMPT, max_tokens=30))

    def test_chunks_of_a_prompt_are_found_before_the_prompt_is_done(self):
        made = driver(token_budget=8)
        made.submit(Request(id="a", prompt_ids=PROMPT, max_tokens=2))
        made.step()
        assert len(made.scheduler.kv.prefix) == 2

    def test_the_same_text_at_the_same_time_is_kept_once(self):
        made = driver()
        made.submit(*(Request(id=name, prompt_ids=PROMPT, max_tokens=3) for name in "ab"))
        made.run()
        assert len(made.scheduler.kv.prefix) == 6, "5 blocks of prompt, and 2 + 2 positions; never twice"
        pool = made.scheduler.pool
        assert (pool.used, pool.idle) == (0, 6)

    def test_an_aborted_sequence_leaves_what_it_has_computed(self):
        made = driver()
        made.submit(Request(id="a", prompt_ids=PROMPT, max_tokens=30))
        made.step()
        made.step(between=lambda: made.scheduler.abort("a"))
        assert served(made, "b", PROMPT) == 20

    def test_a_preempted_sequence_finds_its_own_text_again(self):
        made = driver(kv_tokens=64)
        requests = [request(f"r{number}", prompt_len=12, max_tokens=30) for number in range(3)]
        made.submit(*requests)
        made.run()
        assert made.scheduler.preemptions > 0
        stats = made.scheduler.kv.prefix.stats
        assert stats.preempted_requests == made.scheduler.preemptions
        assert stats.preempted_hits > 0
        assert stats.requests == 3
        assert all(made.tokens[req.id] == expected(req) for req in requests)


class TestSwitches:
    @pytest.mark.parametrize(("global_", "own"), [(True, True), (True, False), (False, True), (False, False)])
    def test_both_switches_must_be_on(self, global_, own):
        made = driver(prefix_cache=global_)
        served(made, "a", PROMPT, uses_prefix_cache=True)
        assert served(made, "b", PROMPT, uses_prefix_cache=own) == (20 if global_ and own else 0)

    def test_a_request_that_opted_out_leaves_nothing_behind(self):
        made = driver()
        served(made, "a", PROMPT, uses_prefix_cache=False)
        assert served(made, "b", PROMPT) == 0

    def test_salts_keep_texts_apart(self):
        made = driver()
        served(made, "a", PROMPT, cache_salt="one")
        assert served(made, "b", PROMPT, cache_salt="two") == 0
        assert served(made, "c", PROMPT) == 0
        assert served(made, "d", PROMPT, cache_salt="one") == 20


class TestEviction:
    def test_the_longest_unused_goes_first_and_ends_before_beginnings(self):
        made = driver(kv_tokens=40)
        old, new = [1] * 13, [2] * 13
        for number, prompt in enumerate((old, new, old)):
            served(made, f"r{number}", prompt, max_tokens=1)
        served(made, "big", [3] * 21, max_tokens=1)  # 6 of 10 blocks: 4 free ones, then 2 of `new`
        assert made.scheduler.kv.prefix.stats.evictions == 2
        lookup = made.scheduler.kv.prefix.lookup
        found = [len(lookup(Sequence(Request(id="?", prompt_ids=prompt, max_tokens=1), 0))) for prompt in (old, new)]
        assert found == [3, 1]

    def test_blocks_in_use_are_never_evicted(self):
        made = driver(kv_tokens=40, kv_admission="reserve")
        made.submit(Request(id="a", prompt_ids=[1] * 12, max_tokens=9))
        made.step()
        made.submit(Request(id="b", prompt_ids=[2] * 16, max_tokens=4))
        made.run()
        assert made.finishes == {"a": ["length"], "b": ["length"]}

    def test_idle_blocks_are_free_memory(self):
        made = driver(kv_tokens=24)
        served(made, "a", PROMPT, max_tokens=1)
        assert (made.scheduler.pool.used, made.scheduler.pool.idle, made.scheduler.pool.available) == (0, 5, 6)
        served(made, "b", list(range(22)), max_tokens=3)

    def test_reset_forgets_everything_but_not_while_kv_is_held(self):
        made = driver()
        made.submit(Request(id="a", prompt_ids=PROMPT, max_tokens=3))
        made.step()
        assert not made.scheduler.reset_prefix_cache()
        made.run()
        assert made.scheduler.reset_prefix_cache()
        assert served(made, "b", PROMPT) == 0
        assert Scheduler(SchedulerConfig(prefix_cache=False)).reset_prefix_cache()


class TestEvents:
    @staticmethod
    def run(config, *prompts):
        scheduler = Scheduler(config, records_cache_events=True)
        model = PagedModel(config)
        for number, prompt in enumerate(prompts):
            scheduler.submit(Request(id=f"r{number}", prompt_ids=prompt, max_tokens=1))
            while tick(scheduler, model):
                pass
        return scheduler.kv.prefix.events

    def test_stored_blocks_name_their_parent_and_their_tokens(self):
        first, second = self.run(SchedulerConfig(kv_tokens=400, block_size=BLOCK), PROMPT, [*PROMPT[:8], *range(9)])
        assert isinstance(first, BlocksStored)
        assert (first.parent, len(first.hashes), first.token_ids) == (None, 5, PROMPT[:20])
        assert (second.parent, second.token_ids) == (first.hashes[1], list(range(8)))
        assert len(set(first.hashes + second.hashes)) == 7

    def test_hashes_depend_on_the_text_only(self):
        config = SchedulerConfig(kv_tokens=400, block_size=BLOCK)
        assert self.run(config, PROMPT)[0].hashes == self.run(config, PROMPT)[0].hashes

    def test_removed_blocks_are_those_that_were_stored(self):
        events = self.run(SchedulerConfig(kv_tokens=24, block_size=BLOCK), PROMPT, list(range(22)))
        stored, removed, again = events
        assert isinstance(removed, BlocksRemoved)
        assert set(removed.hashes) <= set(stored.hashes)
        assert len(removed.hashes) == 5
        assert len(again.hashes) == 5

    def test_clearing_is_an_event(self):
        config = SchedulerConfig(kv_tokens=400, block_size=BLOCK)
        scheduler = Scheduler(config, records_cache_events=True)
        scheduler.reset_prefix_cache()
        assert scheduler.kv.prefix.events == [AllBlocksCleared()]

    def test_nothing_is_recorded_unless_asked(self):
        made = driver()
        served(made, "a", PROMPT)
        assert made.scheduler.kv.prefix.events == []


class TestPool:
    def test_a_shared_block_comes_back_when_its_last_owner_goes(self):
        pool = BlockPool(4)
        blocks = pool.take(2)
        pool.share(blocks[:1])
        assert pool.give_back(blocks, 0) == 1
        assert (pool.used, pool.available) == (1, 3)
        assert pool.give_back(blocks[:1], 0) == 0
        assert (pool.used, pool.available) == (0, 4)

    def test_sharing_an_idle_block_takes_it_out_of_the_available_ones(self):
        evicted = []
        pool = BlockPool(2, evicted.append)
        (block,) = pool.take(1)
        pool.give_back([block], 0, {block})
        assert (pool.idle, pool.available) == (1, 2)
        assert pool.idle_among([block]) == 1
        pool.share([block])
        assert (pool.idle, pool.available, pool.used) == (0, 1, 1)
        assert evicted == []

    def test_more_than_there_is_cannot_be_taken(self):
        pool = BlockPool(2)
        pool.promise(1)
        with pytest.raises(AssertionError, match="more blocks"):
            pool.take(2)


class TestOnTheWire:
    CONFIG = StubConfig(scheduler=SchedulerConfig(block_size=BLOCK))

    def twice(self, protocol, second=None):
        made = EngineDriver(protocol, self.CONFIG)
        made.add("a", prompt_len=22)
        made.run()
        made.engine.receive(second or add_message(protocol, "b", range(1, 23), 3), 0.0)
        return made, [read_batch(frames) for frames in made.step_raw()]

    def test_tokenspeed_has_a_column_of_cached_tokens_in_every_row(self):
        made, batches = self.twice("tokenspeed")
        batches += made.run()
        assert [batch.raw[6] for batch in batches] == [[20]] * 3

    def test_vllm_tells_of_it_in_the_first_row_and_in_its_statistics(self):
        _, (batch,) = self.twice("vllm")
        stats = batch.raw[1][0][11]
        assert stats["num_prompt_tokens"] == 22
        assert (stats["num_cached_tokens"], stats["num_local_cached_tokens"], stats["num_computed_tokens"]) == (
            20,
            20,
            2,
        )
        cache = batch.raw[2]["prefix_cache_stats"]
        assert (cache["requests"], cache["queries"], cache["hits"]) == (1, 22, 20)

    def test_vllm_requests_can_opt_out_and_bring_a_salt(self):
        prompt = list(range(1, 23))
        opted_out = ["b", prompt, None, {"skip_reading_prefix_cache": True}, None, 0.0, None, None, None]
        salted = ["b", prompt, None, {}, None, 0.0, None, "mine", None]
        for payload in (opted_out, salted):
            _, (batch,) = self.twice("vllm", [b"\x00", msgspec.msgpack.encode(payload)])
            assert batch.raw[1][0][11]["num_cached_tokens"] == 0

    def test_tokenspeed_requests_can_opt_out(self):
        frames = add_message("tokenspeed", "b", range(1, 23), 3)
        payload = msgspec.msgpack.decode(frames[1])
        payload[5][20] = {"prefix_cache": False}
        _, (batch,) = self.twice("tokenspeed", [b"\x00", msgspec.msgpack.encode(payload)])
        assert batch.raw[6] == [0]

    def test_vllms_reset_call_empties_the_cache(self):
        made = EngineDriver("vllm", self.CONFIG)
        call = [b"\x03", msgspec.msgpack.encode([0, 7, "reset_prefix_cache", [False, False]])]
        made.add("a", prompt_len=22)
        made.step()
        assert msgspec.msgpack.decode(made.engine.receive(call, 0.0)[0][0])[4] == [7, None, [None, False]]
        made.run()
        assert msgspec.msgpack.decode(made.engine.receive(call, 0.0)[0][0])[4] == [7, None, [None, True]]
        made.add("b", prompt_len=22)
        assert made.step().raw[1][0][11]["num_cached_tokens"] == 0
