"""N ranks in one process, for tests (`async with StubGroup(...)`) and for `engine-stub serve`."""

import asyncio
import secrets
from types import TracebackType
from typing import Self

import zmq

from engine_stub.backend import Backend, BackendInfo, registry
from engine_stub.config import Protocol, StubConfig
from engine_stub.dial import Dialler
from engine_stub.kv_events import SOCKETS as SOCKETS_FOR_EVENTS
from engine_stub.lockstep import Barrier
from engine_stub.rank import RankSettings, StubRank
from engine_stub.recipe import recipe_fingerprint
from engine_stub.watch import SOCKETS as SOCKETS_OF_WATCH
from engine_stub.wire.codec import Codec, RankCard
from engine_stub.wire.tokenspeed import TokenSpeedCodec
from engine_stub.wire.vllm import VllmCodec

SOCKETS_PER_RANK = 5 + SOCKETS_FOR_EVENTS + SOCKETS_OF_WATCH
SPARE_SOCKETS = 64
MAX_INDEX = 0xFFFF
"""Identities are two bytes."""


def make_codec(protocol: Protocol, config: StubConfig) -> Codec:
    """The engine side of a family's wire."""
    return TokenSpeedCodec(config) if protocol == "tokenspeed" else VllmCodec(config)


class StubGroup:
    """Ranks with one configuration that dial one handshake address.

    Engine index of `ranks[i]` is `start_index + i`. With `auto_step=False` nothing is generated until
    `rank.step()`, and `rank.send_rows` / `rank.send_raw` play the engine by hand. Raises `BackendError`.
    """

    def __init__(
        self,
        protocol: Protocol,
        handshake: str,
        *,
        ranks: int = 4,
        config: StubConfig | None = None,
        start_index: int = 0,
        backend: str = "synthetic",
        auto_step: bool = True,
        record_limit: int = 1024,
    ) -> None:
        config = config or StubConfig()
        spare = [registry.create(backend, config)]  # fails before anything is opened
        info = spare[0].info
        if not 0 <= start_index <= start_index + ranks - 1 <= MAX_INDEX:
            raise ValueError(f"engine indexes {start_index}..{start_index + ranks - 1} don't fit two bytes")
        if config.lockstep and protocol != "vllm":
            raise ValueError("lockstep is for ranks that speak vllm: others have no waves")
        self.protocol = protocol
        self.misfit = asyncio.Event()
        """Set when a rank was sent a request of the other family; the log says what."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS_PER_RANK * ranks + SPARE_SOCKETS)
        codec = make_codec(protocol, config)

        def make_backend() -> Backend:
            return spare.pop() if spare else registry.create(backend, config)

        settings = RankSettings(
            dialler=Dialler(
                context=self._context,
                address=handshake,
                codec=codec,
                output_hwm=codec.default_output_hwm if config.output_hwm is None else config.output_hwm,
                timeout_s=config.handshake_timeout_s,
                socks_proxy=config.socks_proxy,
            ),
            make_backend=make_backend,
            config=config,
            auto_step=auto_step,
            record_limit=record_limit,
            barrier=Barrier(ranks) if config.lockstep else None,
            on_misfit=self.misfit.set,
        )
        self.ranks: list[StubRank] = []
        try:
            for number in range(ranks):
                self.ranks.append(StubRank(number, _card(config, info, start_index + number, ranks), settings))
        except (zmq.ZMQError, ValueError):
            for rank in self.ranks:
                rank.close()
            self._context.term()
            raise

    async def __aenter__(self) -> Self:
        """Start dialling; `ready` waits for the registrations."""
        for rank in self.ranks:
            rank.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill every rank and let the sockets go."""
        await asyncio.gather(*(rank.kill() for rank in self.ranks))
        for rank in self.ranks:
            rank.close()
        await asyncio.to_thread(self._context.term)

    async def ready(self, timeout_s: float | None = 30.0) -> None:
        """Wait until every rank has registered; raises HandshakeError or TimeoutError."""
        await asyncio.gather(*(rank.ready(timeout_s) for rank in self.ranks))

    async def shut_down(self, linger_ms: int = 500) -> None:
        """End every rank as the real engine does on SIGTERM. The context manager's exit does the rest."""
        await asyncio.gather(*(rank.shut_down(linger_ms) for rank in self.ranks))


def _card(config: StubConfig, info: BackendInfo, index: int, group_size: int) -> RankCard:
    return RankCard(
        max_model_len=config.max_model_len,
        total_blocks=config.scheduler.total_blocks,
        block_size=config.scheduler.block_size,
        capacity_tokens=config.scheduler.capacity_tokens,
        dtype=config.model.dtype,
        group_size=group_size,
        index=index,
        max_active=config.scheduler.max_active,
        token_budget=config.scheduler.token_budget,
        instance_id=f"{config.model.name}-{index}-{secrets.token_hex(4)}",
        recipe_fingerprint=recipe_fingerprint(info),
    )
