"""The profiles over both wires, and what a request's sampling fields become."""

import msgspec
import pytest

from engine_stub.config import PROFILES, StubConfig, load_config
from engine_stub.faults import Faults
from engine_stub.group import StubGroup
from engine_stub.scheduler import Sampling
from engine_stub.tokens import expected_logprob, expected_tokens
from engine_stub.wire.tokenspeed import SamplingParams, TokenSpeedCodec
from engine_stub.wire.vllm import VllmCodec
from tests.support.raw_gateway import RawGateway
from tests.support.stub_engine import EngineDriver, finishes_of, tokens_of

FAMILIES = ("tokenspeed", "vllm")


@pytest.fixture(params=FAMILIES)
def protocol(request):
    return request.param


@pytest.mark.parametrize("name", PROFILES)
async def test_every_profile_serves_over_the_wire(protocol, name):
    config = load_config(name, None, {"time_scale": 0.0}, {})
    prompts = {f"r{number}": list(range(3, 8 + 4 * number)) for number in range(12)}
    async with (
        RawGateway(protocol) as gateway,
        StubGroup(protocol, gateway.address, ranks=1, config=config) as group,
    ):
        await group.ready()
        await gateway.registered(1)
        for request_id, prompt in prompts.items():
            await gateway.add(0, request_id, prompt, 6)
        batches = await gateway.collect(0, *prompts)
        for request_id, prompt in prompts.items():
            assert tokens_of(batches, request_id) == expected_tokens(prompt, None, 6, config.model.vocab_size)
            assert finishes_of(batches, request_id) == ["length"]


@pytest.mark.parametrize("name", ["aprender", "dgr012"])
def test_logprobs_come_for_slots_that_joined_or_were_recycled(name):
    driver = EngineDriver("tokenspeed", load_config(name, None, {"scheduler.max_active": 2}, {}))
    for number in range(6):
        driver.add(f"r{number}", prompt_len=3 + number, max_tokens=4, logprobs=0 if number % 2 else None)
    batches = driver.run()
    for number in range(6):
        rows = [
            (tokens, values)
            for batch in batches
            for row, tokens, values in zip(batch.rows, batch.raw[2], batch.raw[7], strict=True)
            if row.id == f"r{number}"
        ]
        assert len(rows) == 4
        for tokens, values in rows:
            assert values == ([expected_logprob(token) for token in tokens] if number % 2 else [])


def test_a_batch_can_be_sent_after_the_one_that_follows(protocol):
    driver = EngineDriver(protocol, faults=Faults(reorder_every=2))
    driver.add("a", max_tokens=5)
    tokens = tokens_of(driver.run(), "a")
    first, second, third, fourth, fifth = driver.expected(count=5)
    assert tokens == [first, third, second, fifth, fourth]


def test_the_last_batch_is_sent_although_none_follows(protocol):
    driver = EngineDriver(protocol, faults=Faults(reorder_every=4))
    driver.add("a", max_tokens=4)
    assert tokens_of(driver.run(), "a") == driver.expected(count=4)


class TestSampling:
    FIELDS = {
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    }

    @staticmethod
    def tokenspeed(**fields):
        params = msgspec.structs.astuple(SamplingParams(max_new_tokens=8, **fields))
        payload = ["TokenizedGenerateReqInput", "r", None, None, [1, 2], list(params)]
        return TokenSpeedCodec(StubConfig()).decode([b"\x00", msgspec.msgpack.encode(payload)]).request

    @staticmethod
    def vllm(**fields):
        payload = ["r", [1, 2], None, fields, None, 0.0, None, None, None]
        return VllmCodec(StubConfig()).decode([b"\x00", msgspec.msgpack.encode(payload)]).request

    def test_all_fields_arrive(self, protocol):
        request = getattr(self, protocol)(temperature=0.7, top_k=40, seed=11, **self.FIELDS)
        assert request.sampling == Sampling(temperature=0.7, top_k=40, **self.FIELDS)
        assert request.seed == 11

    @pytest.mark.parametrize("temperature", [0.0, 1e-7])
    def test_no_temperature_is_greedy(self, protocol, temperature):
        assert getattr(self, protocol)(temperature=temperature).sampling.temperature == 0.0

    @pytest.mark.parametrize("temperature", [-1.0, float("nan")])
    def test_tokenspeed_serves_nonsense_as_greedy(self, temperature):
        assert self.tokenspeed(temperature=temperature).sampling.temperature == 0.0

    def test_top_k_off_is_zero(self, protocol):
        assert getattr(self, protocol)(temperature=1.0, top_k=-1).sampling.top_k == 0

    def test_the_defaults_are_plain_sampling(self, protocol):
        assert getattr(self, protocol)().sampling == Sampling(temperature=1.0)
