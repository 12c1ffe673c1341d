"""How libzmq's I/O thread shares a core with the event loop.

Each send wakes that thread. Where both have one core, the kernel would let it run at once, in the middle of a loop turn,
for every message (20 µs of switching each). As a batch thread it takes its turn when the loop waits, or its time slice is
over, and takes all messages together. With a free core it starts at once either way.
"""

import os
import threading


def may_batch_io_thread() -> bool:
    """Whether a thread of this process may make itself a batch thread, which libzmq takes for granted: it would abort.

    A process that was given another policy than the usual one keeps it for all its threads.
    """
    allowed: list[bool] = []

    def attempt() -> None:
        try:
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
                allowed.append(True)
        except OSError:
            pass

    if not hasattr(os, "SCHED_BATCH"):  # not on Linux
        return False
    # The policy belongs to the calling thread, and can be told only by trying.
    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return bool(allowed)
