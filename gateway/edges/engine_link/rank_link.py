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

The core may give up a rank that is JOINED but silent (`renew`): the incarnation number moves on, nothing else. The
connections of a process that hangs stay up, so until it says something a HELLO doesn't wait, it ends that incarnation.
"""

from collections.abc import Callable
from enum import Enum

import zmq

from gateway.config.schema import Group
from gateway.core.events import RankJoined, RankLost, RankRenewed, SendBlocked, SendFailed
from gateway.edges.engine_link.channel import Channel
from gateway.edges.engine_link.connections import source_fd
from gateway.edges.engine_link.coordinator import MeetingPoint, ReportIntake
from gateway.edges.engine_link.env import LinkEnv
from gateway.edges.engine_link.errors import LinkError
from gateway.edges.engine_link.intake import Intake
from gateway.edges.engine_link.join_wait import JoinWait
from gateway.edges.engine_link.loss import PendingLoss
from gateway.edges.engine_link.misfit import log_misfit
from gateway.edges.engine_link.opener import ChannelOpener
from gateway.edges.engine_link.records import RankMemory
from gateway.edges.engine_link.sender import Sender
from gateway.types import EngineRequest, RankInfo
from gateway.wire.handshake import WireError, decode_ready_response, encode_init, identity_of
from gateway.wire.protocol import EngineProtocol

DISCONNECTED = "disconnected"
SENTINEL = "sentinel"
UNREACHABLE = "unreachable"
REPLACED = "replaced"


class LinkState(Enum):
    """See the module's diagram."""

    EMPTY = "empty"
    JOINING = "joining"
    JOINED = "joined"
    DETACHED = "detached"


