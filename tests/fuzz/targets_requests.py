"""Requests of clients, and answers to them: protobuf in, bytes made by hand out."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from google.protobuf.message import Message

from gateway.core.events import RequestArrived
from gateway.core.request import Attempt, Request
from gateway.core.validation import Validator
from gateway.edges.grpc_encode import encode_head, encode_many, encode_output
from gateway.edges.grpc_engine.tokenspeed import TokenSpeedService
from gateway.edges.grpc_engine.vllm import VllmService
from gateway.edges.grpc_methods import decode
from gateway.edges.grpc_request import Call, RequestReader
from gateway.edges.varint import encode_varint
from gateway.types import FinishReason, Sampling, TokenLogprob
from gateway.v1 import gateway_pb2
from tests.fuzz.mutator import Frame, Mutator
from tests.fuzz.target import Check, Target, damage_bytes, refusable
from tests.support.engine_edge import PROTOS
from tests.support.fake_driver import FakeDriver
from tests.support.grpc_edge import make_config

_EXTREMES = (0, 1, -1, 2, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 1e38, -0.0, float("nan"), float("inf"))
_TEXTS = ("", "a", "x" * 5_000, "\x00", "\U0001f600", "\n", " padded ")


def damage_message(message_type: type[Message]) -> Callable[[Mutator, Frame], Frame]:
    """Changes of bytes, or of fields to values at the ends of their ranges."""

    def damage(mutator: Mutator, frame: Frame) -> Frame:
        if mutator.source.random() < 0.5:
            return damage_bytes(mutator, frame)
        message = message_type.FromString(frame[0])
        for _ in range(mutator.source.randint(1, 3)):
            _change_field(mutator, message)
        return [message.SerializeToString()]

    return damage


def _change_field(mutator: Mutator, message: Any) -> None:
    source = mutator.source
    field = source.choice(message.DESCRIPTOR.fields)
    try:
        if field.is_repeated:
            values = getattr(message, field.name)
            extra = source.choice((*_EXTREMES, *_TEXTS))
            values.extend([extra] * source.choice((1, 1, 300, 5_000)))
        elif field.message_type is not None:
            child = getattr(message, field.name)
            child.SetInParent()
            _change_field(mutator, child)
        else:
            setattr(message, field.name, source.choice((*_EXTREMES, *_TEXTS, True)))
    except (TypeError, ValueError, AttributeError):
        message.ClearField(field.name)  # no value of this field's type


# ---- requests ------------------------------------------------------------------------------------


@cache
def request_corpus() -> Sequence[Frame]:
    """Messages of GenerateMany, which hold those of Generate."""
    sampling = gateway_pb2.Sampling(max_tokens=9, temperature=0.5, top_p=0.9, top_k=5, seed=-3, n=2, logprobs=2)
    sampling.stop_token_ids.extend((2, 7))
    full = gateway_pb2.GenerateRequest(
        request_id="abc", prompt_token_ids=range(1, 40), sampling=sampling, data_parallel_rank=1, priority=-4
    )
    full.session_id, full.no_cache, full.model, full.allow_resume = "s", True, "m", False
    short = gateway_pb2.GenerateRequest(request_id="r", prompt_token_ids=[1, 2, 3])
    messages = [
        *(gateway_pb2.GenerateManyRequest(start=request) for request in (full, short)),
        gateway_pb2.GenerateManyRequest(abort_request_id="abc"),
    ]
    return [[message.SerializeToString()] for message in messages]


@cache
def engine_corpus(family: str) -> Sequence[Frame]:
    """Requests of a family's standard service with all that it has a value for."""
    pb = PROTOS[family]
    length = "max_tokens" if family == "vllm" else "max_new_tokens"
    sampling = pb.SamplingParams(**{length: 9}, temperature=0.5, top_p=0.9, stop=["x"], stop_token_ids=[2, 7], n=2)
    tokenized = pb.TokenizedInput(original_text="some text", input_ids=range(1, 40))
    request = pb.GenerateRequest(request_id="r", tokenized=tokenized, sampling_params=sampling, stream=True)
    bare = pb.GenerateRequest(request_id="r", tokenized=pb.TokenizedInput(input_ids=[1, 2, 3]))
    return [[message.SerializeToString()] for message in (request, bare)]


