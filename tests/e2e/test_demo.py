"""`make demo` is what a newcomer sees first: it ends by itself with exit 0, and what it prints to go on with works."""

import re
import signal
import socket
import subprocess
import sys

import pytest

from tests.support.processes import ROOT, WAIT_S, Process, environment, run, wait_until

pytestmark = pytest.mark.e2e

COMMANDS = re.compile(r"^  (\.venv/bin/.+|curl .+)$", re.MULTILINE)


def demo(*arguments):
    return (sys.executable, "-m", "tools.demo", *arguments)


def is_listening(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_it_replays_and_ends_with_a_summary():
    done = run(*demo("--seconds", "3", "--requests", "25"))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert re.search(r"4 ranks READY; .*\b25\b", done.stdout)
    assert re.search(r"^requests 25  tokens \d+  in ", done.stdout, re.MULTILINE)
    for figure in ("TTFT", "ITL", "E2E"):
        assert re.search(rf"^{figure} +([\d.]+ *){{3}}$", done.stdout, re.MULTILINE)
    assert re.search(r"^clamps \d+  errors 0$", done.stdout, re.MULTILINE)
    assert all(f"rank {rank}: " in done.stdout for rank in range(4))
    assert COMMANDS.findall(done.stdout) == [], "what they ask is gone"
    assert "127.0.0.1" not in done.stdout.rpartition("errors 0")[2]
    assert done.stdout.endswith(
        "\nall of it is stopped now; `make demo KEEP=1` keeps it up and prints commands to try\n"
    )


def test_it_stays_up_when_asked_and_its_commands_work(tmp_path):
    process = Process(tmp_path, "demo", *demo("--seconds", "0.5", "--requests", "4", "--keep", "--protocol", "vllm"))
    try:
        wait_until(lambda: "stays up until" in process.output or not process.is_running, "the end of the replay")
        wait_until(lambda: "curl " in process.output or not process.is_running, "the commands")
        commands = COMMANDS.findall(process.output)
        assert len(commands) >= 5, process.log
        for command in commands:
            done = subprocess.run(
                ["/bin/sh", "-c", command.replace("curl -s", f"{sys.executable} -c '{CURL}'")],
                cwd=ROOT,
                env=environment(),
                timeout=WAIT_S,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, (command, done.stderr)
            assert done.stdout, command
        ports = {int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", " ".join(commands))}
        assert len(ports) == 3
        assert all(map(is_listening, ports))
        process.send_to_group(signal.SIGINT)
        assert process.wait() == 0, process.log
        assert not process.members()
        assert not any(map(is_listening, ports))
        assert process.log == ""
    finally:
        process.close()


def test_a_signal_to_itself_alone_ends_its_processes_too(tmp_path):
    """Unlike Ctrl-C, which reaches them all."""
    process = Process(tmp_path, "demo", *demo())
    try:
        wait_until(lambda: "4 ranks READY" in process.output or not process.is_running, "the ranks")
        assert len(process.members()) == 3
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.log
        assert not process.members()
    finally:
        process.close()


CURL = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
"""Not every host has curl."""


def test_no_requests_at_all_is_a_usage_error():
    assert run(*demo("--requests", "0")).returncode == 2
