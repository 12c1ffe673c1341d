"""Reload as an operator does it: SIGHUP, a changed file, grpcurl; and what a service manager hears of it."""

import asyncio
import itertools
import json
import os
import signal
import socket

import pytest

from gateway.edges.reload import RESULTS
from gateway.v1.gateway_pb2_grpc import GatewayServiceStub
from tests.support.calls import generate, make_prompt, make_request
from tests.support.deployment import Deployment
from tests.support.processes import Process, wait_until

pytestmark = pytest.mark.e2e

INVALID_ARGUMENT, FAILED_PRECONDITION = 3, 9
RELOAD = "AdminService/ReloadConfig"


@pytest.fixture
def alone():
    """A deployment that no other test shares, started; its file is only looked at when it is told to."""

    def start(protocol, **settings):
        settings.setdefault("reload", {"watch_interval_s": None})
        return Deployment(protocol, **settings)

    return start


def rewrite(site, ranks=None, **sections):
    """The configuration file with other sections; without any it is what it was at the start."""
    path = site.config_path
    original = path.with_suffix(".original")
    if not original.exists():
        original.write_text(path.read_text())
    config = json.loads(original.read_text()) | sections
    if ranks is not None:
        config["groups"][0]["ranks"] = ranks
    path.write_text(json.dumps(config, indent=1))


def reloads(site, event="config_reloaded"):
    return site.gateway.events(event)


def hang_up(site, count=None):
    """SIGHUP, and wait for what becomes of it."""
    known = len(reloads(site)) + len(reloads(site, "config_kept"))
    site.gateway.send(signal.SIGHUP)
    wait_until(lambda: len(reloads(site)) + len(reloads(site, "config_kept")) > known, "the reload")


def effective(site):
    return json.loads(site.call("AdminService/GetEffectiveConfig").message["json"])


def shown(site):
    """The states in ListRanks, by rank."""
    return [rank["state"].removeprefix("RANK_STATE_") for rank in site.call("ListRanks").message["ranks"]]


class Load:
    """Generate calls in several lanes until it is told to end."""

    def __init__(self, client, lanes=12):
        self.outcomes = []
        self._numbers = itertools.count()
        self._is_ending = False
        self._tasks = [asyncio.create_task(self._lane(client)) for _ in range(lanes)]

    async def _lane(self, client):
        while not self._is_ending:
            number = next(self._numbers)
            request = make_request(make_prompt(3 + number % 20, number), 2 + number % 12)
            self.outcomes.append((request, await generate(client, request)))

    async def more(self, count=30):
        wanted = len(self.outcomes) + count
        await asyncio.to_thread(wait_until, lambda: len(self.outcomes) >= wanted, "load")

    async def end(self):
        self._is_ending = True
        await asyncio.gather(*self._tasks)
        for request, outcome in self.outcomes:
            outcome.assert_complete(request)
        return len(self.outcomes)


async def test_ranks_and_policy_change_under_load_without_a_failed_request(protocol, connect, alone):
    with alone(protocol, ranks=2) as site:
        site.start()
        load = Load(GatewayServiceStub(connect(site)))
        await load.more()
        rewrite(site, ranks=3, policy={"preset": "p2c"})
        await asyncio.to_thread(hang_up, site)
        assert reloads(site)[-1]["changed"] == ["policy.preset", "groups[0].ranks"]
        added = await asyncio.to_thread(site.start_ranks, 1, 2)
        await asyncio.to_thread(wait_until, lambda: shown(site) == ["READY"] * 3, "the added rank")
        await load.more()
        await asyncio.to_thread(site.call, "AdminService/DrainRank", {"rank": 0})
        await load.more()
        await asyncio.to_thread(site.call, "AdminService/UndrainRank", {"rank": 0})
        assert added.total("adds_received") > 0
        rewrite(site, ranks=2, policy={"preset": "lmetric"})
        await asyncio.to_thread(hang_up, site)
        await asyncio.to_thread(wait_until, lambda: shown(site) == ["READY"] * 2, "the removed rank to be gone")
        await load.more()
        assert added.total("live") == 0
        assert await load.end() > 100
        assert {event["incarnation"] for event in site.gateway.events("rank_state")} == {1}
        assert site.gateway.stop() == 0
        (stopped,) = site.gateway.events("stopped")
        assert stopped["accepted"] == stopped["ended"]["OK"]
        assert not [event for event in site.gateway.events() if event["level"] == "error"]


