"""The router's own rules: lifecycle, exactly-once release, late rows, loss detection, admission."""

import pytest

from gateway.core.effects import AbortOnRank, RankStateChanged
from gateway.core.errors import GatewayError, Reason
from gateway.core.events import (
    AbortAll,
    BatchReceived,
    DrainStarted,
    RankLost,
    SendBlocked,
    SendFailed,
    SendUnblocked,
    Tick,
)
from gateway.core.lifecycle import Evidence
from gateway.types import EngineBatch, Sampling, TokenLogprob
from tests.support.core import Bench, make_info, wire_id


def refused(bench: Bench, *args, **request) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        bench.request(*args, **request)
    return caught.value


def test_a_request_runs_to_its_end():
    bench = Bench(1)
    request = bench.request([5, 6], max_tokens=3)
    assert bench.dispatched[0].request.prompt_token_ids == [5, 6]
    bench.now += 0.1
    bench.batch(0, [(wire_id(request), [7])])
    bench.batch(0, [(wire_id(request), [8, 9], "length")])
    sequence = request.sequences[0]
    assert bench.router.take_dirty() == [sequence, request], "its output, then its end"
    assert sequence.take() == ([7, 8, 9], None)
    assert sequence.finish == "length"
    assert bench.ended == [request]
    assert request.error is None
    assert request.first_token_at == pytest.approx(100.1)
    bench.assert_quiet()


def test_wire_ids_are_never_the_clients_and_never_repeat():
    bench = Bench(1)
    first = bench.request(request_id="same")
    bench.finish(first)
    second = bench.request(request_id="same")
    ids = [effect.request.wire_id for effect in bench.dispatched]
    assert len(set(ids)) == 2
    assert all(each.startswith("0123456789abcdef-") and "same" not in each for each in ids)
    bench.finish(second)


def test_a_live_duplicate_of_the_same_caller_is_refused_and_the_first_goes_on():
    bench = Bench(1)
    first = bench.request(request_id="x")
    assert refused(bench, request_id="x").reason is Reason.DUPLICATE_REQUEST_ID
    other = bench.request(request_id="x", client_key="someone else")
    bench.finish(first)
    bench.finish(other)
    bench.assert_quiet()


def test_a_final_row_without_tokens_ends_the_request():
    bench = Bench(1)
    request = bench.request()
    bench.batch(0, [(wire_id(request), [], "stop")])
    assert request.is_ended
    assert request.error is None
    bench.assert_quiet()


def test_n_sequences_are_balanced_and_end_together():
    bench = Bench(4)
    request = bench.request(n=4)
    ranks = [sequence.attempt.rank for sequence in request.sequences]
    assert sorted(ranks) == [0, 1, 2, 3]
    for index in (0, 1, 2):
        bench.batch(ranks[index], [(wire_id(request, index), [9], "stop")])
        assert not request.is_ended
    bench.batch(ranks[3], [(wire_id(request, 3), [9], "stop")])
    assert bench.ended == [request]
    bench.assert_quiet()


def test_n_is_admitted_all_or_nothing():
    bench = Bench(2, admission={"max_in_flight_per_rank": 2})
    holders = [bench.request(), bench.request()]
    error = refused(bench, n=3)
    assert error.reason is Reason.RANKS_FULL
    assert error.retryable
    assert error.retry_after_s is not None
    assert bench.router.ranks.in_flight == [1, 1]
    assert bench.router.ranks.sent_since_snapshot == [1, 1]
    assert len(bench.dispatched) == 2
    for holder in holders:
        bench.finish(holder)
    bench.assert_quiet()


def test_one_failed_sequence_aborts_the_others():
    bench = Bench(2)
    request = bench.request(n=2)
    first, second = (sequence.attempt for sequence in request.sequences)
    bench.batch(first.rank, [(first.wire_id, [], "abort")])
    assert request.error.reason is Reason.ENGINE_REJECTED
    assert [effect.wire_ids for effect in bench.aborted] == [(second.wire_id,)]
    bench.assert_quiet()


