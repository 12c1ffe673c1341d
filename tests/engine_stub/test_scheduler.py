import pytest

from engine_stub.scheduler import Admission, ForwardOutput, Phase
from tests.support.stub_scheduler import Driver, expected, request


def test_a_request_alone_prefills_once_and_then_decodes_one_token_per_step():
    driver = Driver()
    req = request("a", prompt_len=20, max_tokens=5)
    assert driver.submit(req) == [Admission.ADMITTED]
    driver.run()
    assert driver.tokens["a"] == expected(req)
    assert driver.finishes["a"] == ["length"]
    assert [(len(plan.decodes), plan.prefill_tokens) for plan in driver.plans] == [(0, 20)] + [(1, 0)] * 4


def test_one_token_comes_from_the_prefill_alone():
    driver = Driver()
    driver.submit(request("a", max_tokens=1))
    driver.run()
    assert len(driver.plans) == 1
    assert driver.finishes["a"] == ["length"]


def test_decodes_and_prefill_share_a_step_and_a_newcomer_decodes_in_the_next():
    driver = Driver()
    driver.submit(request("a", max_tokens=6))
    driver.step()
    driver.submit(request("b", max_tokens=3))
    plan = driver.step()
    assert [sequence.id for sequence in plan.decodes] == ["a"]
    assert [chunk.sequence.id for chunk in plan.prefills] == ["b"]
    plan = driver.step()
    assert [sequence.id for sequence in plan.decodes] == ["a", "b"]


def test_chunks_fill_what_the_decodes_leave_of_the_budget():
    driver = Driver(token_budget=10)
    driver.submit(request("a", max_tokens=9))
    driver.step()
    driver.submit(request("long", prompt_len=25, max_tokens=2))
    counts = [[chunk.count for chunk in driver.step().prefills] for _ in range(3)]
    assert counts == [[9], [9], [7]]
    assert driver.row_steps["long"] == [4]
    driver.run()
    assert driver.tokens["long"] == expected(request("long", prompt_len=25, max_tokens=2))
    assert set(driver.gaps("a")) == {1}


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        ({}, [[5, 5, 5]]),
        ({"prefill_chunk_size": 3}, [[3, 3, 3], [2, 2, 2]]),
        ({"max_prefill_tokens_per_tick": 8}, [[5, 3], [2, 5]]),
        ({"max_prefills_per_tick": 1}, [[5], [5], [5]]),
        ({"token_budget": None}, [[5, 5, 5]]),
    ],
)
def test_prefill_caps(settings, counts):
    driver = Driver(**settings)
    driver.submit(*(request(name, prompt_len=5, max_tokens=9) for name in "abc"))
    plans = [driver.step() for _ in counts]
    assert [[chunk.count for chunk in plan.prefills] for plan in plans] == counts


def test_a_burst_of_prompts_does_not_delay_a_running_decode():
    driver = Driver(token_budget=16)
    driver.submit(request("running", max_tokens=200))
    driver.step()
    driver.submit(*(request(f"burst-{number}", prompt_len=30, max_tokens=2) for number in range(100)))
    driver.run()
    assert set(driver.gaps("running")) == {1}
    assert all(plan.prefill_tokens + len(plan.decodes) <= 16 for plan in driver.plans)


def test_a_truncated_decode_set_rotates_so_that_nobody_starves():
    driver = Driver(max_batch_size=2)
    driver.submit(*(request(f"r{number}", max_tokens=12) for number in range(5)))
    driver.run()
    assert all(len(plan.decodes) <= 2 for plan in driver.plans)
    assert all(max(driver.gaps(f"r{number}")) <= 3 for number in range(5))


def test_joins_are_fifo_and_a_freed_slot_is_filled_in_the_next_step():
    driver = Driver(max_active=2)
    assert driver.submit(*(request(name, max_tokens=3) for name in "abcd")) == [
        Admission.ADMITTED,
        Admission.ADMITTED,
        Admission.QUEUED,
        Admission.QUEUED,
    ]
    driver.run()
    first_steps = {name: steps[0] for name, steps in driver.row_steps.items()}
    assert first_steps == {"a": 1, "b": 1, "c": 4, "d": 4}
    assert driver.row_steps["a"][-1] == 3


