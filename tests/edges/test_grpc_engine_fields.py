"""Every field of both protos is honoured, refused by name, or known to have no effect on token ids."""

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.struct_pb2 import Struct
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2, vllm_engine_pb2

from gateway.core.errors import GatewayError, Reason
from gateway.edges.driver import Driver
from gateway.edges.grpc_engine import tokenspeed, vllm
from gateway.types import Sampling
from tests.support.core import Bench

# Fields that reach the request; the tests below check the values.
HONOURED = {
    "vllm": {
        "GenerateRequest": {"request_id", "tokenized", "sampling_params", "stream", "data_parallel_rank"},
        "TokenizedInput": {"input_ids"},
        "SamplingParams": {
            *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
            *("repetition_penalty", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "n"),
            *("logprobs", "seed"),
        },
    },
    "tokenspeed": {
        "GenerateRequest": {
            *("request_id", "tokenized", "sampling_params", "stream", "data_parallel_rank"),
            *("return_logprob", "logprob_start_len"),  # a start of 0 or more is refused, see below
        },
        "TokenizedInput": {"input_ids"},
        "SamplingParams": {
            *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
            *("repetition_penalty", "max_new_tokens", "min_new_tokens", "stop_token_ids", "ignore_eos", "n"),
            "sampling_seed",
        },
    },
}
MODULES = {"vllm": vllm, "tokenspeed": tokenspeed}
PROTOS = {"vllm": vllm_engine_pb2, "tokenspeed": tokenspeed_scheduler_pb2}
SERVICES = {"vllm": vllm.VllmService, "tokenspeed": tokenspeed.TokenSpeedService}


def read(family, request):
    bench = Bench(1, family)
    return SERVICES[family](bench.config, Driver(bench.router)).read(request)


def request_of(family, **sampling):
    pb = PROTOS[family]
    return pb.GenerateRequest(
        request_id="r",
        tokenized=pb.TokenizedInput(input_ids=[5, 6, 7]),
        sampling_params=pb.SamplingParams(**sampling),
    )


def set_something(message, descriptor):
    """Set the field to some value that is not its default."""
    name = descriptor.name
    if descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry:
        getattr(message, name)[7 if name == "logit_bias" and "vllm" in message.DESCRIPTOR.full_name else "7"] = 1.5
    elif descriptor.type == FieldDescriptor.TYPE_MESSAGE:
        target = getattr(message, name)
        if descriptor.is_repeated:
            target.add()
        elif isinstance(target, Struct):
            target.update({"x": 1})
        else:
            target.SetInParent()
    else:
        value = {FieldDescriptor.TYPE_STRING: "x", FieldDescriptor.TYPE_BOOL: True}.get(descriptor.type, 1)
        if descriptor.is_repeated:
            getattr(message, name).append(value)
        else:
            setattr(message, name, value)


@pytest.mark.parametrize("family", PROTOS)
@pytest.mark.parametrize("message", ["GenerateRequest", "TokenizedInput", "SamplingParams"])
def test_no_field_is_forgotten(family, message):
    module = MODULES[family]
    unsupported = {"GenerateRequest": module.UNSUPPORTED_REQUEST, "SamplingParams": module.UNSUPPORTED_SAMPLING}
    refused = set(unsupported.get(message, {}))
    ignored = set(module.IGNORED.get(message, ()))
    honoured = HONOURED[family][message]
    declared = set(PROTOS[family].DESCRIPTOR.message_types_by_name[message].fields_by_name)
    assert declared == refused | ignored | honoured
    assert len(declared) == len(refused) + len(ignored) + len(honoured)


def unsupported_fields():
    for family, module in MODULES.items():
        yield from ((family, "", name) for name in module.UNSUPPORTED_REQUEST)
        yield from ((family, "sampling_params.", name) for name in module.UNSUPPORTED_SAMPLING)


@pytest.mark.parametrize(("family", "path", "name"), list(unsupported_fields()))
def test_each_unsupported_field_is_refused_by_name(family, path, name):
    request = request_of(family)
    target = request.sampling_params if path else request
    set_something(target, target.DESCRIPTOR.fields_by_name[name])
    with pytest.raises(GatewayError) as caught:
        read(family, request)
    assert caught.value.reason is Reason.UNSUPPORTED_FIELD
    assert caught.value.facts["field"] == path + name
    assert caught.value.message.startswith(f"{path}{name}: ")


