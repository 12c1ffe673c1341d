"""The process's heaps, as the C library reports them."""

import subprocess
import sys

import pytest

_CODE = """
import ctypes, sys, threading
from gateway import process
if sys.argv[1] == "shared":
    process.share_one_heap()
barrier = threading.Barrier(4)
def work():
    barrier.wait()
    kept = [bytes(10_000) for _ in range(100)]
    barrier.wait()
threads = [threading.Thread(target=work) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc = ctypes.CDLL(None)
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


def _heaps(kind):
    run = subprocess.run([sys.executable, "-c", _CODE, kind], capture_output=True, text=True, check=True, timeout=60)
    return run.stdout.count("<heap nr=")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_all_threads_share_one_heap():
    assert _heaps("shared") == 1
    assert _heaps("separate") > 1