def _check_request() -> Check:
    config = make_config()
    reader = RequestReader(config)
    validator = Validator(config.model, config.limits, "vllm", 4)
    many = gateway_pb2.GenerateManyRequest

    def arrive(data: bytes) -> None:
        instruction = decode(many, data)
        if instruction.WhichOneof("message") != "start":
            return
        request = instruction.start
        arrived = reader.generate(request, Call(), 1.0, client_key="c", arrived_at_unix_s=1.0, sink=None)
        assert arrived.prompt_token_ids == list(request.prompt_token_ids)
        validator.check(arrived)
        assert 0 < len(arrived.prompt_token_ids) < config.model.max_context_tokens
        assert max(arrived.prompt_token_ids) < config.model.vocab_size

    return lambda frame: refusable(arrive, frame[0])


def _check_engine_request(family: str) -> Check:
    config = make_config()
    driver: Any = FakeDriver()
    service = (VllmService if family == "vllm" else TokenSpeedService)(config, driver)
    request_type: type[Message] = PROTOS[family].GenerateRequest

    def arrive(data: bytes) -> None:
        wanted = service.read(decode(request_type, data))
        assert len(wanted.prompt_token_ids) < config.model.max_context_tokens

    return lambda frame: refusable(arrive, frame[0])


# ---- answers: the encoder by hand against protobuf -------------------------------------------------


def _random_answers(mutator: Mutator, _: Frame) -> Frame:
    """A seed for answers: the frame is what they are drawn from."""
    return [mutator.source.randbytes(16)]


def _check_answers() -> Check:
    def run(frame: Frame) -> None:
        source = Mutator(frame[0].hex()).source
        outputs, parts, expected = [], [], gateway_pb2.GenerateManyResponse()
        for number in range(source.randrange(4)):
            sequence, tokens, logprobs, finish = _answer(source, number)
            output = encode_output(encode_head(sequence.request.arrived.request_id, sequence.index), sequence, parts)
            if output:
                outputs.append(output)
                _expect(expected.outputs.add(), sequence, tokens, logprobs, finish)
        assert not parts
        assert gateway_pb2.GenerateManyResponse.FromString(encode_many(outputs, ())) == expected
        number = source.getrandbits(source.randrange(1, 65))
        request = gateway_pb2.Sampling.FromString(b"\x08" + encode_varint(number))
        assert request.max_tokens == number % 2**32

    return run


def _answer(source: Any, number: int) -> "tuple[Any, list[int], list[TokenLogprob], FinishReason]":
    name = "".join(chr(source.randrange(32, 0xD7FF)) for _ in range(source.randrange(1, 40)))
    sampling = Sampling(max_tokens=9)
    arrived = RequestArrived(client_key="", request_id=name, prompt_token_ids=[1] * 3, sampling=sampling, n=number + 1)
    sequence = Request(1, arrived, 0.0).sequences[number]
    sequence.attempts = 1
    sequence.attempt = Attempt(sequence, "w", 1, source.randrange(1024), 1, 0.0)
    tokens = [source.getrandbits(source.randrange(1, 33)) for _ in range(source.randrange(30))]
    logprobs = []
    if source.random() < 0.3:
        tops = [tuple((source.getrandbits(20), -1.5) for _ in range(source.randrange(3))) for _ in tokens]
        logprobs = [TokenLogprob(source.choice((-0.5, 0.0, float("-inf"))), top) for top in tops]
    finish: FinishReason = source.choice(("", "", "stop", "length", "abort", "error"))
    sequence.append(tokens, logprobs or None)
    sequence.finish = finish
    return sequence, tokens, logprobs, finish


def _expect(response: Any, sequence: Any, tokens: Any, logprobs: Any, finish: str) -> None:
    response.request_id, response.index = sequence.request.arrived.request_id, sequence.index
    response.token_ids.extend(tokens)
    for item in logprobs:
        entry = response.logprobs.add(logprob=item.logprob)
        for token, logprob in item.top:
            entry.top.add(token_id=token, logprob=logprob)
    if finish:
        response.finish.reason = gateway_pb2.FinishReason.Value(f"FINISH_REASON_{finish.upper()}")
        response.finish.prompt_tokens = 3
        response.finish.completion_tokens = sequence.completion_tokens
        response.finish.cached_tokens = sequence.cached_tokens
        response.finish.rank = sequence.attempt.rank
        response.finish.attempts = sequence.attempts


def _engine_target(family: str) -> Target:
    damage = damage_message(PROTOS[family].GenerateRequest)
    corpus, make = lambda: engine_corpus(family), lambda: _check_engine_request(family)
    return Target(f"{family}_requests", 2, corpus, make, damage)


TARGETS = (
    Target("requests", 4, request_corpus, _check_request, damage_message(gateway_pb2.GenerateManyRequest)),
    _engine_target("vllm"),
    _engine_target("tokenspeed"),
    Target("answers", 1, lambda: [[b""]], _check_answers, _random_answers),
)
