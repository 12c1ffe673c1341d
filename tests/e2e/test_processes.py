"""`serve --processes 2`: one gateway to clients, ranks, scrapers and operators; each process by itself otherwise."""

import asyncio
import json
import os
import re
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from gateway.core.errors import Reason
from gateway.v1.gateway_pb2_grpc import GatewayServiceStub
from tests.support.calls import Generation, generate, make_prompt, make_request
from tests.support.deployment import MAX_CONTEXT_TOKENS, Deployment
from tests.support.processes import WAIT_S, run, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

RANKS = 4
ENDLESS = MAX_CONTEXT_TOKENS - 100
START_S = 2 * WAIT_S


class Several(Deployment):
    """With two processes, on the transport that they need."""

    transport = "fast"

    def start_gateway(self):
        self.gateway = self.process("gateway", "rankgate", "serve", "--processes", 2, "-c", self.config_path)
        return self.gateway

    def start(self):
        self.start_gateway()
        self.start_ranks()
        self.wait_joined()
        return self

    def wait_joined(self):
        wait_until(lambda: self.joined() == self.expected_joins(), "all ranks, everywhere", START_S)

    def joined(self, since=0):
        """(process, rank) of every rank that a process has READY, by the `rank_state` lines from this one on."""
        states = {}
        for event in self.gateway.events("rank_state")[since:]:
            states[event["process"], event["rank"]] = event["new"]
        return {key for key, state in states.items() if state == "READY"}

    def kill(self, process):
        """Kill one of the processes, which has no last words. How many `rank_state` lines there were."""
        os.kill(self.pids[process], signal.SIGKILL)
        return len(self.gateway.events("rank_state"))

    def expected_joins(self):
        everywhere = {(process, rank) for process in range(2) for rank in range(RANKS)}
        return everywhere if self.protocol == "vllm" else {key for key in everywhere if key[1] % 2 == key[0]}

    @property
    def pids(self):
        """Of the processes, by number; those that were started again have their new one."""
        (started,) = self.gateway.events("processes_started")
        pids = list(started["pids"])
        for event in self.gateway.events("process_restarted"):
            pids[event["process"]] = event["pid"]
        return pids

    def ended(self, outcome="ok"):
        """How many requests each process has logged the end of."""
        lines = [line for line in self.gateway.events("request_ended") if line["outcome"] == outcome]
        return [sum(line["process"] == process for line in lines) for process in range(2)]


class Clients:
    """Connections of their own: the system gives each to one of the processes."""

    def __init__(self, site, count):
        option = ("grpc.use_local_subchannel_pool", 1)
        self.channels = [grpc.aio.insecure_channel(site.ports.grpc, options=[option]) for _ in range(count)]
        self.stubs = [GatewayServiceStub(channel) for channel in self.channels]

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await asyncio.gather(*(channel.close() for channel in self.channels))

    async def one_each(self, tokens=8):
        """One request on every connection; all are answered in full."""
        requests = [make_request(make_prompt(5, number), tokens) for number in range(len(self.stubs))]
        outcomes = await asyncio.gather(*(generate(*pair) for pair in zip(self.stubs, requests, strict=True)))
        for request, outcome in zip(requests, outcomes, strict=True):
            outcome.assert_complete(request)

    async def streams(self, tokens):
        """A running stream on every connection."""
        requests = [make_request(make_prompt(6, number), tokens) for number in range(len(self.stubs))]
        generations = [Generation(stub, request) for stub, request in zip(self.stubs, requests, strict=True)]
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(generation.first_token() for generation in generations))
        return generations


@pytest.fixture
async def clients():
    async with AsyncExitStack() as stack:

        async def open_clients(site, count=16):
            return await stack.enter_async_context(Clients(site, count))

        yield open_clients


async def waited(condition, what):
    await asyncio.to_thread(wait_until, condition, what, START_S)