@pytest.mark.parametrize(
    ("tokens", "finish", "reason"),
    [([], "abort", Reason.ENGINE_REJECTED), ([9], "abort", Reason.ENGINE_REJECTED), ([], "error", Reason.ENGINE_ERROR)],
)
def test_engine_failures_are_errors_not_finishes(tokens, finish, reason):
    bench = Bench(1)
    request = bench.request()
    bench.batch(0, [(wire_id(request), tokens, finish)])
    assert request.error.reason is reason
    assert request.sequences[0].finish == ""
    bench.assert_quiet()


def test_cancel_aborts_at_the_rank_and_late_rows_reach_nobody():
    bench = Bench(2)
    request = bench.request(pinned_rank=1)
    bench.cancel(request, Reason.CANCELLED)
    assert bench.aborted == [AbortOnRank(1, 1, (wire_id(request),))]
    bench.batch(1, [(wire_id(request), [9], "stop")])
    assert bench.router.take_dirty() == [request], "its end and no output"
    assert bench.ended == [request]
    bench.cancel(request, Reason.CANCELLED)
    assert bench.router.counters.double_ends == 1
    bench.assert_quiet()


def test_a_zombie_is_aborted_again_at_a_bounded_rate():
    bench = Bench(1)
    request = bench.request()
    bench.cancel(request, Reason.CANCELLED)
    for _ in range(50):
        bench.now += 0.1
        bench.batch(0, [(wire_id(request), [9])])
    # Five seconds of rows: the first re-abort after the settle time, then one a second.
    assert 3 <= len(bench.aborted) - 1 <= 5
    bench.batch(0, [(wire_id(request), [9], "stop")])
    bench.assert_quiet()


def test_orphans_of_an_earlier_gateway_are_aborted_at_once_and_never_live():
    bench = Bench(1)
    bench.batch(0, [("ffffffffffffffff-1-0-1", [9]), ("ffffffffffffffff-2-0-1", [9])])
    assert bench.aborted == [AbortOnRank(0, 1, ["ffffffffffffffff-1-0-1", "ffffffffffffffff-2-0-1"])]
    assert bench.router.counters.orphan_rows == 2
    bench.batch(0, [("ffffffffffffffff-1-0-1", [9])])
    assert len(bench.aborted) == 1


def test_a_row_from_the_wrong_rank_changes_nothing():
    bench = Bench(2)
    request = bench.request(pinned_rank=0)
    bench.batch(1, [(wire_id(request), [9], "stop")])
    assert not request.is_ended
    assert bench.router.counters.misattributed_rows == 1
    bench.finish(request)
    bench.assert_quiet()


def test_a_wrong_engine_index_is_not_trusted():
    bench = Bench(2)
    request = bench.request(pinned_rank=1)
    bench.batch(1, [(wire_id(request), [9], "stop")], engine_index=0)
    assert request.error is None
    bench.assert_quiet()


@pytest.mark.parametrize(("claimed", "counter"), [(3, "lost_tokens"), (1, "duplicated_tokens")])
def test_a_wrong_cumulative_count_ends_the_stream_with_the_exact_prefix(claimed, counter):
    bench = Bench(1, "tokenspeed")
    request = bench.request()
    bench.batch(0, [(wire_id(request), [7], "", 1)])
    bench.batch(0, [(wire_id(request), [8], "", claimed)])
    assert request.error.reason is Reason.DATA_LOSS
    assert list(request.sequences[0].take()[0]) == [7]
    assert getattr(bench.router.counters, counter) == 1
    assert len(bench.aborted) == 1
    bench.assert_quiet()


def test_an_unreadable_row_fails_its_request_only():
    bench = Bench(1)
    bad, good = bench.request(), bench.request()
    bench.batch(0, [(wire_id(good), [9])], failed_ids=[wire_id(bad), "unknown"], fault="ragged")
    assert bad.error.reason is Reason.DATA_LOSS
    assert not good.is_ended
    bench.finish(good)
    bench.assert_quiet()


