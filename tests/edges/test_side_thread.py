"""Work in a thread of its own: its outcome, and that nobody waits for it at the end."""

import asyncio
import subprocess
import sys
import threading

import pytest

from gateway.edges.side_thread import in_side_thread


async def test_what_the_work_returns_and_raises():
    assert await in_side_thread(lambda: threading.current_thread().daemon) is True
    assert await in_side_thread(lambda: None) is None
    with pytest.raises(OSError, match="gone"):
        await in_side_thread(lambda: (_ for _ in ()).throw(OSError("gone")))


async def test_what_comes_too_late_is_for_nobody():
    go_on, ended = threading.Event(), threading.Event()

    def work():
        go_on.wait()
        ended.set()
        raise OSError("late")

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await in_side_thread(work)
    go_on.set()
    await asyncio.to_thread(ended.wait)
    await asyncio.sleep(0.01)  # nothing complains of an exception that was never retrieved


@pytest.mark.parametrize("runner", ["asyncio", "uvloop"])
@pytest.mark.parametrize("what", ["reload", "watch"])
def test_a_process_ends_though_its_file_hangs(runner, what):
    program = (
        "import asyncio, sys, threading\n"
        f"import {runner}\n"
        "from pathlib import Path\n"
        "from gateway.edges import reload\n"
        "hangs = threading.Event()\n"
        "def hang(*_):\n"
        "    hangs.set()\n"
        "    threading.Event().wait()\n"
        "reload.file_identity = hang\n"
        "async def main():\n"
        "    reloader = reload.Reloader(hang, in_force=None, apply=None)\n"
        "    watch = reload.FileWatch(Path('x'), None, lambda: 0.001, None)\n"
        f"    work = {{'reload': reloader.reload('file'), 'watch': watch.run()}}[{what!r}]\n"
        "    task = asyncio.create_task(work)\n"
        "    while not hangs.is_set():\n"
        "        await asyncio.sleep(0.001)\n"
        "    task.cancel()\n"
        "    print('ends', flush=True)\n"
        f"{runner}.run(main())\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False, timeout=30
    )
    assert run.stdout == "ends\n"
    assert run.returncode == 0
