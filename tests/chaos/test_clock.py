"""No decision of the gateway depends on the wall clock: a plan may move it as it likes."""

import ast
import os
import subprocess
import sys
from pathlib import Path

from tests.chaos.site import HOOKS
from tests.support.processes import ROOT, WAIT_S

LABELS = {
    "gateway/edges/grpc_gateway.py",  # when a request arrived, for the engine's own records
    "gateway/edges/grpc_many.py",
    "gateway/edges/grpc_engine/common.py",  # that too, and the time of an answer
    "gateway/edges/grpc_engine/fleet.py",  # when the gateway started
    "gateway/edges/logs.py",  # when a line was written
    "gateway/edges/metrics_reload.py",  # when a configuration was loaded
    "gateway/edges/reload.py",
    "gateway/processes/reload.py",
}
"""Modules that show the time of day to somebody."""
WALL_CLOCKS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}


def reads_wall_clock(path: Path) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in WALL_CLOCKS
        for node in ast.walk(ast.parse(path.read_text()))
    )


def test_only_labels_come_from_the_wall_clock():
    found = {str(path.relative_to(ROOT)) for path in (ROOT / "gateway").rglob("*.py") if reads_wall_clock(path)}
    assert found == LABELS


def test_the_hook_moves_the_wall_clock_and_no_other(tmp_path):
    clock = tmp_path / "clock"
    clock.write_text("-86400")
    code = (
        "import os, signal, time\n"
        "wall, steady = time.time(), time.monotonic()\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "print(round((time.time() - wall) / 100), round((time.monotonic() - steady) / 100))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(HOOKS), "CHAOS_CLOCK": str(clock)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert done.stdout.split() == ["-864", "0"]