def test_the_queue_is_bounded_and_opens_again():
    driver = Driver(max_active=1, max_queue_depth=1)
    assert driver.submit(request("a"), request("b"), request("c")) == [
        Admission.ADMITTED,
        Admission.QUEUED,
        Admission.REJECTED_QUEUE_FULL,
    ]
    assert driver.scheduler.live_ids == {"a", "b"}
    driver.run()
    assert driver.submit(request("c")) == [Admission.ADMITTED]


def test_permanent_refusals_come_before_transient_ones():
    driver = Driver(max_active=1, max_queue_depth=0, kv_tokens=64)
    driver.submit(request("a"))
    too_big = request("big", prompt_len=60, max_tokens=6)
    assert driver.submit(request("a", prompt_len=999), too_big, request("b")) == [
        Admission.REJECTED_DUPLICATE,
        Admission.REJECTED_KV_BUDGET,
        Admission.REJECTED_QUEUE_FULL,
    ]
    # The last token's KV is never stored: prompt + max_tokens - 1 positions are enough.
    driver.run()
    assert driver.submit(request("fits", prompt_len=60, max_tokens=5)) == [Admission.ADMITTED]


def test_hold_until_queued_starts_nothing_before_and_everything_after():
    driver = Driver(hold_until_queued=3)
    driver.submit(request("a"), request("b"))
    assert driver.step() is None
    driver.submit(request("c"))
    assert len(driver.step().prefills) == 3
    driver.run()
    driver.submit(request("d"))
    assert driver.step() is not None


