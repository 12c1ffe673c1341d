"""One rank: its handshake, its channel, its joins and losses.

States::

    EMPTY ───HELLO──▶ JOINING ──READY + registration──▶ JOINED ──disconnected──▶ DETACHED
      ▲                │   ▲                              │ ▲                      │ │
      ├─disconnected───┘   └────────────HELLO─────────────┼─┼──────────────────────┘ │
      └─sentinel, unreachable─────────────────────────────┘ └─both sockets connected─┘

DETACHED keeps the sockets bound: the engine may be alive behind a broken connection (libzmq then
reconnects and no HELLO will come), or this gateway was restarted and has bound the recorded
addresses again. Both end in a join with a new incarnation number, since charges start from nothing;
what the engine still sends for older attempts carries ids that aren't live any more. A HELLO ends
DETACHED, because only a new engine process sends one.

A HELLO for a rank that is JOINED waits until the old connection is gone. Rows that came before a
disconnect are delivered before the loss.
"""

from collections.abc import Callable
from enum import Enum

import zmq

from gateway.config.schema import Group
from gateway.core.events import RankJoined, RankLost, SendBlocked, SendFailed
from gateway.edges.engine_link.channel import Channel
from gateway.edges.engine_link.connections import source_fd
from gateway.edges.engine_link.env import LinkEnv
from gateway.edges.engine_link.errors import LinkError
from gateway.edges.engine_link.intake import Intake
from gateway.edges.engine_link.loss import PendingLoss
from gateway.edges.engine_link.opener import ChannelOpener
from gateway.edges.engine_link.records import RankMemory
from gateway.edges.engine_link.sender import Sender
from gateway.types import EngineRequest, RankInfo
from gateway.wire.handshake import WireError, decode_ready_response, encode_init, identity_of
from gateway.wire.protocol import EngineProtocol

DISCONNECTED = "disconnected"
SENTINEL = "sentinel"
UNREACHABLE = "unreachable"


class LinkState(Enum):
    """See the module's diagram."""

    EMPTY = "empty"
    JOINING = "joining"
    JOINED = "joined"
    DETACHED = "detached"


