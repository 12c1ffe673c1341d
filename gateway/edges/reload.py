"""Reload of the configuration: one at a time, whoever asks for it, and as a whole or not at all.

SIGHUP, a change of the file and `AdminService.ReloadConfig` all end here: read the file, check it, compare it with what is
in force, put it in force. Whatever goes wrong leaves the running configuration as it was, and is said where an operator
looks: in the log, in the metrics, in the call's error and in `GetEffectiveConfig`.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import msgspec
import structlog

from gateway.config.changes import changed_keys, refusals
from gateway.config.effective import cautions, effective_config
from gateway.config.errors import ConfigError
from gateway.config.schema import Config
from gateway.edges.side_thread import in_side_thread

Result = Literal["applied", "unchanged", "invalid", "refused", "failed"]
RESULTS: tuple[Result, ...] = get_args(Result)
READ_TIMEOUT_S = 30.0
"""A file system that hangs must not keep later reloads from their turn."""
_UNWATCHED_S = 1.0
"""How often to see whether the file is to be watched again."""
_log = structlog.get_logger("gateway.reload")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one reload. `problems` are lines for the operator; `changed` the keys that are other ones now.

    `remarks` are what `cautions` says of the new configuration and did not say of the one before.
    """

    result: Result
    cause: str
    at_unix_s: float
    changed: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def is_successful(self) -> bool:
        """Whether what is in force is what the file says."""
        return self.result in ("applied", "unchanged")


class Reloader:
    """Reloads one at a time. What asks while another one waits for its turn shares that one's outcome.

    `load` reads and checks the file, in a thread; raises ConfigError. `in_force` gives the running configuration and its
    layout (see `gateway.config.changes.refusals`). `apply` puts another one into force, or raises OSError and changes
    nothing. `around` is called with True before and with False after each reload.
    """

    def __init__(
        self,
        load: Callable[[], Config],
        *,
        in_force: Callable[[], tuple[Config, Config]],
        apply: Callable[[Config], None],
        around: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self.counts: dict[str, int] = dict.fromkeys(RESULTS, 0)
        self.last: Outcome | None = None
        self.applied_at_unix_s = time.time()
        """When the configuration in force was last found to be what the file says."""
        self._load = load
        self._in_force = in_force
        self._apply = apply
        self.around = around
        self._lock = asyncio.Lock()
        self._next: asyncio.Task[Outcome] | None = None
        self._running: asyncio.Task[Outcome] | None = None

    async def reload(self, cause: str) -> Outcome:
        """Reload now, or after the one that is under way. Never raises for what the file says."""
        if self._next is None:
            self._next = asyncio.create_task(self._take_turn(cause), name="reload")
        return await asyncio.shield(self._next)

    async def _take_turn(self, cause: str) -> Outcome:
        async with self._lock:
            self._running, self._next = self._next, None
            self.around(True)
            try:
                outcome = await self._reload(cause)
            except Exception as error:  # noqa: BLE001 - a defect must not end the reloads of this process
                _log.exception("config_reload_defect", cause=cause)
                outcome = _outcome("failed", cause, problems=[f"a defect of the gateway, see its log: {error!r}"])
            finally:
                self.around(False)
        self.last = outcome
        self.counts[outcome.result] += 1
        if outcome.is_successful:
            self.applied_at_unix_s = outcome.at_unix_s
        self._say(outcome)
        return outcome

    async def _reload(self, cause: str) -> Outcome:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                wanted = await in_side_thread(self._load)
        except ConfigError as error:
            return _outcome("invalid", cause, problems=[str(error)])
        except TimeoutError:
            return _outcome("failed", cause, problems=[f"the file could not be read within {READ_TIMEOUT_S:g} s"])
        running, layout = self._in_force()
        changed = changed_keys(running, wanted)
        if not changed:
            return _outcome("unchanged", cause)
        problems = refusals(wanted, running, layout)
        if problems:
            return _outcome("refused", cause, problems=problems)
        try:
            self._apply(wanted)
        except OSError as error:
            return _outcome("failed", cause, problems=[str(error)])
        known = set(cautions(running))
        remarks = [remark for remark in cautions(wanted) if remark not in known]
        return _outcome("applied", cause, changed=changed, remarks=remarks)

    def _say(self, outcome: Outcome) -> None:
        if not outcome.is_successful:
            _log.error(
                "config_kept", result=outcome.result, cause=outcome.cause, error="; ".join(outcome.problems)
            )  # the last good one stays in force
            return
        running, _ = self._in_force()
        facts = {"result": outcome.result, "cause": outcome.cause, "changed": list(outcome.changed)}
        _log.info("config_reloaded", sha256=fingerprint(running), **facts)
        for remark in outcome.remarks:
            _log.warning("config_remark", remark=remark)


class FileWatch:
    """Notices that a file is another one: written anew, replaced, or behind a link that leads elsewhere now.

    A file is taken for complete once two looks in a row find it the same; `on_change` is called then. A file that is
    gone is nothing to reload. `known` is the `file_identity` of what was read last, `interval_s` says how long to wait between
    two looks; None: not to look.
    """

    def __init__(
        self,
        path: Path,
        known: object,
        interval_s: Callable[[], float | None],
        on_change: Callable[[], Awaitable[object]],
    ) -> None:
        self._path = path
        self._interval_s = interval_s
        self._on_change = on_change
        self._known = self._seen = known

    async def run(self) -> None:
        """Watch until cancelled. In a thread: a file system that hangs must not stop the data path."""
        while True:
            interval_s = self._interval_s()
            await asyncio.sleep(_UNWATCHED_S if interval_s is None else interval_s)
            if interval_s is not None and self._look(await in_side_thread(partial(file_identity, self._path))):
                await self._on_change()

    def _look(self, identity: object) -> bool:
        """Whether the file has changed since it was last complete, and is complete now."""
        is_settled, self._seen = identity == self._seen, identity
        if not is_settled or identity is None or identity == self._known:
            return False
        self._known = identity
        return True


def fingerprint(config: Config) -> str:
    """Equal on gateways that run the same configuration; `GetEffectiveConfig` shows the same."""
    return hashlib.sha256(msgspec.json.encode(effective_config(config), order="sorted")).hexdigest()


def file_identity(path: Path) -> object:
    """What changes with the file's contents or with the file behind a link; None if there is none."""
    try:
        info = path.stat()
    except OSError:
        return None
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def _outcome(
    result: Result,
    cause: str,
    *,
    changed: Sequence[str] = (),
    problems: Sequence[str] = (),
    remarks: Sequence[str] = (),
) -> Outcome:
    return Outcome(
        result=result,
        cause=cause,
        at_unix_s=time.time(),
        changed=tuple(changed),
        problems=tuple(problems),
        remarks=tuple(remarks),
    )
