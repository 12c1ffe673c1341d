"""How an upstream of a proxy answers, told line by line: what `emitter` does for ranks, for servers on asyncio."""

import asyncio
import json
import sys

import msgspec

from tests.bench.peers.emitter import Script


class Pace:
    """When the rows of every answer leave: all streams of one step together, as ranks answer."""

    def __init__(self) -> None:
        self.script = Script()
        self.ended = asyncio.Event()
        self._step = asyncio.Event()

    async def row(self) -> None:
        """Wait for the next step."""
        if self.script.step_ms:
            await self._step.wait()

    async def run(self) -> None:
        """Take steps and commands until the end of stdin."""
        loop = asyncio.get_running_loop()
        loop.add_reader(sys.stdin, self._on_command)
        due = loop.time()
        while not self.ended.is_set():
            step_s = self.script.step_ms / 1e3 or 0.05
            due = max(due + step_s, loop.time())
            await asyncio.sleep(due - loop.time())
            self._step.set()
            self._step = asyncio.Event()

    def _on_command(self) -> None:
        line = sys.stdin.readline()
        if not line:
            self.ended.set()
            asyncio.get_running_loop().remove_reader(sys.stdin)
            return
        self.script = msgspec.convert(json.loads(line), Script)
        print("OK", flush=True)