def test_a_broken_file_keeps_the_old_one_and_says_where(alone):
    with alone("vllm") as site:
        site.start()
        before = effective(site)
        site.config_path.write_text(site.config_path.read_text().replace('"ranks": 2', '"ranks": "two"'))
        place = f"{site.config_path}:"
        line = next(n for n, text in enumerate(site.config_path.read_text().splitlines(), 1) if '"two"' in text)
        hang_up(site)
        (kept,) = reloads(site, "config_kept")
        assert (kept["result"], kept["cause"], kept["level"]) == ("invalid", "SIGHUP", "error")
        assert kept["error"].startswith(f"{place}{line}:")
        answer = site.call(RELOAD)
        assert answer.refused() == (INVALID_ARGUMENT, "CONFIG_INVALID")
        assert answer.status["message"].startswith(f"{place}{line}:")
        assert effective(site) == before
        last = site.call("AdminService/GetEffectiveConfig").message["last_reload"]
        assert (last["result"], last["cause"]) == ("RELOAD_RESULT_INVALID", "ReloadConfig")
        assert last["problems"] == [kept["error"]]
        assert site.metric("rankgate_config_last_reload_successful") == 0
        assert 'rankgate_config_reload_total{result="invalid"} 2.0' in site.scrape()
        assert site.call("Generate", '{"prompt_token_ids": [1, 2], "sampling": {"max_tokens": 2}}').messages
        rewrite_to_what_it_was(site)
        assert site.call(RELOAD).message["reload"]["result"] == "RELOAD_RESULT_UNCHANGED"
        assert site.metric("rankgate_config_last_reload_successful") == 1


def rewrite_to_what_it_was(site):
    site.config_path.write_text(site.config_path.read_text().replace('"two"', "2"))


def test_what_needs_a_restart_refuses_the_whole_file(alone):
    with alone("tokenspeed") as site:
        site.start()
        before = effective(site)
        rewrite(site, ranks=4, policy={"preset": "p2c"}, ordering="preserve", limits={"default_deadline_s": 9.0})
        answer = site.call(RELOAD)
        assert answer.refused() == (FAILED_PRECONDITION, "CONFIG_NEEDS_RESTART")
        assert answer.status["message"] == "ordering: needs a restart"
        assert effective(site) == before
        assert shown(site) == ["READY"] * 2
        rewrite(site, ranks=4, policy={"preset": "p2c"}, limits={"default_deadline_s": 9.0})
        message = site.call(RELOAD).message
        assert message["reload"]["result"] == "RELOAD_RESULT_APPLIED"
        assert sorted(message["reload"]["changed"]) == [
            "groups[0].ranks",
            "limits.default_deadline_s",
            "policy.preset",
        ]
        assert message["sha256"] == site.call("AdminService/GetEffectiveConfig").message["sha256"]
        assert f'rankgate_config_info{{sha256="{message["sha256"]}"}} 1.0' in site.scrape()
        assert shown(site) == ["READY", "READY", "ABSENT", "ABSENT"]
        assert effective(site)["policy"]["preset"] == "p2c"


def test_a_swapped_link_is_noticed_and_the_flags_of_the_start_stay(alone, tmp_path):
    """As Kubernetes replaces a ConfigMap."""
    with Deployment("vllm", reload={"watch_interval_s": 0.05}) as site:
        site.start_ranks()
        text = json.loads(site.config_path.read_text())
        for name, settings in (
            ("..v1", {}),
            ("..v2", {"policy": {"preset": "p2c"}, "observability": {"log_level": "error"}}),
        ):
            (site.directory / name).mkdir()
            (site.directory / name / "gateway.yaml").write_text(json.dumps(text | settings))
        site.config_path.unlink()
        (site.directory / "..data").symlink_to("..v1")
        site.config_path.symlink_to("..data/gateway.yaml")
        site.gateway = site.process("gateway", "rankgate", "serve", "-c", site.config_path, "--log-level", "debug")
        site.wait_ready()
        (site.directory / "..tmp").symlink_to("..v2")
        (site.directory / "..tmp").rename(site.directory / "..data")
        wait_until(lambda: reloads(site), "the reload")
        (done,) = reloads(site)
        assert (done["result"], done["cause"], done["changed"]) == ("applied", "file", ["policy.preset"])
        assert effective(site)["observability"]["log_level"] == "debug"


