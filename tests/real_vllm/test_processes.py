"""Real ranks serve several processes of one gateway, each on sockets of its own."""

import asyncio
import os
import signal

import grpc
import pytest

from gateway.v1.gateway_pb2_grpc import GatewayServiceStub
from tests.real_vllm.conftest import connect
from tests.real_vllm.test_streams import greedy
from tests.support.calls import Generation, generate
from tests.support.processes import wait_until
from tests.support.vllm_site import EOS, RANKS, START_S, VllmSite

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(600)]

PROCESSES = 2


class SeveralSite(VllmSite):
    """A gateway of two processes."""

    transport = "fast"

    def joins(self, process):
        """The ranks that have joined a process, in the order in which they did."""
        events = self.gateway.events("rank_state")
        return [event["rank"] for event in events if event["process"] == process and event["new"] == "READY"]

    def wait_joined(self, times=1, processes=range(PROCESSES)):
        for process in processes:
            wait_until(lambda process=process: len(self.joins(process)) >= times * RANKS, "all ranks", START_S)


async def test_real_ranks_answer_each_process_and_survive_one(rank_server, direct):
    prompts = [[5 + number, 6, 7, 8] for number in range(16)]
    wanted = [await asyncio.to_thread(direct.generate, prompt, 24, _eos_token_id=EOS) for prompt in prompts]
    with SeveralSite(rank_server, processes=PROCESSES) as site:
        await asyncio.to_thread(site.start)
        await asyncio.to_thread(site.wait_joined)
        channels = [connect(site) for _ in prompts]
        clients = [GatewayServiceStub(channel) for channel in channels]

        async def serve_all():
            outcomes = await asyncio.gather(
                *(
                    generate(client, greedy(prompt, 24, data_parallel_rank=number % RANKS))
                    for number, (client, prompt) in enumerate(zip(clients, prompts, strict=True))
                )
            )
            assert [outcome.text for outcome in outcomes] == wanted

        await serve_all()
        ended = [line["process"] for line in site.gateway.ends(len(prompts))]
        assert set(ended) == set(range(PROCESSES))

        # More than the ranks have slots, so that both processes have some that run or wait.
        running = [Generation(client, greedy([5, 6, 7, 8], 600)) for client in clients]
        await running[0].first_token()
        (started,) = site.gateway.events("processes_started")
        os.kill(started["pids"][1], signal.SIGKILL)
        codes = [(await generation.done()).code for generation in running]
        assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
        await asyncio.to_thread(site.wait_joined, 2, [1])
        assert all(process.is_running for process in site.processes)
        await serve_all()
        assert len(site.joins(0)) == RANKS, "the other process's ranks never left"
        await asyncio.gather(*(channel.close() for channel in channels))
        assert await asyncio.to_thread(site.gateway.stop) == 0
