"""Every line of the table "what kills or deafens a rank" is refused before a rank could see it."""

import math

import pytest

from gateway.core.errors import GatewayError, Reason
from gateway.core.validation import Validator
from gateway.types import Sampling
from tests.support.core import Bench, make_config

VALID = {"max_tokens": 16}


def check(protocol: str = "vllm", *, limits: dict | None = None, sampling: dict | None = None, **request):
    config = make_config(4, protocol, **({"limits": limits} if limits else {}))
    validator = Validator(config.model, config.limits, protocol, 4)
    bench = Bench(1, join=False)
    validator.check(bench.arrived(sampling=Sampling(**(VALID | (sampling or {}))), **request))


BAD_SAMPLING = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": math.nan}, "top_p"),
    ({"top_k": 0}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"presence_penalty": -2.1}, "presence_penalty"),
    ({"presence_penalty": math.nan}, "presence_penalty"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"repetition_penalty": -1.0}, "repetition_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 4096}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"stop_token_ids": (32000,)}, "stop_token_ids"),
    ({"stop_token_ids": (-1,)}, "stop_token_ids"),
    ({"stop_token_ids": tuple(range(257))}, "stop_token_ids"),
]


@pytest.mark.parametrize("protocol", ["vllm", "tokenspeed"])
@pytest.mark.parametrize(("sampling", "field"), BAD_SAMPLING)
def test_bad_sampling_is_refused_by_name(protocol, sampling, field):
    with pytest.raises(GatewayError) as caught:
        check(protocol, sampling=sampling)
    assert caught.value.reason is Reason.INVALID_REQUEST
    assert caught.value.facts["field"] == field
    assert not caught.value.retryable


BAD_REQUESTS = [
    ({"prompt": []}, Reason.INVALID_REQUEST, "prompt_token_ids"),
    ({"prompt": [1, 32000]}, Reason.INVALID_REQUEST, "prompt_token_ids"),
    ({"prompt": [1, -1]}, Reason.INVALID_REQUEST, "prompt_token_ids"),
    ({"prompt": [1] * 4096}, Reason.PROMPT_TOO_LONG, None),
    ({"n": 0}, Reason.INVALID_REQUEST, "n"),
    ({"n": 65}, Reason.INVALID_REQUEST, "n"),
    ({"model": "other"}, Reason.MODEL_NOT_FOUND, None),
    ({"pinned_rank": -1}, Reason.INVALID_RANK, None),
    ({"pinned_rank": 4}, Reason.INVALID_RANK, None),
    ({"priority": 2**31}, Reason.INVALID_REQUEST, "priority"),
    ({"request_id": "x" * 257}, Reason.INVALID_REQUEST, "request_id"),
]


@pytest.mark.parametrize(("request_fields", "reason", "field"), BAD_REQUESTS)
def test_bad_requests_are_refused(request_fields, reason, field):
    with pytest.raises(GatewayError) as caught:
        check(**request_fields)
    assert caught.value.reason is reason
    assert caught.value.facts.get("field") == field


def test_a_bad_pin_names_the_valid_range():
    with pytest.raises(GatewayError, match=r"valid ranks are 0\.\.3") as caught:
        check(pinned_rank=9)
    assert (caught.value.facts["valid_min"], caught.value.facts["valid_max"]) == (0, 3)


def test_the_edges_of_every_range_pass():
    check(
        sampling={
            "max_tokens": 4093,
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": 1,
            "min_p": 1.0,
            "frequency_penalty": -2.0,
            "presence_penalty": 2.0,
            "repetition_penalty": 0.01,
            "min_tokens": 4093,
            "seed": -(2**63),
            "logprobs": 20,
            "stop_token_ids": (0, 31999),
        },
        prompt=[0, 31999, 1],
        n=64,
        pinned_rank=3,
        model="m",
        priority=-(2**31),
    )


def test_logprob_alternatives_are_refused_where_the_wire_has_none():
    check("tokenspeed", sampling={"logprobs": 0})
    with pytest.raises(GatewayError) as caught:
        check("tokenspeed", sampling={"logprobs": 1})
    assert caught.value.reason is Reason.UNSUPPORTED_FIELD


def test_a_refused_request_reaches_no_rank_and_holds_nothing():
    bench = Bench(2)
    for request_fields, reason, _ in BAD_REQUESTS[:8]:
        with pytest.raises(GatewayError) as caught:
            bench.request(**request_fields)
        assert caught.value.reason is reason
    assert bench.dispatched == []
    bench.assert_quiet()
    assert sum(bench.router.counters.refused.values()) == 8
