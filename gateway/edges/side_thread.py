"""A thread for what may hang, without the end of the process waiting for it."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

ResultT = TypeVar("ResultT")


async def in_side_thread(work: Callable[[], ResultT]) -> ResultT:
    """Return or raise what `work` does, in a thread of its own.

    `asyncio.to_thread` takes the loop's pool, and that of an interpreter that exits, and both wait for every thread: a
    file system that hangs would keep the process from ending. What comes too late is for nobody.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[ResultT] = loop.create_future()

    def settle(result: ResultT | None, error: BaseException | None) -> None:
        if done.done():
            return  # nobody waits any more
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # None only where it is the result

    def run() -> None:
        result: ResultT | None = None
        problem: BaseException | None = None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - the waiting side raises it
            problem = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, problem)

    threading.Thread(target=run, name="side", daemon=True).start()
    return await done
