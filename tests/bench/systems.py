"""Starts what the benchmarks compare, pinned to one core, and reads its CPU time from the kernel."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PEER_PYTHON = ROOT / ".venv-peers/bin/python"
SERVER_CORE, LOAD_CORE = "0", "1"
VOCAB_SIZE = 32000

SERVICER = """
import os, sys, tempfile, time
from smg.servicer import VllmGrpcServer
port, handshake, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3])
directory = tempfile.mkdtemp(prefix="smg-bench-")
os.chmod(directory, 0o700)
server = VllmGrpcServer(f"127.0.0.1:{port}", f"ipc://{directory}/e", f"tcp://127.0.0.1:{handshake}", "bench",
    engine_count=ranks, max_context_length=131072, vocab_size=32000, data_parallel_size=ranks, eos_token_ids=[2])
while not server.engine_ready:
    time.sleep(0.05)
server.set_serving(True)
while True:
    time.sleep(1)
"""


def free_port():
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return each.getsockname()[1]


def pinned(core, command, log):
    return subprocess.Popen(
        ["taskset", "-c", core, *map(str, command)],
        stdout=log,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        cwd=ROOT,
    )


def cpu_s(pid):
    """User + system CPU of all threads of a process, in seconds, to the nanosecond."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def rss_mb(pid):
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextlib.contextmanager
def running(kind, *, ranks, step_ms):
    """A server of `kind` (`grpcio` or `fast`: ours on this transport; `smg`) with ranks behind it. Yields (pid, address)."""
    grpc_port, handshake = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="rankgate-bench-") as name:
        directory = Path(name)
        log = (directory / "log").open("wb")
        stub_config = directory / "stub.yaml"
        stub_config.write_text(json.dumps(stub_settings(step_ms)))
        if kind != "smg":
            config = directory / "gateway.json"
            config.write_text(json.dumps(gateway_settings(grpc_port, handshake, ranks, kind)))
            server = [BIN / "rankgate", "serve", "-c", config]
        else:
            server = [PEER_PYTHON, "-c", SERVICER, grpc_port, handshake, ranks]
        processes = [pinned(SERVER_CORE, server, log)]
        stub = [BIN / "engine-stub", "serve", "--protocol", "vllm", "--handshake", f"tcp://127.0.0.1:{handshake}"]
        processes.append(pinned(LOAD_CORE, [*stub, "--ranks", ranks, "--config", stub_config], log))
        try:
            wait_healthy(grpc_port, processes[0], directory)
            yield processes[0].pid, f"127.0.0.1:{grpc_port}"
        finally:
            for process in reversed(processes):
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            log.close()


def wait_healthy(port, process, directory):
    """Until the engine service says that it is healthy, which for both kinds means that its ranks have joined."""
    deadline = time.monotonic() + 30
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = channel.unary_unary(
            "/vllm.grpc.engine.VllmEngine/HealthCheck",
            response_deserializer=vllm_engine_pb2.HealthCheckResponse.FromString,
        )
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(grpc.RpcError):
                if check(b"", timeout=1.0).healthy:
                    return
            time.sleep(0.1)
    raise RuntimeError((directory / "log").read_text(errors="replace")[-2000:])


def stub_settings(step_ms):
    fixed = {
        "per_prefill_token_us": 0.0,
        "per_decode_row_us": 0.0,
        "per_context_token_ns": 0.0,
        "per_prefill_context_ns": 0.0,
    }
    return {
        "model": {"vocab_size": VOCAB_SIZE},
        "scheduler": {"max_active": 1024, "kv_tokens": 4_000_000, "token_budget": 65536},
        "step_time": {"fixed_ms": step_ms, **fixed},
        "time_scale": 1.0 if step_ms else 0.0,
    }


def gateway_settings(grpc_port, handshake, ranks, transport):
    return {
        "version": 1,
        "listen": {
            "grpc": f"127.0.0.1:{grpc_port}",
            "admin": f"127.0.0.1:{free_port()}",
            "metrics": f"127.0.0.1:{free_port()}",
            "transport": transport,
        },
        "model": {"name": "bench", "max_context_tokens": 131072, "vocab_size": VOCAB_SIZE, "eos_token_ids": [2]},
        "groups": [{"name": "bench", "protocol": "vllm", "handshake": f"tcp://127.0.0.1:{handshake}", "ranks": ranks}],
    }