async def test_requests_reach_both_processes_and_count_once(protocol, clients):
    with Several(protocol, RANKS) as site:
        await asyncio.to_thread(site.start)
        many = await clients(site)
        for _ in range(2):
            await many.one_each()
        await waited(lambda: sum(site.ended()) == 32, "the terminal lines")
        assert min(site.ended()) > 0, "with 16 connections one process gets none once in 32,768 runs"
        assert await asyncio.to_thread(site.metric, "rankgate_requests_total") == 32
        assert await asyncio.to_thread(site.metric, "rankgate_generated_tokens_total") == 32 * 8
        page = await asyncio.to_thread(site.scrape)
        ready = re.findall(r'rankgate_rank_state\{(?:process="(\d)",)?rank="(\d)",state="READY"\} 1.0', page)
        assert {(int(process or int(rank) % 2), int(rank)) for process, rank in ready} == site.expected_joins()
        assert 'rankgate_process_up{process="1"} 1.0' in page
        assert page.count("rankgate_config_info{") == 1

        # An operator's word is for all of them.
        answer = await asyncio.to_thread(site.call, "AdminService/DrainRank", {"rank": 1})
        assert answer.message["rank"]["state"] == "RANK_STATE_DRAINING"
        taken = await asyncio.to_thread(site.engines[0].ask, "state")
        before = taken[1]["adds_received"]
        await many.one_each()
        assert (await asyncio.to_thread(site.engines[0].ask, "state"))[1]["adds_received"] == before

        streams = await many.streams(150)
        site.gateway.send(signal.SIGTERM)
        for stream in streams:
            (await stream.done()).assert_complete(stream.request)
        assert await asyncio.to_thread(site.gateway.wait) == 0
        assert site.gateway.events("processes_stopped")[0]["codes"] == {"0": 0, "1": 0}
        assert sum(site.ended()) == 64
        assert site.engines[0].total("live") == 0
        assert site.gateway.members() == []


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_killed_process_takes_only_its_own_clients_along_and_comes_back(protocol, victim, clients):
    with Several(protocol, RANKS) as site:
        await asyncio.to_thread(site.start)
        many = await clients(site)
        await many.one_each()
        counted = await asyncio.to_thread(site.metric, "rankgate_requests_total")
        streams = await many.streams(200)
        pid = site.pids[victim]
        os.kill(pid, signal.SIGKILL)
        codes = []
        for stream in streams:
            outcome = await stream.done()
            codes.append(outcome.code)
            if outcome.code is grpc.StatusCode.OK:
                outcome.assert_complete(stream.request)
            else:
                assert outcome.code is grpc.StatusCode.UNAVAILABLE
                outcome.assert_prefix(stream.request)
        lost = codes.count(grpc.StatusCode.UNAVAILABLE)
        assert 0 < lost < 16, "some were its own, and no others ended"

        await waited(lambda: site.gateway.events("process_restarted"), "the process to be started again")
        (died,) = site.gateway.events("process_died")
        assert (died["process"], died["pid"], died["code"]) == (victim, pid, -signal.SIGKILL)
        assert site.pids[victim] != pid
        mine = {key for key in site.expected_joins() if key[0] == victim}

        def is_back():
            joins = [
                line
                for line in site.gateway.events("rank_state")
                if line["process"] == victim and line["new"] == "READY"
            ]
            return {(line["process"], line["rank"]) for line in joins[len(mine) :]} == mine

        await waited(is_back, "its ranks to be found again without a handshake")
        assert not site.gateway.events("rank_joining")[len(site.expected_joins()) :], "no rank was asked anew"
        before = site.ended()
        for _ in range(2):
            await (await clients(site)).one_each()
        await waited(lambda: site.ended()[victim] > before[victim], "its terminal lines")
        now = await asyncio.to_thread(site.metric, "rankgate_requests_total")
        assert now >= counted + 32, "counters never go back"
        assert await asyncio.to_thread(site.metric, "rankgate_process_restarts_total") == 1
        assert site.gateway.stop() == 0


