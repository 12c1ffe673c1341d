"""Every bug of the catalogue (ledgers 7.1, batching 7.2, errors 7.5) has a test or a reason why it can't happen here."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LEDGERS = """
B-09 B-02 B-21 B-33 B-32 B-47 B-46 B-48 B-49 B-50 B-38 B-34 B-11 B-36 B-43 B-83 B-42 B-59 B-63 B-76 B-66 B-67 B-68 B-82
O-01 O-02 O-03 O-06 O-14 O-15 O-07
"""
BATCHING = "B-07 B-06 B-10 B-37 B-35 B-44 B-45 B-58 B-60 B-29 B-54 O-12 O-16 O-09 O-17"
ERRORS = "B-22 B-61 B-53 B-75 B-77 B-26 B-72 B-17 B-62 B-51 B-71 B-70 B-25 B-79 B-80 B-81 B-64 B-08"

LEDGER_TESTS = "tests/core/test_regressions_ledgers.py::"
SCHEDULING_TESTS = "tests/core/test_regressions_scheduling.py::"
BATCH_TESTS = "tests/core/test_scheduling_batch.py::"
QUEUE_TESTS = "tests/core/test_scheduling_queue.py::"
ROUTER_TESTS = "tests/core/test_router.py::"

ROWS: dict[str, str] = {
    # 7.1 ledgers and life cycle
    "B-09": LEDGER_TESTS + "test_a_hundred_requests_are_charged_once_each_on_every_path",
    "B-02": LEDGER_TESTS + "test_the_charge_follows_the_path_taken",
    "B-21": LEDGER_TESTS + "test_cancelled_batches_open_the_gate_again",
    "B-33": LEDGER_TESTS + "test_a_batch_keeps_its_gate_shut_until_its_last_member_is_done",
    "B-32": LEDGER_TESTS + "test_a_report_that_is_dropped_takes_no_finished_row_with_it",
    "B-47": LEDGER_TESTS + "test_absence_is_no_evidence_and_the_audit_releases_nothing",
    "B-46": LEDGER_TESTS + "test_no_sign_of_life_extends_the_age",
    "B-48": f"{LEDGER_TESTS}test_a_batch_whose_callers_have_all_gone_is_released_although_the_engine_is_silent,"
    f" {LEDGER_TESTS}test_a_batch_that_only_takes_long_is_not_swept",
    "B-49": f"{LEDGER_TESTS}test_a_rank_that_is_gone_is_not_told_to_abort_again,"
    f" {ROUTER_TESTS}test_a_zombie_is_aborted_again_at_a_bounded_rate",
    "B-50": ROUTER_TESTS + "test_a_row_from_the_wrong_rank_changes_nothing",
    "B-38": LEDGER_TESTS + "test_room_comes_back_without_any_report",
    "B-34": ROUTER_TESTS + "test_engine_failures_are_errors_not_finishes",
    "B-11": f"{LEDGER_TESTS}test_the_first_of_two_ends_counts,"
    f" {LEDGER_TESTS}test_a_failure_of_a_later_sequence_is_not_lost_behind_an_earlier_success",
    "B-36": BATCH_TESTS + "test_members_that_are_late_or_gone_are_not_in_the_batch",
    "B-43": LEDGER_TESTS + "test_a_sequence_waits_or_is_in_flight_and_is_never_both_or_neither",
    "B-83": "n/a: one mode for the whole gateway; a request names none that could be missed or fallen back from",
    "B-42": f"{ROUTER_TESTS}test_late_news_of_an_old_incarnation_changes_nothing,"
    " tests/core/test_scheduling_ranks.py::test_a_rank_that_is_replaced_takes_no_pin_that_was_meant_for_the_old_one",
    "B-59": "tests/core/test_ledger.py::test_columns_are_sums_and_no_time_is_given_twice_whatever_happens",
    "B-63": LEDGER_TESTS + "test_a_request_is_counted_once_in_the_queue_and_once_on_its_rank",
    "B-76": f"{LEDGER_TESTS}test_a_refused_duplicate_takes_nothing_from_the_original,"
    " tests/core/test_scheduling_admission.py::"
    "test_an_id_is_taken_while_its_request_lives_and_as_long_again_as_the_setting_says",
    "B-66": LEDGER_TESTS + "test_five_hundred_at_once_never_exceed_a_bound_of_a_hundred",
    "B-67": LEDGER_TESTS + "test_a_defect_between_the_pick_and_the_acceptance_leaves_no_charge",
    "B-68": ROUTER_TESTS + "test_an_unreadable_row_fails_its_request_only",
    "B-82": "n/a: one thread writes, and the time of a report is an argument of the event that brings it",
    "O-01": LEDGER_TESTS + "test_a_charge_is_the_requests_own_cost_not_what_it_waits_for",
    "O-02": LEDGER_TESTS + "test_a_hundred_requests_are_charged_once_each_on_every_path",
    "O-03": LEDGER_TESTS + "test_a_head_that_takes_longer_than_predicted_shortens_no_other_wait",
    "O-06": LEDGER_TESTS + "test_one_refusal_by_the_engine_takes_one_member_out_of_its_batch",
    "O-14": LEDGER_TESTS + "test_one_bad_row_undoes_none_of_the_others",
    "O-15": LEDGER_TESTS + "test_a_refused_duplicate_takes_nothing_from_the_original",
    "O-07": ROUTER_TESTS + "test_orphans_of_an_earlier_gateway_are_aborted_at_once_and_never_live",
    # 7.2 batching and queues
    "B-07": SCHEDULING_TESTS + "test_a_slow_rank_is_not_flooded_with_batches",
    "B-06": "tests/config/test_scheduling_checks.py::test_remarks",
    "B-10": SCHEDULING_TESTS + "test_arrivals_within_one_window_are_one_batch",
    "B-37": f"{SCHEDULING_TESTS}test_a_defect_while_a_batch_is_formed_loses_nothing,"
    " tests/property/test_router_machine.py::TestRouterMachine",
    "B-35": f"{SCHEDULING_TESTS}test_an_idle_rank_is_preferred_to_a_busy_one,"
    f" {SCHEDULING_TESTS}test_a_tie_in_the_queue_goes_to_ranks_evenly,"
    " tests/core/test_pickers.py::test_random_choice_among_equals_is_even",
    "B-44": SCHEDULING_TESTS + "test_the_predicted_wait_grows_with_the_queue",
    "B-45": "tests/core/test_gate.py::test_without_a_known_step_or_a_model_tokens_count,"
    " tests/core/test_predictor.py::test_without_settings_predictions_only_order_by_new_tokens",
    "B-58": f"{SCHEDULING_TESTS}test_urgent_newcomers_do_not_renew_the_window_for_ever,"
    " tests/core/test_batcher.py::test_predicted_time_caps_growth_before_it_is_exceeded",
    "B-60": SCHEDULING_TESTS + "test_equal_priorities_leave_in_order_of_arrival",
    "B-29": f"{BATCH_TESTS}test_no_member_of_a_batch_exceeds_what_its_rank_may_take,"
    " tests/core/test_scheduling_ranks.py::test_a_prompt_that_no_rank_can_hold_is_refused_not_queued",
    "B-54": "tests/config/test_loader.py::test_section_errors",
    "O-12": BATCH_TESTS + "test_an_idle_rank_gets_what_is_there_at_once",
    "O-16": f"{BATCH_TESTS}test_a_batch_that_is_full_waits_for_nothing,"
    f" {QUEUE_TESTS}test_a_queue_time_out_is_prompt_although_no_gate_opens",
    "O-09": "n/a: no batcher fills up to the head's budget; what is late for itself is not sent: "
    f"{QUEUE_TESTS}test_what_is_late_when_the_gate_opens_is_not_sent",
    "O-17": f"{SCHEDULING_TESTS}test_a_predictor_that_fails_fails_no_request,"
    f" {SCHEDULING_TESTS}test_a_defect_while_a_batch_is_formed_loses_nothing",
    # 7.5 errors, retries, interfaces, operation
    "B-22": SCHEDULING_TESTS + "test_a_cancel_is_an_outcome_of_its_own",
    "B-61": "tests/edges/test_logs.py::test_faults_are_warnings_and_the_callers_own_ends_are_not",
    "B-53": SCHEDULING_TESTS + "test_a_retry_is_accepted_with_the_same_id_and_goes_out_under_another",
    "B-75": SCHEDULING_TESTS + "test_whether_a_retry_can_help_is_said_by_the_error_itself",
    "B-77": SCHEDULING_TESTS + "test_routers_of_different_modes_share_nothing",
    "B-26": "n/a: the core is synchronous; no task is handed to a pool, and none has a fallback that could run it again",
    "B-72": ROUTER_TESTS + "test_a_slow_reader_is_ended_at_its_byte_bound_and_others_go_on",
    "B-17": "tests/edges/test_metrics_names.py::test_names_are_unique,"
    " tests/edges/test_metrics_names.py::test_only_bounded_things_are_labels",
    "B-62": "tests/edges/test_metrics_names.py::test_names_obey_the_rules",
    "B-51": f"{SCHEDULING_TESTS}test_an_event_costs_the_same_however_long_the_queue_is,"
    f" {SCHEDULING_TESTS}test_what_is_kept_back_is_tried_a_bounded_number_of_times",
    "B-71": "tests/core/test_audit.py::test_a_sum_that_drifted_is_found_within_the_interval_and_named",
    "B-70": "n/a: nothing is forwarded; a rank's sockets are opened when it registers and closed when it goes",
    "B-25": "n/a: what is charged is given back by the attempt itself; no address or name is looked up to do it",
    "B-79": "n/a: no recorded traffic is in the tree; tests and benchmarks make their own",
    "B-80": "tests/edges/test_grpc_protos.py::test_field_numbers_never_change",
    "B-81": "tests/config/test_loader.py::test_section_errors",
    "B-64": "tests/core/test_registry.py::test_an_id_is_unique_among_the_live_requests_of_one_caller",
    "B-08": "n/a: nothing is compiled in variants",
}


def test_the_table_is_complete():
    assert list(ROWS) == f"{LEDGERS} {BATCHING} {ERRORS}".split()
    assert [len(section.split()) for section in (LEDGERS, BATCHING, ERRORS)] == [31, 15, 18]


def named_in(row):
    return [word.rstrip(",") for word in row.split() if "::" in word]


@pytest.mark.parametrize("number", ROWS)
def test_every_row_has_a_test_that_exists_or_a_reason(number):
    row = ROWS[number]
    named = named_in(row)
    assert named or row.startswith("n/a: ")
    for name in named:
        path, test = name.split("::")
        tree = ast.parse((ROOT / path).read_text())
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        # A state machine's test is a class that is assigned.
        targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
        defined |= {target.id for target in targets if isinstance(target, ast.Name)}
        assert test in defined, name