def test_the_log_level_is_live_for_every_logger(alone):
    with alone("vllm", observability={"log_level": "info"}) as site:
        site.start()
        rewrite(site, observability={"log_level": "error"})
        site.gateway.send(signal.SIGHUP)
        wait_until(lambda: effective(site)["observability"]["log_level"] == "error", "the reload")
        known = len(site.gateway.events())
        site.engines[0].stop()
        wait_until(lambda: shown(site) == ["LOST"] * 2, "the loss")
        assert len(site.gateway.events()) == known, "losses are warnings"
        rewrite(site)
        hang_up(site)
        assert reloads(site)[-1]["changed"] == ["observability.log_level"]


def test_many_signals_at_once_are_few_reloads(alone):
    with alone("vllm") as site:
        site.start()
        rewrite(site, policy={"preset": "p2c"})
        for _ in range(200):
            site.gateway.send(signal.SIGHUP)
        wait_until(lambda: reloads(site), "a reload")
        assert site.call(RELOAD).message["reload"]["result"] == "RELOAD_RESULT_UNCHANGED"
        assert reloads(site)[0]["result"] == "applied"
        assert len(reloads(site)) < 200
        assert site.gateway.stop() == 0


class Manager:
    """systemd's end of the socket."""

    def __init__(self, name):
        self.name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{name[1:]}" if name.startswith("@") else name)
        self._socket.setblocking(False)
        self._messages = []

    def heard(self, key):
        """The messages with this key so far."""
        while True:
            try:
                data = self._socket.recv(4096)
            except BlockingIOError:
                return [message for message in self._messages if key in message]
            self._messages.append(dict(line.split("=", 1) for line in data.decode().split("\n")))

    def close(self):
        self._socket.close()

    def order(self, *keys):
        self.heard("")
        return [key for message in self._messages for key in keys if key in message]


@pytest.mark.parametrize("is_abstract", [False, True])
def test_a_service_manager_hears_of_everything(alone, is_abstract):
    with alone("vllm") as site:
        name = f"@rankgate-e2e-{os.getpid()}" if is_abstract else str(site.directory / "notify")
        manager = Manager(name)
        settings = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "200000"}
        site.gateway = Process(site.directory, "noted", "rankgate", "serve", "-c", site.config_path, **settings)
        try:
            # Everything is bound: what waits for it (the ranks, maybe) may start now.
            wait_until(lambda: manager.heard("READY"), "READY=1")
            assert manager.heard("READY")[0]["STATUS"] == "0 of 2 ranks READY"
            site.start_ranks()
            site.wait_ready()
            wait_until(lambda: manager.heard("STATUS")[-1]["STATUS"] == "2 of 2 ranks READY", "the status")
            count = len(manager.heard("WATCHDOG"))
            wait_until(lambda: len(manager.heard("WATCHDOG")) > count + 2, "the watchdog")
            rewrite(site, policy={"preset": "p2c"})
            hang_up(site)
            wait_until(lambda: len(manager.heard("READY")) == 2, "the end of the reload")
            assert int(manager.heard("RELOADING")[0]["MONOTONIC_USEC"]) > 0
            assert site.gateway.stop() == 0
            assert manager.order("READY", "RELOADING", "STOPPING") == ["READY", "RELOADING", "READY", "STOPPING"]
            assert manager.heard("STOPPING")[0]["STATUS"].startswith("draining")
        finally:
            site.gateway.close()
            manager.close()


def test_results_have_a_metric_each(alone):
    with alone("vllm") as site:
        site.start_gateway()
        wait_until(lambda: site.gateway.events("started"), "the start")
        page = site.scrape()
        for result in RESULTS:
            assert f'rankgate_config_reload_total{{result="{result}"}} 0.0' in page
        assert "rankgate_config_last_reload_success_timestamp_seconds 1." in page
