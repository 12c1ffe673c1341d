"""A front end of raw frames for one real rank: what the gateway's answers are compared with. Shares no code with it."""

import secrets
from typing import Any

import msgspec
import zmq

from tests.support.vllm_site import START_S, RankServer

Row = tuple[list[int], int | None]


class DirectRank:
    """One rank of a group of its own, and the three sockets that it dials."""

    def __init__(self, server: RankServer, **settings: Any) -> None:
        self._context = zmq.Context()
        self._sockets = [self._context.socket(kind) for kind in (zmq.ROUTER, zmq.ROUTER, zmq.PULL)]
        handshake, self._inputs, self._outputs = self._sockets
        addresses = [f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}" for socket in self._sockets]
        for socket in self._sockets:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, round(START_S * 1e3))
        self.process = server.start(addresses[0], 0, 1, **settings)
        self._identity, hello = handshake.recv_multipart()
        assert msgspec.msgpack.decode(hello)["status"] == "HELLO"
        names = ("coordinator_input", "coordinator_output", "frontend_stats_publish_address")
        init = {"inputs": addresses[1:2], "outputs": addresses[2:], **dict.fromkeys(names)}
        handshake.send_multipart([self._identity, msgspec.msgpack.encode({"addresses": init, "parallel_config": {}})])
        self.ready = msgspec.msgpack.decode(self._inputs.recv_multipart()[-1])
        assert msgspec.msgpack.decode(handshake.recv_multipart()[1])["status"] == "READY"

    def generate(self, prompt: list[int], max_tokens: int, **sampling: Any) -> list[int]:
        """The tokens of one request."""
        return [token for tokens, _ in self.rows(prompt, max_tokens, **sampling) for token in tokens]

    def rows(self, prompt: list[int], max_tokens: int, **sampling: Any) -> list[Row]:
        """The rows of one request: new tokens and the finish reason's number."""
        name = secrets.token_hex(8)
        params = {"temperature": 0.0, "max_tokens": max_tokens, "detokenize": False, **sampling}
        add = [name, prompt, None, params, None, 0.0, None, None, None]
        self._inputs.send_multipart([self._identity, b"\x00", msgspec.msgpack.encode(add)])
        rows: list[Row] = []
        while not rows or rows[-1][1] is None:
            for row in msgspec.msgpack.decode(self._outputs.recv_multipart()[0])[1]:
                assert row[0] == name
                rows.append((row[1], row[5]))
        return rows

    def close(self) -> None:
        self.process.kill()
        for socket in self._sockets:
            socket.close()
        self._context.term()
