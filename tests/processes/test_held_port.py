"""The port that processes share."""

import socket

import pytest

from gateway.h2.server import listener
from gateway.processes.held_port import HeldPort


@pytest.fixture(autouse=True)
def shared_ports(monkeypatch):
    monkeypatch.setattr(listener, "_shared_ports", set())


def test_processes_listen_beside_the_one_that_holds_it_and_nobody_else_does():
    held = HeldPort("127.0.0.1:0")
    opened = []
    try:
        with pytest.raises(OSError):
            listener.bind("127.0.0.1", held.port)
        with socket.socket() as client:
            client.settimeout(5)
            assert client.connect_ex(("127.0.0.1", held.port)) != 0, "held is not served"
        listener.share_port(held.port)
        opened = listener.bind("127.0.0.1", held.port) + listener.bind("127.0.0.1", held.port)
        served = [0, 0]
        for _ in range(64):
            with socket.create_connection(("127.0.0.1", held.port), 5):
                pass
            for number, each in enumerate(opened):
                try:
                    each.accept()[0].close()
                except BlockingIOError:
                    continue
                served[number] += 1
        assert sum(served) == 64, "none is lost to the one that only holds it"
        assert min(served) > 5
        assert held.address == f"127.0.0.1:{held.port}"
    finally:
        held.close()
        for each in opened:
            each.close()


def test_a_port_that_others_share_is_not_joined():
    held = HeldPort("127.0.0.1:0")
    listener.share_port(held.port)
    others = listener.bind("127.0.0.1", held.port)
    held.close()
    listener._shared_ports.clear()
    try:
        with pytest.raises(OSError):
            HeldPort(f"127.0.0.1:{held.port}")
    finally:
        for each in others:
            each.close()
