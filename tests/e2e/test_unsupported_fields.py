"""Each field of the standard engine services that is set but can't be honoured is refused by name, over the real wire.

The values are the smallest that count as set; the table must know every field that the gateway refuses.
"""

import pytest

from gateway.edges.grpc_engine import tokenspeed, vllm
from tests.support.engine_edge import SERVICE_NAMES

pytestmark = pytest.mark.e2e

INVALID_ARGUMENT = 3
MODULES = {"vllm": vllm, "tokenspeed": tokenspeed}

FIELDS = {
    "vllm": {
        "text": "hello",
        "kv_transfer_params": {"remote_host": "h", "remote_port": 1},
        "kv_transfer_params_json": "{}",
        "mm_inputs": {"im_token_id": 1},
        "extra_mm_inputs": [{}],
        "media_refs": {"items": [{"url": "file:///x.png"}]},
        "sampling_params.stop": ["x"],
        "sampling_params.prompt_logprobs": 0,
        "sampling_params.logit_bias": {"7": 1.5},
        "sampling_params.truncate_prompt_tokens": 5,
        "sampling_params.grammar_from_first_token": True,
        "sampling_params.json_schema": "{}",
        "sampling_params.regex": "a+",
        "sampling_params.grammar": "root ::= 'a'",
        "sampling_params.structural_tag": "{}",
        "sampling_params.json_object": True,
        "sampling_params.choice": {"choices": ["a", "b"]},
    },
    "tokenspeed": {
        "logprob_start_len": 0,
        "token_ids_logprob": [1],
        "top_logprobs_num": 1,
        "mm_inputs": {"items": [{}]},
        "encode_bootstrap_info": {},
        "kv_bootstrap_info": {"bootstrap_host": "h"},
        "sampling_params.stop": ["x"],
        "sampling_params.logit_bias": {"7": 1.5},
        "sampling_params.regex": "a+",
        "sampling_params.json_schema": "{}",
        "sampling_params.ebnf_grammar": "root ::= 'a'",
        "sampling_params.structural_tag": "{}",
        "sampling_params.custom_params": {"x": 1},
    },
}
BY_VALUE = {"logprob_start_len"}
"""Refused for some values only, so not in the gateway's tables."""


@pytest.mark.parametrize(("family", "field"), [(family, field) for family, table in FIELDS.items() for field in table])
def test_the_field_is_refused_by_name(shared_sites, family, field):
    site = shared_sites(family)
    path, _, name = field.rpartition(".")
    request = {"tokenized": {"input_ids": [1, 2, 3]}, "sampling_params": {"temperature": 0.5}, "stream": True}
    if field == "text":
        del request["tokenized"]  # the other arm of a oneof
    (request[path] if path else request)[name] = FIELDS[family][field]
    adds = site.engines[0].total("adds_received")
    answer = site.call(f"{SERVICE_NAMES[family]}/Generate", request)
    assert answer.refused() == (INVALID_ARGUMENT, "UNSUPPORTED_FIELD")
    assert answer.info["metadata"] == {"field": field, "retryable": "false"}
    assert answer.status["message"].startswith(f"{field}: ")
    assert answer.messages == []
    assert site.engines[0].total("adds_received") == adds


@pytest.mark.parametrize("family", FIELDS)
def test_no_field_that_the_gateway_refuses_is_missing_above(family):
    module = MODULES[family]
    refused = {*module.UNSUPPORTED_REQUEST, *(f"sampling_params.{name}" for name in module.UNSUPPORTED_SAMPLING)}
    assert FIELDS[family].keys() == refused | (BY_VALUE & FIELDS[family].keys())


def test_alternatives_of_the_gateways_own_api_are_refused_where_ranks_have_none(shared_sites):
    request = {"prompt_token_ids": [1, 2, 3], "sampling": {"max_tokens": 2, "logprobs": 1}}
    refused = shared_sites("tokenspeed").call("Generate", request)
    assert refused.refused() == (INVALID_ARGUMENT, "UNSUPPORTED_FIELD")
    assert refused.info["metadata"]["field"] == "logprobs"
    served = shared_sites("vllm").call("Generate", request)
    assert [len(token["top"]) for message in served.messages for token in message["logprobs"]] == [1, 1]