@pytest.mark.parametrize("kv_admission", ["reserve", "optimistic"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_frees_blocks_at_once_in_every_phase(steps, kv_admission):
    driver = Driver(token_budget=8, kv_admission=kv_admission)
    driver.submit(request("a", prompt_len=10, max_tokens=40), request("b", prompt_len=10, max_tokens=40))
    for _ in range(steps):
        driver.step()
    assert driver.scheduler.abort("a")
    assert driver.scheduler.abort("b")
    assert driver.scheduler.pool.used == driver.scheduler.pool.promised == 0
    assert driver.scheduler.live_count == 0
    assert not driver.scheduler.abort("a")
    assert driver.step() is None


def test_an_abort_while_the_step_runs_loses_only_its_own_row():
    driver = Driver()
    driver.submit(request("a"), request("b"))
    driver.step()
    driver.step(between=lambda: driver.scheduler.abort("a"))
    assert driver.row_steps == {"a": [1], "b": [1, 2]}
    driver.run()
    assert driver.finishes == {"b": ["length"]}


def test_an_id_that_was_aborted_while_its_step_ran_may_come_back():
    driver = Driver()
    driver.submit(request("a", max_tokens=5))
    driver.step()

    def replace():
        driver.scheduler.abort("a")
        driver.submit(request("a", prompt_len=6, max_tokens=2))

    driver.step(between=replace)
    driver.tokens.clear()
    driver.run()
    assert driver.tokens["a"] == expected(request("a", prompt_len=6, max_tokens=2))


def test_stop_ids_end_a_sequence_with_the_token_included():
    tokens = expected(request("a"))
    driver = Driver()
    driver.submit(request("a", stop_ids=frozenset({tokens[3]})))
    driver.run()
    assert driver.tokens["a"] == tokens[:4]
    assert driver.finishes["a"] == ["stop"]


def test_min_tokens_keeps_a_sequence_going_past_its_stop_ids():
    tokens = expected(request("a"))
    driver = Driver()
    driver.submit(request("a", eos_ids=frozenset({tokens[1], tokens[5]}), min_tokens=4))
    driver.run()
    assert driver.tokens["a"] == tokens[:6]


def test_rows_can_be_collected_to_an_interval():
    driver = Driver()
    driver.submit(request("a", max_tokens=12, row_interval=5))
    driver.run()
    assert driver.tokens["a"] == expected(request("a", max_tokens=12))
    assert driver.row_steps["a"] == [1, 5, 10, 12]


def test_optimistic_preempts_the_youngest_and_its_output_stays():
    driver = Driver(kv_tokens=64, block_size=4)
    requests = [request(f"r{number}", prompt_len=12, max_tokens=30) for number in range(3)]
    driver.submit(*requests)
    driver.run()
    assert driver.scheduler.preemptions > 0
    for req in requests:
        assert driver.tokens[req.id] == expected(req)
        assert driver.finishes[req.id] == ["length"]
    assert set(driver.gaps("r0")) == {1}, "the oldest is never preempted"
    ends = [driver.row_steps[req.id][-1] for req in requests]
    assert ends == sorted(ends)


def test_a_preempted_sequence_goes_on_before_those_that_never_started():
    driver = Driver(kv_tokens=64, block_size=4)
    names = [f"r{number}" for number in range(6)]
    driver.submit(*(request(name, prompt_len=12, max_tokens=30) for name in names))
    driver.run()
    assert driver.scheduler.preemptions > 0
    ends = [driver.row_steps[name][-1] for name in names]
    assert ends == sorted(ends)


def test_a_truncated_decode_set_that_preempts_itself_leaves_the_step_to_the_others():
    driver = Driver(max_active=2, max_batch_size=1, prefill_chunk_size=2, kv_tokens=20, block_size=1)
    requests = [request("a", prompt_len=10, max_tokens=4), request("b", prompt_len=2, max_tokens=8)]
    driver.submit(*requests)
    driver.run()
    assert driver.scheduler.preemptions > 0
    assert [driver.tokens[req.id] for req in requests] == [expected(req) for req in requests]


def test_a_step_that_preempts_starts_nothing_new():
    driver = Driver(kv_tokens=64, block_size=4)
    driver.submit(*(request(f"r{number}", prompt_len=12, max_tokens=30) for number in range(6)))
    preemptions = 0
    while (plan := driver.step()) is not None:
        if driver.scheduler.preemptions > preemptions:
            preemptions = driver.scheduler.preemptions
            assert all(chunk.start > 0 for chunk in plan.prefills)
    assert preemptions > 0


def test_an_optimistic_start_beside_running_work_leaves_headroom():
    driver = Driver(kv_tokens=200, block_size=1)
    driver.submit(request("a", prompt_len=100, max_tokens=2))
    driver.step()
    driver.submit(request("tight", prompt_len=98, max_tokens=1))
    driver.step()  # 100 of 200 blocks are free, `a` takes one; 98 and 1 % of 200 don't fit in 99
    assert driver.row_steps == {"a": [1, 2]}
    driver.run()
    assert driver.row_steps["tight"] == [3]


def test_reserve_never_preempts_and_holds_back_the_worst_case():
    driver = Driver(kv_tokens=64, block_size=4, kv_admission="reserve")
    requests = [request(f"r{number}", prompt_len=12, max_tokens=30) for number in range(3)]
    driver.submit(*requests)
    driver.step()
    pool = driver.scheduler.pool
    assert (pool.used, pool.promised, pool.available) == (3, 8, 5)
    assert driver.scheduler.waiting_count == 2
    driver.run()
    assert driver.scheduler.preemptions == 0
    assert [driver.tokens[req.id] for req in requests] == [expected(req) for req in requests]
    assert pool.promised == pool.used == 0


def test_usage_counts_stored_positions_in_whole_blocks():
    driver = Driver(kv_tokens=160, block_size=16)
    driver.submit(request("a", prompt_len=16, max_tokens=18))
    used = []
    while driver.step() is not None:
        used.append(driver.scheduler.pool.used)
    # One block for the prompt; the first decode stores position 16, the 17th position 32; freed at the end.
    assert used == [1] + [2] * 16 + [0]
    assert driver.scheduler.pool.high_water == 3


def test_the_model_must_answer_for_every_row():
    driver = Driver()
    driver.submit(request("a"))
    plan = driver.scheduler.plan()
    with pytest.raises(ValueError, match="zip"):
        driver.scheduler.commit(plan, ForwardOutput([], []))


def test_phases():
    driver = Driver(token_budget=8)
    driver.submit(request("a", prompt_len=10, max_tokens=2))
    sequence = driver.scheduler.sequence("a")
    phases = [sequence.phase]
    while driver.step() is not None:
        phases.append(sequence.phase)
    assert phases == [Phase.WAITING, Phase.PREFILLING, Phase.DECODING, Phase.ENDED]
    assert driver.scheduler.sequence("a") is None
