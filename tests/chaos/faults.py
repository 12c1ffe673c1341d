"""Carries out a plan: one task per fault, each ends what it began."""

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from engine_stub.control_client import ask
from gateway.v1 import admin_pb2
from tests.chaos.clients import Clients
from tests.chaos.plan import BROKEN_FILE, Fault, Kind
from tests.chaos.proxy import Side, Way
from tests.chaos.site import Rank, Site, connect
from tests.chaos.traffic import slow_job
from tests.support.processes import WAIT_S

ASK_S = 15.0


class Done(msgspec.Struct, frozen=True):
    """What was carried out, when (s after the load began), and what came of it."""

    fault: Fault
    began_s: float
    ended_s: float
    note: str


class Injector:
    """Breaks a site as planned. `done` lists it in order of ends."""

    def __init__(self, site: Site, clients: Clients) -> None:
        self._site = site
        self._clients = clients
        self._clock_offset_s = 0.0
        self._file = asyncio.Lock()
        self._began_at = 0.0
        self.done: list[Done] = []
        self._acts: dict[Kind, Callable[[Fault], Awaitable[str]]] = {
            Kind.KILL: self._kill,
            Kind.STOP: self._stop,
            Kind.STORM: self._storm,
            Kind.FREEZE: self._freeze,
            Kind.FREEZE_LONG: self._freeze,
            Kind.CUT: self._cut,
            Kind.STALL: self._stall,
            Kind.BLACK_HOLE: self._stall,
            Kind.NOISE: self._garbage,
            Kind.REPLACED: self._garbage,
            Kind.MISCOUNT: self._miscount,
            Kind.LYING_LOAD: self._lying_load,
            Kind.DEAF_TO_ABORTS: self._deaf,
            Kind.DRAIN: self._drain,
            Kind.SLOW_READER: self._slow_reader,
            Kind.DISCONNECT: self._disconnect,
            Kind.BURST: self._burst,
            Kind.PAUSE: self._pause,
            Kind.CLOCK: self._clock,
            Kind.RELOAD: self._reload,
        }

    async def run(self, plan: list[Fault], began_at: float) -> None:
        """Every fault at its time, and all of them over."""
        self._began_at = began_at
        async with asyncio.TaskGroup() as group:
            for fault in plan:
                await asyncio.sleep(max(0.0, began_at + fault.at_s - time.monotonic()))
                group.create_task(self._carry_out(fault))

    async def _carry_out(self, fault: Fault) -> None:
        began_s = time.monotonic() - self._began_at
        try:
            note = await self._acts[fault.kind](fault)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on and the report says so
            note = f"{type(error).__name__}: {error}"
            logs = [self._site.members[rank].process.log[-1000:] for rank in fault.ranks]
            self._clients.book.violation(f"{fault.kind} of {fault.ranks} could not be carried out: {note}; {logs}")
        self.done.append(Done(fault, round(began_s, 3), round(time.monotonic() - self._began_at, 3), note))

    def _rank(self, fault: Fault) -> Rank:
        return self._site.members[fault.ranks[0]]

    async def _kill(self, fault: Fault) -> str:
        await self._end_and_restart(self._rank(fault), signal.SIGKILL, fault.duration_s)
        return ""

    async def _stop(self, fault: Fault) -> str:
        await self._end_and_restart(self._rank(fault), signal.SIGTERM, fault.duration_s)
        return ""

    async def _storm(self, fault: Fault) -> str:
        for _ in range(fault.detail["rounds"]):
            ranks = [self._site.members[rank] for rank in fault.ranks]
            await asyncio.gather(*(self._end_and_restart(rank, signal.SIGKILL, fault.duration_s) for rank in ranks))
        return ""

    async def _end_and_restart(self, rank: Rank, number: signal.Signals, after_s: float) -> None:
        process = rank.process
        rank.ended.append(process)
        process.send(number)
        await asyncio.to_thread(process.wait)
        await asyncio.sleep(after_s)
        self._site.start_member(rank)

    async def _freeze(self, fault: Fault) -> str:
        process = self._rank(fault).process
        process.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.duration_s)
        finally:
            process.send(signal.SIGCONT)
        return ""

    async def _cut(self, fault: Fault) -> str:
        rank = self._rank(fault)
        cut = rank.path.cut(fault.detail["share"], Side(fault.detail["side"]))
        note = f"{cut} connections"
        if cut and not rank.process.events("serving"):
            # Engines say HELLO once. With one that was lost they wait for minutes, and are started again then.
            await self._end_and_restart(rank, signal.SIGKILL, 0.0)
            note += ", restarted: it was joining"
        return note

    async def _stall(self, fault: Fault) -> str:
        path = self._rank(fault).path
        path.hold(Way(fault.detail["way"]))
        try:
            await asyncio.sleep(fault.duration_s)
        finally:
            path.release()
        return ""

    async def _garbage(self, fault: Fault) -> str:
        every, kind = fault.detail["every"], fault.detail["garbage"]
        return await self._with(fault, garbage_every=every, garbage_kind=kind)

    async def _miscount(self, fault: Fault) -> str:
        return await self._with(fault, **{fault.detail["fault"]: fault.detail["every"]})

    async def _lying_load(self, fault: Fault) -> str:
        return await self._with(fault, load=fault.detail["load"])

    async def _deaf(self, fault: Fault) -> str:
        return await self._with(fault, ignore_aborts=fault.detail["ignored"])

    async def _with(self, fault: Fault, **changes: Any) -> str:
        """Switch faults of the rank's engine on, and all of them off again."""
        process = self._rank(fault).process
        healthy: dict[str, Any] = {name: None if name != "ignore_aborts" else 0 for name in changes}
        healthy.pop("garbage_kind", None)
        problems = []
        for settings, pause_s in ((changes, fault.duration_s), (healthy, 0.0)):
            request = {"op": "faults", "rank": 0, "set": settings}
            reply = await asyncio.to_thread(ask, process.control, request, ASK_S)
            if not reply["ok"]:
                problems.append(reply["error"])
            await asyncio.sleep(pause_s)
        return "; ".join(problems)

    async def _drain(self, fault: Fault) -> str:
        rank = fault.ranks[0]
        async with connect(self._site.ports.admin) as channel:
            stub = self._site.admin_stub(channel)
            await stub.DrainRank(admin_pb2.DrainRankRequest(rank=rank, migrate=fault.detail["migrate"]), timeout=WAIT_S)
            await asyncio.sleep(fault.duration_s)
            await stub.UndrainRank(admin_pb2.UndrainRankRequest(rank=rank), timeout=WAIT_S)
        return ""

    async def _slow_reader(self, fault: Fault) -> str:
        job = slow_job(f"slow{fault.number}")
        job.reads_slowly_s = fault.duration_s
        await self._clients.read_slowly(job, fault.detail["rpc"])
        return self._clients.book.requests[job.request.request_id].outcome

    async def _disconnect(self, fault: Fault) -> str:
        connection = self._clients.connections[fault.detail["connection"]]
        return f"{await connection.tear(abrupt=fault.detail['abrupt'])} requests"

    async def _burst(self, fault: Fault) -> str:
        await self._clients.burst(f"burst{fault.number}", fault.detail["count"])
        return ""

    async def _pause(self, fault: Fault) -> str:
        """The gateway's own process stands still, as on a host that swaps or a virtual machine that moves."""
        self._site.gateway.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.duration_s)
        finally:
            self._site.gateway.send(signal.SIGCONT)
        return ""

    async def _clock(self, fault: Fault) -> str:
        self._clock_offset_s += fault.detail["jump_s"]
        self._site.clock_file.write_text(str(self._clock_offset_s))
        self._site.gateway.send(signal.SIGUSR1)
        return ""

    async def _reload(self, fault: Fault) -> str:
        """Another policy, or a file that can't be read and is mended again."""
        wanted = fault.detail["to"]
        async with self._file:
            good = self._site.config_path.read_text()
            if wanted == BROKEN_FILE:
                self._put_in_force(good[: len(good) // 2])
                await asyncio.sleep(fault.duration_s)
                self._put_in_force(good)
            else:
                self._put_in_force(json.dumps(json.loads(good) | {"policy": {"preset": wanted}}))
        return ""

    def _put_in_force(self, text: str) -> None:
        path = self._site.config_path
        new = path.with_suffix(".new")
        new.write_text(text)
        new.replace(path)
        self._site.gateway.send(signal.SIGHUP)
