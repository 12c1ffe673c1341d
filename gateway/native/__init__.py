"""The way of ordinary rows through the gateway, compiled. Optional: without it the same is done in Python.

Three walks over the rows of a batch are written in C as well: from a vLLM message to columns (`decode_vllm`), from columns
to outboxes (`Intake`), from outboxes to frames (`Outlet`). Each does what Python does with a row that is nothing special,
to the same objects, and hands every other row to Python. The Python is the reference: tests hold one against the other.

Why: between two steps of the ranks the core sleeps, and whatever a row touches has left the caches by then. C can
ask for the next rows' memory while it works on this one. See docs/adr/0006-compiled-rows.md.

`compiled` is None where the module wasn't built (no compiler or no Python headers), or with RANKGATE_NATIVE=0.
"""

import os
from types import ModuleType

compiled: ModuleType | None = None
if os.environ.get("RANKGATE_NATIVE") != "0":
    try:
        from gateway.native import _native
    except ImportError:
        pass
    else:
        compiled = _native
