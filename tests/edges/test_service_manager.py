"""systemd's notifications, as a socket of a test receives them."""

import asyncio
import os
import socket
import time

import pytest

from gateway.edges.service_manager import ServiceManager


@pytest.fixture(params=["path", "abstract"])
def manager_socket(request, tmp_path):
    """A receiver, and its name as NOTIFY_SOCKET has it."""
    name = (
        str(tmp_path / "notify") if request.param == "path" else f"@rankgate-test-{os.getpid()}-{time.monotonic_ns()}"
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0{name[1:]}" if name.startswith("@") else name)
        receiver.setblocking(False)
        yield receiver, name


def received(receiver):
    """Everything that has come, as dicts."""
    messages = []
    while True:
        try:
            data = receiver.recv(4096)
        except BlockingIOError:
            return messages
        messages.append(dict(line.split("=", 1) for line in data.decode().split("\n")))


def test_what_is_said(manager_socket):
    receiver, name = manager_socket
    manager = ServiceManager({"NOTIFY_SOCKET": name})
    before = time.monotonic_ns() // 1000
    manager.ready("2 of 2 ranks READY")
    manager.reloading()
    manager.status("1 of 2 ranks READY")
    manager.stopping("draining")
    ready, reloading, status, stopping = received(receiver)
    assert ready == {"READY": "1", "STATUS": "2 of 2 ranks READY"}
    assert reloading["RELOADING"] == "1"
    assert before <= int(reloading["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
    assert status == {"STATUS": "1 of 2 ranks READY"}
    assert stopping == {"STOPPING": "1", "STATUS": "draining"}
    manager.close()
    manager.status("too late")
    assert received(receiver) == []


async def test_the_watchdog_hears_of_every_turn_of_the_loop(manager_socket):
    receiver, name = manager_socket
    manager = ServiceManager({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "2000", "WATCHDOG_PID": str(os.getpid())})
    assert manager.watchdog_interval_s == 0.002
    task = asyncio.create_task(manager.keep_alive())
    messages = []
    while len(messages) < 5:
        await asyncio.sleep(0.001)
        messages += received(receiver)
    assert all(message == {"WATCHDOG": "1"} for message in messages)
    time.sleep(0.005)  # noqa: ASYNC251 - a loop that hangs
    assert received(receiver) == []
    task.cancel()
    manager.close()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WATCHDOG_USEC": ""},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "-5"},
        {"WATCHDOG_USEC": "x"},
        {"WATCHDOG_USEC": "²"},
        {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"},
    ],
)
async def test_without_a_watchdog_of_ours_nothing_is_said(environment):
    manager = ServiceManager(environment)
    assert manager.watchdog_interval_s is None
    await manager.keep_alive()


@pytest.mark.parametrize("name", ["", "relative", "/nowhere/at/all", "@nobody-listens-here", "vsock:2:1234"])
def test_nobody_who_listens_costs_nothing(name):
    manager = ServiceManager({"NOTIFY_SOCKET": name})
    for _ in range(3):
        manager.ready("ready")
    manager.close()


def test_a_manager_that_does_not_read_is_not_waited_for(manager_socket):
    receiver, name = manager_socket
    manager = ServiceManager({"NOTIFY_SOCKET": name})
    for number in range(5000):
        manager.status(f"{number}")
    assert 0 < len(received(receiver)) < 5000
    manager.close()
