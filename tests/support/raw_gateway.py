"""A gateway made of raw sockets: answers handshakes and moves frames, knows nothing of the real one."""

import asyncio
from collections import defaultdict

import msgspec
import zmq
import zmq.asyncio

from tests.support.stub_engine import abort_message, add_message, read_batch

SENTINEL = b"ENGINE_CORE_DEAD"


class RankSockets:
    """One incarnation of one rank at the gateway: its private ROUTER and PULL, and what came over them."""

    def __init__(self, gateway, identity):
        self.identity = identity
        self.registration = None
        self._context = gateway.context
        self._open("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")

    def _open(self, input_address, output_address):
        self.inputs = self._context.socket(zmq.ROUTER)
        self.inputs.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.inputs.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.outputs = self._context.socket(zmq.PULL)
        self.outputs.setsockopt(zmq.RCVHWM, 0)
        try:
            for socket, address in ((self.inputs, input_address), (self.outputs, output_address)):
                socket.setsockopt(zmq.LINGER, 0)
                socket.bind(address)
        except zmq.ZMQError:
            self.inputs.close()
            self.outputs.close()
            raise
        self.monitor = self.inputs.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    async def reopen(self):
        """What a restarted gateway does: new sockets on the same addresses."""
        addresses = self.addresses
        self.close()
        while True:
            try:
                self._open(*addresses)
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    raise
                await asyncio.sleep(0.01)  # libzmq closes in the background
            else:
                return

    @property
    def addresses(self):
        return [socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0") for socket in (self.inputs, self.outputs)]

    async def disconnected(self):
        """Wait until the rank's input socket is gone."""
        await self.monitor.recv_multipart()

    def close(self):
        self.inputs.disable_monitor()
        self.monitor.close(linger=0)
        self.inputs.close()
        self.outputs.close()


class RawGateway:
    """Binds a handshake address; every HELLO gets sockets of its own. `events` is the order of what came."""

    def __init__(self, protocol, *, answers=True):
        self.protocol = protocol
        self.answers = answers
        self.context = zmq.asyncio.Context()
        self.handshake = self.context.socket(zmq.ROUTER)
        self.handshake.setsockopt(zmq.LINGER, 0)
        self.handshake.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.address = None
        self.events = []
        self.hellos = []
        self.ranks = {}
        self.old = []
        self.changed = asyncio.Event()
        self._tasks = []

    async def __aenter__(self):
        self.handshake.bind("tcp://127.0.0.1:*")
        self.address = self.handshake.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._tasks.append(asyncio.create_task(self._answer()))
        return self

    async def __aexit__(self, *_):
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.handshake.close()
        for rank in (*self.ranks.values(), *self.old):
            rank.close()
        self.context.term()

    async def until(self, predicate, timeout_s=10):
        """Wait until `predicate()` holds; looked at after every handshake event."""
        async with asyncio.timeout(timeout_s):
            while not predicate():
                self.changed.clear()
                await self.changed.wait()

    async def registered(self, count):
        await self.until(lambda: sum(kind == "registered" for kind, _ in self.events) >= count)

    def note(self, kind, index):
        self.events.append((kind, index))
        self.changed.set()

    async def _answer(self):
        while True:
            identity, body = await self.handshake.recv_multipart()
            status = msgspec.msgpack.decode(body)
            index = int.from_bytes(identity, "little")
            assert len(identity) == 2
            self.note(status["status"], index)
            if status["status"] != "HELLO" or not self.answers:
                continue
            self.hellos.append(status)
            if index in self.ranks:
                self.old.append(self.ranks[index])
            rank = self.ranks[index] = RankSockets(self, identity)
            self._tasks.append(asyncio.create_task(self._register(rank, index)))
            inputs, outputs = rank.addresses
            addresses = {
                "inputs": [inputs],
                "outputs": [outputs],
                "coordinator_input": None,
                "coordinator_output": None,
            }
            init = {"addresses": addresses, "parallel_config": {}, "a key of a later version": 1}
            await self.handshake.send_multipart([identity, msgspec.msgpack.encode(init)])

    async def _register(self, rank, index):
        identity, body = await rank.inputs.recv_multipart()
        assert identity == rank.identity
        rank.registration = msgspec.msgpack.decode(body)
        self.note("registered", index)

    # Traffic.

    async def add(self, index, request_id, prompt, max_tokens, **sampling):
        rank = self.ranks[index]
        frames = add_message(self.protocol, request_id, prompt, max_tokens, **sampling)
        await rank.inputs.send_multipart([rank.identity, *frames])

    async def abort(self, index, *ids):
        rank = self.ranks[index]
        await rank.inputs.send_multipart([rank.identity, *abort_message(*ids)])

    async def send(self, index, *frames):
        rank = self.ranks[index]
        await rank.inputs.send_multipart([rank.identity, *frames])

    async def receive(self, index, timeout_s=10):
        """Frames of the next output message of a rank."""
        async with asyncio.timeout(timeout_s):
            return await self.ranks[index].outputs.recv_multipart()

    async def collect(self, index, *ids):
        """Read batches until every id has ended; the batches."""
        batches, open_ids = [], set(ids)
        while open_ids:
            frames = await self.receive(index)
            assert frames != [SENTINEL], "the rank announced its death"
            batches.append(read_batch(frames))
            open_ids -= {row.id for row in batches[-1].rows if row.finish}
        return batches

    def order(self):
        """Event kinds per rank, in order."""
        kinds = defaultdict(list)
        for kind, index in self.events:
            kinds[index].append(kind)
        return dict(kinds)