def test_a_lossy_frame_fails_the_rank_where_nothing_else_would_tell():
    bench = Bench(2)
    hit, spared = bench.request(pinned_rank=0), bench.request(pinned_rank=1)
    bench.batch(0, [], lossy=True, fault="undecodable")
    assert hit.error.reason is Reason.DATA_LOSS
    assert not spared.is_ended
    bench.finish(spared)
    bench.assert_quiet()


def test_a_lossy_frame_is_left_to_the_counts_where_the_wire_has_them():
    bench = Bench(1, "tokenspeed")
    request = bench.request()
    bench.batch(0, [(wire_id(request), [7], "", 1)])
    bench.batch(0, [], lossy=True, fault="undecodable")
    assert not request.is_ended
    bench.batch(0, [(wire_id(request), [9], "", 3)])
    assert request.error.reason is Reason.DATA_LOSS
    bench.assert_quiet()


def test_an_end_for_length_before_that_length_tells_of_a_loss_where_nothing_else_would():
    bench = Bench(1)
    request = bench.request(max_tokens=4)
    bench.batch(0, [(wire_id(request), [7], "")])
    bench.batch(0, [(wire_id(request), [8, 9], "length")])
    assert request.error.reason is Reason.DATA_LOSS
    bench.assert_quiet()


def test_the_end_of_a_ranks_context_is_no_loss():
    bench = Bench(1, info=make_info(max_model_len=6))
    request = bench.request([1, 2, 3], max_tokens=4)
    bench.batch(0, [(wire_id(request), [7, 8, 9], "length")])
    assert request.error is None
    bench.assert_quiet()


def test_a_lost_rank_fails_only_its_own():
    bench = Bench(2)
    lost, kept = bench.request(pinned_rank=0), bench.request(pinned_rank=1)
    effects = bench.send(RankLost(0, 1, "disconnected"))
    assert RankStateChanged(0, 1, "READY", "LOST", "disconnected") in effects
    assert lost.error.reason is Reason.RANK_LOST
    assert lost.error.retryable
    assert bench.aborted == []
    assert [bench.request().last_rank for _ in range(8)] == [1] * 8
    assert refused(bench, pinned_rank=0).reason is Reason.PINNED_RANK_UNAVAILABLE
    assert not kept.is_ended


def test_late_news_of_an_old_incarnation_changes_nothing():
    bench = Bench(1)
    bench.send(RankLost(0, 1, "disconnected"))
    bench.join(0)
    request = bench.request()
    batch = EngineBatch(ids=[wire_id(request)], token_ids=[[9]], finish=["stop"])
    bench.send(BatchReceived(0, 1, batch))
    bench.send(RankLost(0, 1, "disconnected"))
    bench.send(SendBlocked(0, 1))
    assert not request.is_ended
    assert bench.router.ranks.is_open == [True]
    assert bench.router.counters.stale_events == 3
    bench.join(0, incarnation=1)
    assert bench.router.ranks.incarnation == [2]
    bench.finish(request)
    bench.assert_quiet()


def test_a_failed_send_ends_the_request_without_an_abort_or_a_clamp():
    bench = Bench(1)
    request = bench.request()
    bench.send(SendFailed(0, 1, wire_id(request), "unreachable"))
    bench.send(SendFailed(0, 1, wire_id(request), "unreachable"))
    assert request.error.reason is Reason.SEND_FAILED
    assert bench.aborted == []
    assert bench.router.ranks.sent_since_snapshot == [0]
    bench.assert_quiet()


def test_a_blocked_rank_is_not_eligible():
    bench = Bench(2)
    bench.send(SendBlocked(0, 1))
    assert [bench.request().last_rank for _ in range(4)] == [1] * 4
    bench.send(SendUnblocked(0, 1))
    assert bench.request().last_rank == 0


def test_deadlines_end_requests_at_the_tick():
    bench = Bench(1)
    early, late = bench.request(deadline_at=101.0), bench.request(deadline_at=102.0)
    bench.now = 101.5
    bench.send(Tick())
    assert early.error.reason is Reason.DEADLINE_EXCEEDED
    assert not late.is_ended
    assert len(bench.aborted) == 1
    assert refused(bench, deadline_at=101.5).reason is Reason.DEADLINE_EXCEEDED
    bench.finish(late)
    bench.now = 200.0
    bench.send(Tick())
    bench.assert_quiet()