_JOINED = LinkState.JOINED  # an attribute of an enum class costs as much as a call


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
        meeting: MeetingPoint | None = None,
    ) -> None:
        self.rank = rank
        self.state = LinkState.EMPTY
        self._env = env
        self._index = index
        self._is_coupled = group.coupled
        self._engine_index = group.start_index + index
        self._identity = identity_of(self._engine_index)
        self._protocol = protocol
        self._intake = Intake(env, protocol, rank, self._engine_index, joined=self._joined)
        codec = protocol.coordinator if group.coordinator.enabled else None
        self._reports = ReportIntake(env, codec, rank, self._engine_index) if codec is not None else None
        self._send_init = send_init
        self._meeting = meeting
        self._parallel_config: dict[str, object] = {}
        self._opener = ChannelOpener(env, self._identity, group_number, index, codec)
        self._memory = RankMemory(env, group, index)
        self._log = env.log.bind(rank=rank, group=group.name, engine_index=self._engine_index)
        self._wait = JoinWait(env.loop.time, self._log)
        self._channel: Channel | None = None
        self._sender: Sender | None = None
        self._info: RankInfo | None = None
        self._loss: PendingLoss | None = None
        self._is_hello_held = False
        self._hello_fd: int | None = None
        # Connections that the batch socket has had in this incarnation.
        self._outputs = 0

    @property
    def incarnation(self) -> int:
        """The last number given out; 0 before the first join."""
        return self._memory.incarnation

    def restore(self) -> None:
        """Bind the recorded sockets of an earlier process again; without a usable record do nothing."""
        memory = self._memory
        if not memory.load() or memory.addresses is None:
            return
        # A rank that was loading its model when the gateway died goes on with its handshake.
        is_complete = memory.is_ready and memory.registration is not None
        try:
            if memory.registration is not None:
                self._info = decode_ready_response(memory.registration)
            self._channel = self._opener.recorded(self, memory.addresses, is_started=is_complete)
            self._channel.output.reader.on_handled = self._intake.flush
        except (WireError, LinkError, zmq.ZMQError, ValueError) as error:
            self._env.counters.state_faults.add("not_restored")
            self._log.warning("rank_not_restored", problem=str(error))
            self._info = None
            memory.forget()
            return
        self.state = LinkState.DETACHED if is_complete else LinkState.JOINING
        self._wait.begin()
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

    def retire(self, linger_ms: int) -> None:
        """The rank is configured no more: close the sockets and forget them."""
        self.close(linger_ms)
        self._is_hello_held = False
        self._memory.forget()

    def poke(self, *, with_monitors: bool) -> None:
        """Safety tick: look for lost edges, and answer a HELLO for which there were no sockets."""
        if self._channel is not None:
            self._channel.poke(with_monitors=with_monitors)
        if self.state is LinkState.JOINING and self._channel is not None:
            self._wait.look(
                self._channel.addresses, is_ready=self._memory.is_ready, is_registered=self._info is not None
            )
        if self._sender is not None and self._loss is None:
            self._sender.poke()
        if self._is_hello_held and with_monitors and self._is_replaceable:
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

    def start_wave(self, wave: int) -> None:
        """Make the rank of a lockstep group step, if it is there."""
        if self._channel is not None and self._channel.coordinator is not None:
            self._channel.coordinator.start_wave(wave)

    def renew(self, incarnation: int) -> None:
        """The core gave this incarnation up for its silence. The sockets stay: what comes from them is the next one's.

        A rank that the link misses itself begins its next incarnation when it joins.
        """
        if self._sender is None or self._loss is not None or incarnation != self.incarnation:
            return
        self._memory.incarnation += 1
        self._memory.save()
        self._env.counters.handshakes.add("renewed")
        self._env.events.defer(RankRenewed(self.rank, self.incarnation))
        self._sender.renew(self.incarnation)
        self._intake.is_silent = True
        if self._is_hello_held:
            self._answer_hello()

    @property
    def _is_replaceable(self) -> bool:
        """Whether a HELLO may be answered: nobody has joined, or who has was given up and says nothing."""
        return self.state is not LinkState.JOINED or (self._intake.is_silent and self._loss is None)

    def on_hello(self, connection_fd: int | None) -> None:
        """An engine process asks for its addresses over this connection (None: unknown)."""
        is_same = connection_fd is not None and connection_fd == self._hello_fd
        self._hello_fd = connection_fd
        if not self._is_replaceable:
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

    def on_subscribed(self) -> None:
        """The engine process waits for its coordinator's answer, unless it is through with its start-up."""
        coordinator = self._channel.coordinator if self._channel is not None else None
        if coordinator is None:
            return
        if self.state is LinkState.JOINING or not coordinator.is_released:
            coordinator.release()
        else:
            coordinator.repeat()

    def on_report(self, frames: list[zmq.Frame]) -> None:
        """A message to the coordinator."""
        if self._reports is not None:
            is_joined = self.state is LinkState.JOINED
            if self._reports.take(frames, self.incarnation if is_joined else None):
                self._intake.is_silent = False

    def _answer_hello(self) -> None:
        """Open fresh sockets and announce them; the old ones are closed once the engine can't need them."""
        self._is_hello_held = False
        try:
            if self._meeting is not None:
                self._parallel_config = self._meeting.give(self._index)
            channel = self._opener.fresh(self)
            channel.output.reader.on_handled = self._intake.flush
        except (OSError, zmq.ZMQError) as error:
            self._env.counters.handshakes.add("no_sockets")
            self._env.limited_log.warning("no_sockets_for_rank", rank=self.rank, problem=str(error))
            self._is_hello_held = True
            return
        if not self._send_addresses(channel):
            self._env.counters.handshakes.add("init_undeliverable")
            channel.close()
            return
        if self.state is LinkState.JOINED:
            self._give_way()
        if self._channel is not None:
            self._channel.close()
        self._channel, self._info = channel, None
        self.state = LinkState.JOINING
        self._memory.begin(channel.addresses)
        self._wait.begin()
        self._log.info("rank_joining", input=channel.input.address, output=channel.output.address)

    def _give_way(self) -> None:
        """The silent incarnation ends for a new process. Its unread rows are of attempts that went on elsewhere."""
        self._sender = None
        self._env.counters.lost.add(REPLACED)
        self._env.events.defer(RankLost(self.rank, self.incarnation, REPLACED))

    def _send_addresses(self, channel: Channel) -> bool:
        addresses = channel.addresses
        init = encode_init(
            [addresses.input],
            [addresses.output],
            coordinator_input=addresses.coordinator_input,
            coordinator_output=addresses.coordinator_output,
            parallel_config=self._parallel_config,
        )
        return self._send_init(self._identity, init)

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
        # What an earlier connection still brings is of earlier attempts: it may stay open.
        output = self._channel.output.connections
        self._outputs = 1 if output.is_up else 0
        output.begin()
        self._intake.is_silent = False
        self._channel.learn_peers()
        self._sender = Sender(
            self._env,
            self._protocol,
            self._channel,
            self.rank,
            memory.incarnation,
            on_unreachable=lambda: self._begin_loss(UNREACHABLE, expects_rows=False),
        )
        log_misfit(
            self._log,
            info,
            protocol=self._protocol,
            is_coupled=self._is_coupled,
            max_context_tokens=self._env.max_context_tokens,
        )
        self._env.counters.handshakes.add("reattached" if reattached else "joined")
        self._env.events.emit(
            RankJoined(rank=self.rank, incarnation=memory.incarnation, info=info, reattached=reattached)
        )

    def on_output_read(self) -> None:
        """Messages were read from the batch socket: a connection that they came over is known by now."""
        if self.state is _JOINED and self._channel is not None:
            self._channel.output.look()

    def on_output(self, frames: list[zmq.Frame]) -> None:
        """A message on the batch socket."""
        joined = None
        if self.state is _JOINED and self._channel is not None:
            joined = self._memory.incarnation if self._outputs <= 1 else None
            connections = self._channel.output.connections
            if connections.surplus > 0:
                # A rank talks over its newest connection; what an earlier one still brings comes before that.
                connections.source_fd = source_fd(frames[0])
        if self._intake.take(frames, joined):
            try:
                self._intake.flush()  # what came before the end
            finally:
                if self.state is not LinkState.JOINED:
                    self._discard()
                else:
                    self._begin_loss(SENTINEL, expects_rows=False)

    def _joined(self) -> int | None:
        """Whose rows the batch socket brings: the incarnation, None while nobody has joined or two connections mix."""
        return self._memory.incarnation if self.state is _JOINED and self._outputs <= 1 else None

    def on_up(self, *, is_output: bool) -> None:
        """A connection was established. A second one for batches means that the first is gone, seen or not.

        Batches were lost between the two, and the socket mixes what is left of both: nothing more is passed on.
        """
        if is_output and self.state is LinkState.JOINED:
            self._outputs += 1
            if self._outputs > 1:
                self._begin_loss(DISCONNECTED, expects_rows=False)
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