class RankLink:
    """The southbound side of one rank. `send_init` puts a payload on the handshake socket, False if nobody is there."""

    def __init__(
        self,
        env: LinkEnv,
        *,
        rank: int,
        group: Group,
        group_number: int,
        index: int,
        protocol: EngineProtocol,
        send_init: Callable[[bytes, bytes], bool],
    ) -> None:
        self.rank = rank
        self.state = LinkState.EMPTY
        self._env = env
        self._engine_index = group.start_index + index
        self._identity = identity_of(self._engine_index)
        self._protocol = protocol
        self._intake = Intake(env, protocol, rank, self._engine_index)
        self._send_init = send_init
        self._opener = ChannelOpener(env, self._identity, group_number, index)
        self._memory = RankMemory(env, group, index)
        self._log = env.log.bind(rank=rank, group=group.name, engine_index=self._engine_index)
        self._channel: Channel | None = None
        self._sender: Sender | None = None
        self._info: RankInfo | None = None
        self._loss: PendingLoss | None = None
        self._is_hello_held = False
        self._hello_fd: int | None = None

    @property
    def incarnation(self) -> int:
        """The last number given out; 0 before the first join."""
        return self._memory.incarnation

    def restore(self) -> None:
        """Bind the recorded sockets of an earlier process again; without a usable record do nothing."""
        memory = self._memory
        if not memory.load():
            return
        try:
            if memory.registration is not None:
                self._info = decode_ready_response(memory.registration)
            self._channel = self._opener.recorded(self, memory.input_address, memory.output_address)
        except (WireError, LinkError, zmq.ZMQError, ValueError) as error:
            self._env.counters.state_faults.add("not_restored")
            self._log.warning("rank_not_restored", problem=str(error))
            self._info = None
            memory.forget()
            return
        # A rank that was loading its model when the gateway died goes on with its handshake.
        is_complete = memory.is_ready and self._info is not None
        self.state = LinkState.DETACHED if is_complete else LinkState.JOINING
        self._log.info("rank_awaited", state=self.state.value, incarnation=memory.incarnation)

    def close(self, linger_ms: int) -> None:
        """Close the sockets; nobody is told. The record stays for the next process."""
        if self._loss is not None:
            self._loss.cancel()
            self._loss = None
        if self._channel is not None:
            self._channel.close(linger_ms)
            self._channel = None
        self._sender = None
        self.state = LinkState.EMPTY

    def poke(self, *, with_monitors: bool) -> None:
        """Safety tick: look for lost edges, and answer a HELLO for which there were no sockets."""
        if self._channel is not None:
            self._channel.poke(with_monitors=with_monitors)
        if self._is_hello_held and with_monitors and self.state is not LinkState.JOINED:
            self._answer_hello()

    def send(self, incarnation: int, request: EngineRequest) -> None:
        """Send an ADD to this incarnation, or report why not."""
        if self._sender is None or self._loss is not None or incarnation != self.incarnation:
            self._env.counters.send_failed.add("unreachable")
            self._env.events.defer(SendFailed(self.rank, incarnation, request.wire_id, "unreachable"))
            return
        self._sender.send(request)

    def abort(self, incarnation: int, wire_ids: list[str]) -> None:
        """Send an ABORT to this incarnation; without it there is nothing to abort."""
        if self._sender is None or incarnation != self.incarnation:
            self._env.counters.aborts_dropped += len(wire_ids)
            return
        self._sender.abort(wire_ids)

    def on_hello(self, connection_fd: int | None) -> None:
        """An engine process asks for its addresses over this connection (None: unknown)."""
        is_same = connection_fd is not None and connection_fd == self._hello_fd
        self._hello_fd = connection_fd
        if self.state is LinkState.JOINED:
            self._env.counters.handshakes.add("held" if not self._is_hello_held else "held_again")
            self._env.limited_log.warning("hello_held", rank=self.rank, incarnation=self.incarnation)
            self._is_hello_held = True
            return
        self._env.counters.handshakes.add("duplicate_hello" if self.state is LinkState.JOINING else "hello")
        if is_same and self.state is LinkState.JOINING and self._channel is not None and self._info is None:
            # It asked twice. Fresh addresses are for a successor: this process may hold on to its first answer.
            self._send_addresses(self._channel)
            return
        self._answer_hello()

    def on_ready(self) -> None:
        """The engine process says that its start-up is complete."""
        if self.state is not LinkState.JOINING or self._memory.is_ready:
            self._env.counters.handshakes.add("unexpected_ready")
            self._env.limited_log.warning("unexpected_ready", rank=self.rank, state=self.state.value)
            return
        self._env.counters.handshakes.add("ready")
        self._memory.is_ready = True
        self._memory.save()
        self._try_join()

    def on_input(self, frames: list[zmq.Frame]) -> None:
        """A message on the request socket: the registration, once."""
        if frames[0].bytes != self._identity:
            self._env.counters.noise.add("foreign_identity")
            self._env.limited_log.warning("foreign_identity", rank=self.rank, identity=frames[0].bytes.hex())
            return
        if self.state is not LinkState.JOINING or self._info is not None:
            self._env.counters.noise.add("unexpected_input")
            return
        payload = frames[-1].bytes
        try:
            self._info = decode_ready_response(payload)
        except WireError as error:
            self._env.counters.handshakes.add("bad_registration")
            self._env.limited_log.warning("bad_registration", rank=self.rank, problem=str(error))
            self._discard()
            return
        self._env.counters.handshakes.add("registered")
        self._memory.registration = payload
        if self._channel is not None:
            self._channel.input.connections.source_fd = source_fd(frames[0])
        self._memory.save()
        self._try_join()

    def _answer_hello(self) -> None:
        """Open fresh sockets and announce them; the old ones are closed once the engine can't need them."""
        self._is_hello_held = False
        try:
            channel = self._opener.fresh(self)
        except (LinkError, zmq.ZMQError) as error:
            self._env.counters.handshakes.add("no_sockets")
            self._env.limited_log.warning("no_sockets_for_rank", rank=self.rank, problem=str(error))
            self._is_hello_held = True
            return
        if not self._send_addresses(channel):
            self._env.counters.handshakes.add("init_undeliverable")
            channel.close()
            return
        if self._channel is not None:
            self._channel.close()
        self._channel, self._info = channel, None
        self.state = LinkState.JOINING
        self._memory.begin(channel.input.address, channel.output.address)
        self._log.info("rank_joining", input=channel.input.address, output=channel.output.address)

    def _send_addresses(self, channel: Channel) -> bool:
        return self._send_init(self._identity, encode_init([channel.input.address], [channel.output.address]))

    def _try_join(self) -> None:
        """Join when the handshake is complete and the rank can be addressed."""
        channel, info = self._channel, self._info
        if channel is None or info is None:
            return
        if self.state is LinkState.JOINING and self._memory.is_ready and channel.input.connections.is_up:
            self._join(info, reattached=False)
        elif self.state is LinkState.DETACHED and channel.is_up:
            self._join(info, reattached=True)

    def _join(self, info: RankInfo, *, reattached: bool) -> None:
        assert self._channel is not None
        memory = self._memory
        memory.incarnation += 1
        memory.save()
        self.state = LinkState.JOINED
        self._channel.learn_peers()
        self._sender = Sender(
            self._env,
            self._protocol,
            self._channel,
            self.rank,
            memory.incarnation,
            on_unreachable=lambda: self._begin_loss(UNREACHABLE, expects_rows=False),
        )
        self._env.counters.handshakes.add("reattached" if reattached else "joined")
        self._env.events.emit(
            RankJoined(rank=self.rank, incarnation=memory.incarnation, info=info, reattached=reattached)
        )

    def on_output(self, frames: list[zmq.Frame]) -> None:
        """A message on the batch socket."""
        joined = self.incarnation if self.state is LinkState.JOINED else None
        if self._intake.take(frames, joined):
            if joined is None:
                self._discard()
            else:
                self._begin_loss(SENTINEL, expects_rows=False)

    def on_up(self) -> None:
        """A connection was established."""
        self._try_join()

    def on_down(self, *, is_output: bool) -> None:
        """The rank's connection on one of the sockets was lost."""
        if self.state is LinkState.JOINED:
            self._begin_loss(DISCONNECTED, expects_rows=not is_output)
        elif self.state is LinkState.JOINING and self._info is not None:
            # Before the registration there is nothing to lose: it may have been a stray's connection.
            self._env.counters.handshakes.add("broken_off")
            self._log.warning("rank_lost_while_joining")
            self._discard()

    def on_writable(self) -> None:
        """The request socket may take more."""
        if self._sender is not None and self._loss is None:
            self._sender.flush()

    def _begin_loss(self, cause: str, *, expects_rows: bool) -> None:
        if self._loss is not None or self._channel is None:
            return
        output = self._channel.output
        self._loss = PendingLoss(
            self._env.loop,
            cause,
            drain=output.reader.drain,
            is_output_up=lambda: expects_rows and output.connections.is_up,
            finish=self._finish_loss,
        )
        # Until the loss is announced the core must not take the rank for one with room: rows that are still read free
        # slots, and each of them would draw a queued request into a send that fails.
        self._env.events.defer(SendBlocked(self.rank, self.incarnation))

    def _finish_loss(self) -> None:
        assert self._loss is not None
        cause, self._loss, self._sender = self._loss.cause, None, None
        incarnation = self.incarnation
        if cause != DISCONNECTED:
            self._discard()
        else:
            self.state = LinkState.DETACHED
        self._env.counters.lost.add(cause)
        try:
            self._env.events.emit(RankLost(self.rank, incarnation, cause))
        finally:
            if self._is_hello_held:
                self._answer_hello()
            else:
                self._try_join()  # the engine may have reconnected already

    def _discard(self) -> None:
        """Close the sockets and wait for a HELLO."""
        if self._channel is not None:
            self._channel.close()
        self._channel = self._info = None
        self.state = LinkState.EMPTY
        self._memory.forget()
