"""Requests that are held so that others must be refused, and what a refusal has to say."""

import functools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc

from gateway.v1 import gateway_pb2
from gateway.v1.gateway_pb2_grpc import GatewayServiceStub
from tests.support.deployment import Deployment
from tests.support.grpcurl import Answer
from tests.support.processes import ROOT, WAIT_S, wait_until

LONGEST_HINT_S = 5.0
_ROW = re.compile(r"\| `([A-Z_]+)` \| `([A-Z_]+)` \| (yes|no|depends) \|")


@functools.cache
def documented() -> dict[str, tuple[int, str]]:
    """The status code of each reason and whether a retry can help, as docs/errors.md says it to callers."""
    rows = _ROW.findall((ROOT / "docs/errors.md").read_text())
    return {reason: (grpc.StatusCode[code].value[0], retry) for reason, code, retry in rows}


def trailers(text: str) -> dict[str, str]:
    """The trailers that `grpcurl -v` printed."""
    lines = text.partition("Response trailers received:\n")[2].splitlines()
    return dict(line.split(": ", 1) for line in lines if ": " in line)


def hint_s(answer: Answer) -> float | None:
    """The delay of the RetryInfo, if there is one."""
    assert answer.status is not None
    found = [each for each in answer.status["details"] if each["@type"].endswith("/google.rpc.RetryInfo")]
    return float(found[0]["retry_delay"].removesuffix("s")) if found else None


def assert_refused(
    answer: Answer, reason: str, *, retryable: bool, has_hint: bool | None = None, **facts: object
) -> dict[str, str]:
    """Code, ErrorInfo and RetryInfo of a refusal. `has_hint` is None where it goes with `retryable`. Gives the facts."""
    assert answer.status is not None, answer.messages
    code, retry = documented()[reason]
    assert (answer.info["reason"], answer.status["code"]) == (reason, code), answer.status
    assert answer.info["domain"] == "rankgate"
    metadata: dict[str, str] = answer.info["metadata"]
    assert metadata["retryable"] == str(retryable).lower()
    # What can never be accepted is not retryable, whatever the table says.
    assert not retryable or retry in ("yes", "depends")
    assert {name: metadata.get(name) for name in facts} == {name: str(fact) for name, fact in facts.items()}
    hint = hint_s(answer)
    assert (hint is not None) == (retryable if has_hint is None else has_hint)
    assert hint is None or 0 < hint <= LONGEST_HINT_S
    assert answer.messages == [], "nothing was generated"
    return metadata


@contextmanager
def holding(
    site: Deployment, *requests: gateway_pb2.GenerateRequest, timeout_s: float | None = None, **headers: str
) -> Iterator[list[Any]]:
    """Generate calls that are live in the block and cancelled behind it. Only for a gateway that has nothing else.

    `timeout_s` is their deadline; `headers` are their metadata, with _ for -.
    """
    metadata = tuple((key.replace("_", "-"), value) for key, value in headers.items())
    with grpc.insecure_channel(site.ports.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = GatewayServiceStub(channel)
        before = site.metric("rankgate_live_requests")
        calls = [stub.Generate(request, metadata=metadata, timeout=timeout_s) for request in requests]

        def are_held() -> bool:
            for call in calls:
                assert call.is_active(), (call.code(), call.details())
            return site.metric("rankgate_live_requests") == before + len(calls)

        wait_until(are_held, "the held requests to be accepted")
        yield calls
        for call in calls:
            call.cancel()
        wait_until(lambda: site.metric("rankgate_live_requests") <= before, "the held requests to be gone")


@contextmanager
def silent(site: Deployment, rank: int | None = None) -> Iterator[None]:
    """Ranks that take requests and aborts and generate nothing meanwhile."""
    (engine,) = site.engines
    engine.ask("faults", rank, silent=True)
    try:
        yield
    finally:
        engine.ask("faults", rank, silent=False)
        wait_until(lambda: engine.total("live") == 0, "the ranks to be empty", WAIT_S)


def decision_of(site: Deployment, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The recorded decision that a refusal, or the trailers of an answer, name."""
    number = int(metadata.get("decision_id") or metadata["x-rankgate-decision-id"])
    decision = site.call("AdminService/GetDecision", {"decision_id": number}).message["decision"]
    assert decision["id"] == number
    return dict(decision)


def explained(site: Deployment, request: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """What would be decided for a request now."""
    return dict(site.call("AdminService/Explain", {"request": request}, **options).message["decision"])


def by_rank(decision: Mapping[str, Any], field: str) -> list[Any]:
    """One field of a decision's ranks, in order."""
    return [row[field] for row in decision["ranks"]]
