"""What is remembered of requests and headers: it changes nothing but the cost, and it is bounded."""

import pytest
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2, vllm_engine_pb2

from gateway.core.errors import GatewayError, Reason
from gateway.edges.driver import Driver
from gateway.edges.grpc_engine.tokenspeed import TokenSpeedService
from gateway.edges.grpc_engine.vllm import VllmService
from gateway.edges.grpc_memo import MAX_ENTRIES, MAX_KEY_BYTES, keep
from gateway.edges.grpc_request import Call, RequestReader
from tests.support.core import Bench
from tests.support.grpc_edge import generate_request, make_config

FAMILIES = {
    "vllm": (VllmService, vllm_engine_pb2, "max_tokens"),
    "tokenspeed": (TokenSpeedService, tokenspeed_scheduler_pb2, "max_new_tokens"),
}


def test_it_is_bounded():
    memo = {}
    for number in range(3 * MAX_ENTRIES):
        keep(memo, b"%d" % number, number)
    assert 0 < len(memo) <= MAX_ENTRIES
    keep(memo, bytes(MAX_KEY_BYTES + 1), 1)
    assert bytes(MAX_KEY_BYTES + 1) not in memo


class World:
    def __init__(self, family):
        service, self.pb, self.max_tokens = FAMILIES[family]
        bench = Bench(1, family)
        self.config = bench.config
        self.service = service(bench.config, Driver(bench.router))

    def read(self, prompt=(5, 6, 7), request_id="r", sampling=None, **fields):
        pb = self.pb
        return self.service.read(
            pb.GenerateRequest(
                request_id=request_id,
                tokenized=pb.TokenizedInput(input_ids=prompt),
                sampling_params=pb.SamplingParams(**(sampling or {})),
                **fields,
            )
        )


@pytest.fixture(params=FAMILIES)
def world(request):
    return World(request.param)


def test_the_same_parameters_are_the_same_object_whatever_the_prompt_and_the_id(world):
    sampling = {world.max_tokens: 5, "temperature": 0.5}
    one, other = world.read(sampling=sampling), world.read((9,), "s", sampling)
    assert one.sampling is other.sampling
    assert (one.request_id, one.prompt_token_ids, other.request_id, other.prompt_token_ids) == (
        "r",
        [5, 6, 7],
        "s",
        [9],
    )


def test_every_other_field_makes_a_difference(world):
    sampling = {world.max_tokens: 5}
    plain = world.read(sampling=sampling)
    assert world.read(sampling=sampling, stream=True).is_stream != plain.is_stream
    assert world.read(sampling=sampling, data_parallel_rank=0).pinned_rank == 0
    assert plain.pinned_rank is None
    assert world.read(sampling={world.max_tokens: 5, "n": 2}).n == 2
    assert world.read(sampling={world.max_tokens: 6}).sampling.max_tokens == 6


def test_room_is_that_of_each_prompt(world):
    rooms = [world.read((1,) * length).sampling.max_tokens for length in (1, 3, 1)]
    context = world.config.model.max_context_tokens
    assert rooms == [context - 1, context - 3, context - 1]


def test_a_refusal_is_one_each_time(world):
    for _ in range(2):
        with pytest.raises(GatewayError) as caught:
            world.read(sampling={"regex": "a"})
        assert caught.value.reason is Reason.UNSUPPORTED_FIELD


class TestGatewayRequests:
    def read(self, reader, prompt=(1, 2, 3), **sampling):
        request = generate_request(prompt, sampling=sampling)
        return reader.generate(request, Call(), 0.0, client_key="c", arrived_at_unix_s=1.5, sink=None)

    def test_the_same_parameters_are_the_same_object(self):
        reader = RequestReader(make_config())
        one, other = self.read(reader, max_tokens=3, seed=1), self.read(reader, (9,), max_tokens=3, seed=1)
        assert one.sampling is other.sampling
        assert self.read(reader, max_tokens=3, seed=2).sampling.seed == 2
        assert (one.n, self.read(reader, max_tokens=3, seed=1, n=2).n) == (1, 2)

    def test_room_is_that_of_each_prompt_and_follows_the_configuration(self):
        reader = RequestReader(make_config())
        assert [self.read(reader, (1,) * length).sampling.max_tokens for length in (1, 3)] == [4095, 4093]
        reader.configure(make_config(model={"max_context_tokens": 100}))
        assert self.read(reader, (1,)).sampling.max_tokens == 99