def test_deadline_memory_follows_the_live_requests():
    bench = Bench(1)
    for _ in range(500):
        bench.finish(bench.request(deadline_at=1e9))
    bench.send(Tick())
    assert len(bench.router._registry._deadlines) == 0


def test_the_total_bound_refuses_with_a_hint():
    bench = Bench(2, admission={"max_in_flight": 2})
    requests = [bench.request(), bench.request()]
    error = refused(bench)
    assert error.reason is Reason.GATEWAY_FULL
    assert error.retry_after_s > 0
    assert refused(bench, n=3).reason is Reason.GATEWAY_FULL
    for request in requests:
        bench.finish(request)
    bench.finish(bench.request())
    bench.assert_quiet()


def test_the_per_rank_bound_defaults_to_four_times_the_slots():
    bench = Bench(1, info=make_info(max_num_seqs=2))
    requests = [bench.request() for _ in range(8)]
    assert refused(bench).reason is Reason.RANKS_FULL
    bench.finish(requests[0])
    bench.request()


def test_no_rank_at_all_is_a_retryable_refusal():
    bench = Bench(2, join=False)
    error = refused(bench)
    assert error.reason is Reason.NO_ELIGIBLE_RANK
    assert error.retryable
    assert refused(bench, pinned_rank=1).reason is Reason.PINNED_RANK_UNAVAILABLE


def test_draining_refuses_new_and_abort_all_ends_the_rest():
    bench = Bench(1)
    request = bench.request()
    bench.send(DrainStarted())
    assert refused(bench).reason is Reason.DRAINING
    assert not request.is_ended
    bench.send(AbortAll(Reason.DRAINING))
    assert request.error.reason is Reason.DRAINING
    bench.assert_quiet()


def test_a_slow_reader_is_ended_at_its_byte_bound_and_others_go_on():
    bench = Bench(1, limits={"max_stream_buffer_bytes": 4000})
    slow, fast = bench.request(max_tokens=4000), bench.request(max_tokens=4000)
    for _ in range(20):
        bench.batch(0, [(wire_id(fast), [1] * 100), (wire_id(slow), [1] * 100)])
        fast.sequences[0].take()
        if slow.is_ended:
            break
    assert slow.error.reason is Reason.SLOW_READER
    assert slow.sequences[0].backlog_bytes <= 4000 + 4 * 228
    assert not fast.is_ended
    bench.finish(fast)
    bench.assert_quiet()


def test_two_final_rows_in_one_batch_end_the_request_once():
    bench = Bench(1)
    request = bench.request()
    row = (wire_id(request), [9], "stop")
    bench.batch(0, [row, row])
    assert bench.ended == [request]
    assert bench.router.counters.double_releases == 0
    bench.assert_quiet()


def test_explain_charges_and_records_nothing():
    bench = Bench(3)
    decision = bench.router.explain(bench.arrived(), bench.now)
    assert decision.rank in (0, 1, 2)
    assert bench.router.decisions.latest(10) == []
    assert bench.router.ranks.in_flight == [0, 0, 0]
    with pytest.raises(GatewayError):
        bench.router.explain(bench.arrived(pinned_rank=3), bench.now)


def test_the_continuations_of_a_seeded_request_get_seeds_of_their_own():
    bench = Bench(2)
    bench.request(n=3, sampling=Sampling(max_tokens=4, seed=2**63 - 2))
    assert [effect.request.sampling.seed for effect in bench.dispatched] == [2**63 - 2, 2**63 - 1, -(2**63)]
    bench.request(n=2)
    assert [effect.request.sampling.seed for effect in bench.dispatched[3:]] == [None, None]


