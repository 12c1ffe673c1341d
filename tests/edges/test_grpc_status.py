"""GatewayError -> google.rpc.Status, and docs/errors.md against the code."""

import re
from pathlib import Path

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2

from gateway.core.errors import GatewayError, Reason
from gateway.edges.grpc_status import CODES, STATUS_KEY, abort_with, to_status
from tests.support.grpc_edge import info_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "errors.md"
ROW = re.compile(
    r"\| `(?P<reason>[A-Z_]+)` \| `(?P<code>[A-Z_]+)` \| (?P<retry>yes|no|depends) \| (.+) \| (?P<step>.+) \|"
)


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_an_error_code_of_google_rpc(reason):
    number, _ = CODES[reason].value
    assert number != 0
    assert code_pb2.Code.Name(number) == CODES[reason].name
    status = to_status(GatewayError(reason, "what to do"))
    assert status.code == number
    assert info_of(status).reason == reason.value


def test_the_document_lists_exactly_the_reasons_with_their_codes_and_next_steps():
    rows = [row for line in DOCUMENT.read_text().splitlines() if (row := ROW.fullmatch(line))]
    assert [row["reason"] for row in rows] == [reason.value for reason in Reason]
    assert {row["reason"]: row["code"] for row in rows} == {r.value: CODES[r].name for r in Reason}
    assert all(row["step"].strip().endswith(".") for row in rows)


def test_only_an_objective_may_be_out_of_reach_for_now_or_for_good():
    rows = [row for line in DOCUMENT.read_text().splitlines() if (row := ROW.fullmatch(line))]
    assert [row["reason"] for row in rows if row["retry"] == "depends"] == ["SLO_UNATTAINABLE"]


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (Reason.KV_TOO_SMALL, grpc.StatusCode.INVALID_ARGUMENT),
        (Reason.TENANT_LIMIT, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Reason.QUEUE_FULL, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Reason.QUEUE_TIMEOUT, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Reason.ORDER_FULL, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Reason.SLO_UNATTAINABLE, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Reason.MAX_AGE_EXCEEDED, grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
)
def test_overload_is_told_apart_from_what_can_never_work(reason, code):
    assert CODES[reason] is code


def test_facts_become_strings_and_absent_ones_are_left_out():
    error = GatewayError(Reason.INVALID_RANK, "no", rank=0, ratio=0.5, is_hot=True, nothing=None, text="x")
    metadata = dict(info_of(to_status(error)).metadata)
    assert metadata == {"retryable": "false", "rank": "0", "ratio": "0.5", "is_hot": "true", "text": "x"}


def test_retry_info_carries_the_delay_to_the_microsecond():
    status = to_status(GatewayError(Reason.GATEWAY_FULL, "full", retryable=True, retry_after_s=1.2505))
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)
    assert retry.retry_delay.ToMicroseconds() == 1_250_500
    assert info_of(status).metadata["retryable"] == "true"


def test_without_a_delay_there_is_no_retry_info():
    status = to_status(GatewayError(Reason.RANK_LOST, "lost", retryable=True))
    assert not any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in status.details)


def test_a_field_becomes_a_bad_request_violation():
    status = to_status(GatewayError(Reason.INVALID_REQUEST, "n: must be at least 1", field="n"))
    bad = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad) for detail in status.details)
    assert [(v.field, v.description) for v in bad.field_violations] == [("n", "n: must be at least 1")]


def test_a_status_stays_small_enough_for_a_clients_default_metadata_limit():
    facts = {f"fact_{number}": "x" * 10_000 for number in range(4)}
    status = to_status(GatewayError(Reason.INVALID_REQUEST, "m" * 100_000, field="n", **facts))
    # Text and details both travel in the trailers, the details base64-encoded.
    assert len(status.message.encode()) + len(status.SerializeToString()) * 4 / 3 < 8192


class _Context:
    async def abort(self, code, details, trailing_metadata):
        self.seen = (code, details, trailing_metadata)
        raise grpc.aio.AbortError


async def test_abort_sends_code_message_details_and_the_callers_metadata():
    context = _Context()
    error = GatewayError(Reason.DRAINING, "go elsewhere")
    with pytest.raises(grpc.aio.AbortError):
        await abort_with(context, error, (("x-request-id", "a"),))
    code, details, trailing = context.seen
    assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "go elsewhere")
    assert dict(trailing) == {"x-request-id": "a", STATUS_KEY: to_status(error).SerializeToString()}
