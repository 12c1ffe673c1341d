"""Reload of all processes together. Each one says first whether it could; only if all can, all do."""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import msgspec
import structlog

from gateway.config.errors import ConfigError
from gateway.config.schema import Config
from gateway.edges.reload import READ_TIMEOUT_S, Outcome
from gateway.edges.side_thread import in_side_thread
from gateway.processes.child import Child
from gateway.processes.handshakes import HandshakeRelay
from gateway.processes.peer import PeerError
from gateway.processes.source import Source

_TIMEOUT_S = 60.0
_log = structlog.get_logger("gateway.reload")


class JointReload:
    """One at a time. `text` is what is in force; `in_force` is told of every configuration that comes to be."""

    def __init__(
        self,
        children: Sequence[Child],
        source: Source,
        relay: HandshakeRelay,
        text: str,
        config: Config,
        in_force: Callable[[Config], None],
    ) -> None:
        self.text = text
        self._config = config
        self._children = children
        self._source = source
        self._relay = relay
        self._in_force = in_force
        self._lock = asyncio.Lock()

    async def reload(self, cause: str) -> Outcome:
        """Reload all processes that are up, or none. The outcome is the first one's that has something against it."""
        async with self._lock:
            try:
                async with asyncio.timeout(READ_TIMEOUT_S):
                    text = await in_side_thread(self._source.read)
                    wanted = await in_side_thread(partial(self._source.parse, text))
            except ConfigError as error:
                return await self._refused(self._children, cause, str(error))
            except TimeoutError:
                problem = f"the file could not be read within {READ_TIMEOUT_S:g} s"
                return await self._refused((), cause, problem, result="failed")
            try:
                problems = await self._problems(text)
            except PeerError as error:
                # It is not asked to refuse: what could not check the text might come to itself and take it, alone.
                return await self._refused((), cause, str(error), result="failed")
            if problems:
                return await self._refused(list(problems), cause, "; ".join(next(iter(problems.values()))), text)
            return await self._apply(cause, text, wanted)

    async def catch_up(self, child: Child, text: str) -> None:
        """A process has started with `text`, which may be in force no more."""
        async with self._lock:
            if text != self.text:
                await self._ask(child, "start", self.text)

    async def _apply(self, cause: str, text: str, wanted: Config) -> Outcome:
        before = self._config
        try:
            self._relay.configure(wanted)
        except OSError as error:
            return await self._refused((), cause, str(error), result="failed")
        done: list[Child] = []
        outcomes = []
        for child in self._children:
            if not child.is_up:
                continue
            outcome = await self._ask(child, cause, text)
            if not outcome.is_successful:
                for each in done:
                    await self._ask(each, "taken back", self.text)
                self._relay.configure(before)
                return outcome
            done.append(child)
            outcomes.append(outcome)
        self.text, self._config = text, wanted
        self._in_force(wanted)
        return outcomes[0] if outcomes else _outcome("applied", cause)

    async def _problems(self, text: str) -> dict[Child, list[str]]:
        """What processes have against the text. Raises PeerError when one can't say."""
        found = {}
        for child in self._children:
            if child.is_up:
                problems = await child.ask("check", text, _TIMEOUT_S)
                if problems:
                    found[child] = problems
        return found

    async def _refused(
        self,
        children: Sequence[Child],
        cause: str,
        problem: str,
        text: str | None = None,
        result: Literal["invalid", "failed"] = "invalid",
    ) -> Outcome:
        """Nothing changes. The processes that are against it find so themselves, and count and log it."""
        outcomes = [await self._ask(child, cause, text, problem) for child in children if child.is_up]
        if outcomes:
            return outcomes[0]
        _log.error("config_kept", result=result, cause=cause, error=problem)
        return _outcome(result, cause, problem)

    async def _ask(self, child: Child, cause: str, text: str | None, problem: str = "") -> Outcome:
        body = {"cause": cause, "text": text, "problem": problem}
        try:
            return msgspec.convert(await child.ask("reload", body, _TIMEOUT_S), Outcome)
        except PeerError as error:
            # A process that dies on the way starts with what is in force then.
            _log.error("process_not_reloaded", process=child.number, error=str(error))
            return _outcome("failed", cause, str(error))


def _outcome(result: Literal["applied", "invalid", "failed"], cause: str, *problems: str) -> Outcome:
    return Outcome(result=result, cause=cause, at_unix_s=time.time(), problems=problems)