@pytest.mark.parametrize("family", PROTOS)
def test_fields_that_act_on_text_are_accepted(family):
    request = request_of(family)
    for name in MODULES[family].IGNORED["SamplingParams"]:
        setattr(request.sampling_params, name, True)
    request.tokenized.original_text = "hello"
    assert read(family, request) == read(family, request_of(family))


def test_explicit_zeroes_with_presence_count_as_set():
    request = request_of("vllm", prompt_logprobs=0)
    with pytest.raises(GatewayError, match="prompt_logprobs"):
        read("vllm", request)
    request = request_of("vllm", json_object=False)
    with pytest.raises(GatewayError, match="json_object"):
        read("vllm", request)


@pytest.mark.parametrize(("start", "is_refused"), [(-1, False), (0, True), (3, True)])
def test_prompt_logprobs_of_tokenspeed(start, is_refused):
    request = request_of("tokenspeed")
    request.logprob_start_len = start
    if not is_refused:
        assert read("tokenspeed", request).sampling.logprobs is None
        return
    with pytest.raises(GatewayError) as caught:
        read("tokenspeed", request)
    assert caught.value.facts["field"] == "logprob_start_len"


def test_empty_custom_params_ask_for_nothing():
    request = request_of("tokenspeed")
    request.sampling_params.custom_params.SetInParent()
    assert read("tokenspeed", request).n == 1


@pytest.mark.parametrize("family", PROTOS)
def test_unset_means_the_default(family):
    wanted = read(family, request_of(family))
    assert wanted.sampling == Sampling(max_tokens=4096 - 3)
    assert (wanted.n, wanted.pinned_rank, wanted.is_stream) == (1, None, False)
    assert list(wanted.prompt_token_ids) == [5, 6, 7]


def test_vllm_plain_zeroes_are_unset_but_an_explicit_temperature_of_zero_is_greedy():
    wanted = read("vllm", request_of("vllm", top_p=0.0, top_k=0, repetition_penalty=0.0, temperature=0.0, n=0))
    assert wanted.sampling == Sampling(max_tokens=4093, temperature=0.0)
    assert wanted.n == 1


def test_tokenspeed_explicit_zeroes_are_the_clients_own():
    sampling = read("tokenspeed", request_of("tokenspeed", top_p=0.0, top_k=0, repetition_penalty=0.0)).sampling
    assert (sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (0.0, 0, 0.0)


def test_every_vllm_value_arrives():
    request = request_of(
        "vllm",
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        max_tokens=9,
        min_tokens=2,
        stop_token_ids=[8, 9],
        ignore_eos=True,
        n=3,
        logprobs=4,
        seed=-5,
    )
    request.stream = True
    request.data_parallel_rank = 0
    wanted = read("vllm", request)
    assert wanted.sampling == Sampling(
        max_tokens=9,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        min_tokens=2,
        seed=-5,
        logprobs=4,
        stop_token_ids=(8, 9),
        ignore_eos=True,
    )
    assert (wanted.request_id, wanted.n, wanted.pinned_rank, wanted.is_stream) == ("r", 3, 0, True)


def test_every_tokenspeed_value_arrives():
    request = request_of(
        "tokenspeed",
        temperature=0.5,
        top_p=0.25,
        top_k=-1,
        min_p=0.125,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        max_new_tokens=9,
        min_new_tokens=2,
        stop_token_ids=[8, 9],
        ignore_eos=True,
        n=3,
        sampling_seed=2**40,
    )
    request.stream = True
    request.return_logprob = True
    request.data_parallel_rank = 2
    wanted = read("tokenspeed", request)
    assert wanted.sampling == Sampling(
        max_tokens=9,
        temperature=0.5,
        top_p=0.25,
        top_k=-1,
        min_p=0.125,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        min_tokens=2,
        seed=2**40,
        logprobs=0,
        stop_token_ids=(8, 9),
        ignore_eos=True,
    )
    assert (wanted.request_id, wanted.n, wanted.pinned_rank, wanted.is_stream) == ("r", 3, 2, True)