async def test_ranks_that_come_back_join_everywhere(protocol, clients):
    with Several(protocol, RANKS) as site:
        await asyncio.to_thread(site.start)
        site.engines[0].kill()
        await waited(lambda: not site.joined(), "all to notice")
        site.start_ranks()
        await waited(lambda: site.joined() == site.expected_joins(), "them to be back")
        await (await clients(site)).one_each()
        of_it = {key for key in site.expected_joins() if key[0] == 1}
        mark = site.kill(1)
        await waited(lambda: site.gateway.events("process_restarted"), "the process to be started again")
        await waited(lambda: site.joined(mark) == of_it, "its ranks")
        await (await clients(site)).one_each()

        # What an operator has taken out of service stays so in a process that starts anew.
        await asyncio.to_thread(site.call, "AdminService/DrainRank", {"rank": 1})
        mark = site.kill(1)
        await waited(lambda: len(site.gateway.events("process_restarted")) == 2, "the process to be started again")
        await waited(lambda: site.joined(mark) == {key for key in of_it if key[1] != 1}, "the others")
        await asyncio.sleep(0.5)
        assert (1, 1) not in site.joined(mark)
        await (await clients(site)).one_each()
        site.gateway.send_to_group(signal.SIGINT)
        assert await asyncio.to_thread(site.gateway.wait) == 0


async def test_a_drain_ends_with_its_rank_and_with_a_restart_of_it():
    with Several("vllm", RANKS, reload={"watch_interval_s": None}) as site:
        await asyncio.to_thread(site.start)
        for rank in (1, RANKS - 1):
            answer = await asyncio.to_thread(site.call, "AdminService/DrainRank", {"rank": rank})
            assert answer.message["rank"]["state"] == "RANK_STATE_DRAINING"
        config = json.loads(site.config_path.read_text())
        config["groups"][0]["ranks"] = RANKS - 1
        site.config_path.write_text(json.dumps(config))
        site.gateway.send(signal.SIGHUP)
        await waited(lambda: len(site.gateway.events("config_reloaded")) == 2, "both to reload")
        site.engines[0].kill()
        await waited(lambda: not site.joined(), "all to notice")
        site.start_ranks(RANKS - 1)
        left = {key for key in site.expected_joins() if key[1] < RANKS - 1}
        await waited(lambda: site.joined() == left, "them to be back, and none drained")
        mark = site.kill(1)
        await waited(lambda: site.gateway.events("process_restarted"), "the process to be started again")
        await waited(lambda: site.joined(mark) == {key for key in left if key[0] == 1}, "its ranks")
        await asyncio.sleep(0.5)
        assert site.joined(mark) == {key for key in left if key[0] == 1}, "and none is drained again"
        assert not site.gateway.events("process_not_started")
        assert site.gateway.stop() == 0


async def test_reloads_are_everybodys_or_nobodys(clients):
    with Several("vllm", RANKS, reload={"watch_interval_s": None}) as site:
        await asyncio.to_thread(site.start)
        config = json.loads(site.config_path.read_text())

        def reload_with(**changes):
            site.config_path.write_text(json.dumps(config | changes))
            site.gateway.send(signal.SIGHUP)

        reload_with(policy={"preset": "round_robin"})
        await waited(lambda: len(site.gateway.events("config_reloaded")) == 2, "both to reload")
        many = await clients(site)
        await many.one_each()
        assert await asyncio.to_thread(site.metric, "rankgate_config_reload_total") == 1

        reload_with(policy={"preset": "no_such"})
        await waited(lambda: len(site.gateway.events("config_kept")) == 2, "both to refuse")
        assert {line["result"] for line in site.gateway.events("config_kept")} == {"invalid"}
        assert f"{site.config_path}:" in site.gateway.events("config_kept")[0]["error"]
        reload_with(state_dir="/tmp/x")
        await waited(lambda: len(site.gateway.events("config_kept")) == 4, "both to refuse")
        assert site.gateway.events("config_kept")[-1]["result"] == "refused"
        assert await asyncio.to_thread(site.metric, "rankgate_config_last_reload_successful") == 0

        config["policy"] = {"preset": "p2c"}
        site.config_path.write_text(json.dumps(config))
        answer = await asyncio.to_thread(site.call, "AdminService/ReloadConfig")
        assert answer.message["reload"]["result"] == "RELOAD_RESULT_APPLIED"
        os.kill(site.pids[0], signal.SIGKILL)
        await waited(lambda: site.gateway.events("process_restarted"), "the process to be started again")
        effective = await asyncio.to_thread(site.call, "AdminService/GetEffectiveConfig")
        assert json.loads(effective.message["json"])["policy"]["preset"] == "p2c", "it starts with what is in force"
        assert site.gateway.stop() == 0