@pytest.mark.parametrize(("asked", "kept"), [(None, None), (0, ()), (2, ((1, -1.0), (2, -2.0)))])
def test_logprobs_are_those_that_were_asked_for(asked, kept):
    bench = Bench(1)
    request = bench.request(sampling=Sampling(max_tokens=4, logprobs=asked))
    padded = TokenLogprob(-0.5, ((1, -1.0), (2, -2.0), (3, -3.0)))
    bench.batch(0, [(wire_id(request), [9])], logprobs=[[padded]])
    expected = None if kept is None else [TokenLogprob(-0.5, kept)]
    assert request.sequences[0].take()[1] == expected


def test_a_live_request_is_found_by_its_caller_and_id():
    bench = Bench(1)
    request = bench.request(request_id="x", client_key="a")
    assert bench.router.find("a", "x") is request
    assert bench.router.find("b", "x") is None
    bench.finish(request)
    assert bench.router.find("a", "x") is None


def test_readiness_names_the_group_that_is_short():
    group = {"name": "a", "protocol": "vllm", "handshake": "ipc:///a", "ranks": 1, "min_ready": 1}
    bench = Bench(groups=[group, group | {"name": "b", "ranks": 3, "min_ready": 2}], join=False)
    assert bench.router.why_not_ready() == "group a: 0 of 1 ranks are READY, 1 needed"
    bench.join(0)
    bench.join(1)
    assert bench.router.why_not_ready() == "group b: 1 of 3 ranks are READY, 2 needed"
    bench.join(3)
    assert bench.router.why_not_ready() is None
    bench.send(RankLost(3, 1, "test"))
    assert bench.router.why_not_ready() == "group b: 1 of 3 ranks are READY, 2 needed"
    bench.send(DrainStarted())
    assert bench.router.why_not_ready() == "the gateway is draining"


def both_on_rank_0(bench):
    request = bench.request(n=2, pinned_rank=0)
    return request, [wire_id(request, index) for index in (0, 1)]


def test_two_sequences_of_one_request_that_fail_in_one_batch_end_it_once():
    bench = Bench(1)
    request, ids = both_on_rank_0(bench)
    bench.batch(0, [], failed_ids=ids, fault="bad_row")
    assert bench.ended == [request]
    bench.assert_quiet()


def test_a_sequence_that_finishes_beside_one_that_is_refused_changes_nothing():
    bench = Bench(1)
    request, ids = both_on_rank_0(bench)
    bench.batch(0, [(ids[0], [], "abort"), (ids[1], [9], "stop")])
    assert request.error.reason is Reason.ENGINE_REJECTED
    assert request.sequences[1].finish == ""
    assert bench.router.counters.double_releases == 0
    bench.assert_quiet()


def test_two_sequences_on_a_lost_rank_end_their_request_once():
    bench = Bench(1)
    request, _ = both_on_rank_0(bench)
    bench.send(RankLost(0, 1, "test"))
    assert bench.ended == [request]
    bench.assert_quiet()


def test_a_second_end_is_counted_and_changes_nothing():
    bench = Bench(1)
    request = bench.request()
    bench.finish(request)
    effects = []
    bench.router._endings.settle(request, GatewayError(Reason.INTERNAL, "late"), Evidence.GATEWAY, bench.now, effects)
    assert (request.error, effects, bench.router.counters.double_ends) == (None, [], 1)
    bench.assert_quiet()


def test_an_event_that_nobody_defined_is_a_defect():
    with pytest.raises(AssertionError):
        Bench(1).send(object())


def test_filters_that_were_given_up_are_counted_by_name():
    bench = Bench(1, filters={"kv_fit": "soft"}, info=make_info(kv_capacity_tokens=100))
    bench.request([1] * 60)
    bench.request([1] * 60)
    assert bench.router.counters.relaxed_filters == {"kv_usage": 0, "tried": 0, "kv_fit": 1}


def test_decisions_without_any_cost_are_counted_and_looking_is_not():
    bench = Bench(2, policy={"cost": "1 / (in_flight - in_flight)"})
    bench.router.rank_views(bench.now)
    bench.router.explain(bench.arrived(), bench.now)
    assert bench.router.counters.all_non_finite == 0
    bench.request()
    bench.request()
    assert bench.router.counters.all_non_finite == 2