async def test_a_second_signal_ends_all_at_once(clients):
    with Several("tokenspeed", RANKS) as site:
        await asyncio.to_thread(site.start)
        streams = await (await clients(site)).streams(ENDLESS)
        site.gateway.send(signal.SIGTERM)
        await waited(lambda: len(site.gateway.events("draining")) == 2, "both to drain")
        site.gateway.send(signal.SIGTERM)
        assert await asyncio.to_thread(site.gateway.wait) == 0
        for stream in streams:
            outcome = await stream.done()
            outcome.assert_prefix(stream.request)
            assert (outcome.code, outcome.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.DRAINING)


async def test_processes_end_with_their_supervisor():
    with Several("tokenspeed", RANKS) as site:
        await asyncio.to_thread(site.start)
        pids = site.pids
        site.gateway.kill()
        for pid in pids:
            await waited(lambda pid=pid: not is_alive(pid), "the processes to end")


async def test_what_keeps_it_from_starting_is_said():
    with Several("tokenspeed", RANKS) as site:
        await asyncio.to_thread(site.start)
        second = site.process("second", "rankgate", "serve", "--processes", 2, "-c", site.config_path)
        assert await asyncio.to_thread(second.wait, START_S) == 1
        (line,) = second.events("start_failed")
        assert f"listen.grpc: cannot listen on {site.ports.grpc}: Address already in use" in line["error"]
        taken = json.loads(site.config_path.read_text())
        taken["listen"] |= {"grpc": "127.0.0.1:0", "metrics": None}
        taken["groups"][0]["handshake"] = "tcp://127.0.0.1:0"
        path = site.directory / "taken.yaml"
        path.write_text(json.dumps(taken))
        third = site.process("third", "rankgate", "serve", "--processes", 2, "-c", path)
        assert await asyncio.to_thread(third.wait, START_S) == 1
        assert f"listen.admin: cannot listen on {site.ports.admin}" in third.events("start_failed")[-1]["error"]
        assert third.members() == [], "no process is left behind"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"listen": {"transport": "grpcio"}}, "2 processes share listen.grpc, which listen.transport: fast can"),
        ({"listen": {"transport": "fast"}, "groups": 1}, "so 1 ranks take at most 1 processes"),
    ],
)
def test_what_several_processes_can_not_do_is_a_usage_error(tmp_path, change, problem):
    groups = [
        {"name": "a", "protocol": "tokenspeed", "handshake": "tcp://127.0.0.1:5570", "ranks": change.get("groups", 2)}
    ]
    model = {"name": "m", "max_context_tokens": 10, "vocab_size": 10}
    path = tmp_path / "gateway.yaml"
    path.write_text(json.dumps({"version": 1, "listen": change["listen"], "model": model, "groups": groups}))
    answer = run("rankgate", "serve", "-c", path, "--processes", 2)
    assert answer.returncode == 2
    assert problem in answer.stderr.replace("\n", " ")


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
