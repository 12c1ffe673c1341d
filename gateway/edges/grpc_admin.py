"""`gateway.v1.AdminService`: the configuration in force, why requests went where they went, the response cache."""

import asyncio
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
from google.protobuf import struct_pb2

from gateway.config.effective import effective_config
from gateway.config.schema import Config
from gateway.core.errors import GatewayError, Reason
from gateway.core.events import CacheFlushed, RankDrained, RankUndrained
from gateway.edges.grpc_context import RpcContext
from gateway.edges.grpc_methods import Service, unary
from gateway.edges.grpc_ranks import RankFeed
from gateway.edges.grpc_request import RequestReader
from gateway.edges.reload import Reloader, Result, fingerprint
from gateway.v1 import admin_pb2

if TYPE_CHECKING:
    from gateway.edges.driver import Driver

NAME = "gateway.v1.AdminService"
DEFAULT_DECISIONS = 20
MAX_DECISIONS = 1000
# Clients accept 4 MiB unless told otherwise.
MAX_ANSWER_BYTES = 3 * 1024 * 1024


class AdminService:
    """The servicer. `service` is what a transport serves."""

    def __init__(self, config: Config, driver: "Driver", reloader: Reloader | None = None) -> None:
        self._config = config
        self._driver = driver
        self._reloader = reloader
        self._reader = RequestReader(config)
        self._ranks = RankFeed(driver)
        self.service = Service(
            NAME,
            (
                unary("GetEffectiveConfig", admin_pb2.GetEffectiveConfigRequest, self.get_effective_config),
                unary("Explain", admin_pb2.ExplainRequest, self.explain),
                unary("GetDecision", admin_pb2.GetDecisionRequest, self.get_decision),
                unary("ListDecisions", admin_pb2.ListDecisionsRequest, self.list_decisions),
                unary("DrainRank", admin_pb2.DrainRankRequest, self.drain_rank),
                unary("UndrainRank", admin_pb2.UndrainRankRequest, self.undrain_rank),
                unary("FlushResponseCache", admin_pb2.FlushResponseCacheRequest, self.flush_response_cache),
                unary("ReloadConfig", admin_pb2.ReloadConfigRequest, self.reload_config),
            ),
            self.configure,
        )

    def configure(self, config: Config) -> None:
        """Show and go by this configuration from now on."""
        self._config = config
        self._reader.configure(config)

    async def get_effective_config(
        self, _: admin_pb2.GetEffectiveConfigRequest, __: RpcContext
    ) -> admin_pb2.GetEffectiveConfigResponse:
        """Every setting, defaults filled in."""
        effective = effective_config(self._config)
        text = msgspec.json.encode(effective, order="sorted")
        return admin_pb2.GetEffectiveConfigResponse(
            config=to_struct(effective),
            json=text.decode(),
            sha256=hashlib.sha256(text).hexdigest(),
            last_reload=_reload_message(self._reloader),
        )

    async def reload_config(self, _: admin_pb2.ReloadConfigRequest, __: RpcContext) -> admin_pb2.ReloadConfigResponse:
        """Put the file in force, or say why not."""
        if self._reloader is None:
            raise GatewayError(Reason.CONFIG_NOT_APPLIED, "this gateway was not started from a configuration file")
        outcome = await self._reloader.reload("ReloadConfig")
        reason = _RELOAD_REASONS.get(outcome.result)
        if reason is not None:
            is_retryable = reason is Reason.CONFIG_NOT_APPLIED
            raise GatewayError(reason, "; ".join(outcome.problems), retryable=is_retryable, result=outcome.result)
        return admin_pb2.ReloadConfigResponse(reload=_reload_message(self._reloader), sha256=fingerprint(self._config))

    async def explain(self, request: admin_pb2.ExplainRequest, context: RpcContext) -> admin_pb2.ExplainResponse:
        """Decide for a request that is not sent."""
        now = self._driver.clock()
        call = self._reader.call(context, now)
        arrived = self._reader.generate(request.request, call, now, client_key="", arrived_at_unix_s=0.0, sink=None)
        decision = self._driver.router.explain(arrived, now)
        return admin_pb2.ExplainResponse(decision=to_struct(decision.render()))

    async def get_decision(self, request: admin_pb2.GetDecisionRequest, _: RpcContext) -> admin_pb2.GetDecisionResponse:
        """One recorded decision."""
        decision = self._driver.router.decisions.get(request.decision_id)
        if decision is None:
            raise GatewayError(
                Reason.DECISION_NOT_FOUND,
                f"decision {request.decision_id} is not recorded (any more); observability.decision_ring sets how many are",
                decision_id=request.decision_id,
            )
        return admin_pb2.GetDecisionResponse(decision=to_struct(decision.render()))

    async def list_decisions(
        self, request: admin_pb2.ListDecisionsRequest, _: RpcContext
    ) -> admin_pb2.ListDecisionsResponse:
        """The latest recorded decisions, newest first."""
        limit = request.limit if request.HasField("limit") else DEFAULT_DECISIONS
        if not 1 <= limit <= MAX_DECISIONS:
            raise GatewayError(
                Reason.INVALID_REQUEST, f"limit: must be in 1..{MAX_DECISIONS}, got {limit}", field="limit"
            )
        response = admin_pb2.ListDecisionsResponse()
        size = 0
        for decision in self._driver.router.decisions.latest(limit):
            rendered = to_struct(decision.render())
            size += rendered.ByteSize()
            if size > MAX_ANSWER_BYTES:
                break
            response.decisions.append(rendered)
            # Rendering is slow next to the data path, which must have its turn between two records.
            await asyncio.sleep(0)
        return response

    async def flush_response_cache(
        self, _: admin_pb2.FlushResponseCacheRequest, __: RpcContext
    ) -> admin_pb2.FlushResponseCacheResponse:
        """Forget every stored answer."""
        cache = self._driver.router.response_cache
        entries, size = (0, 0) if cache is None else (cache.entries, cache.nbytes)
        self._driver.emit(CacheFlushed())
        return admin_pb2.FlushResponseCacheResponse(enabled=cache is not None, entries=entries, bytes=size)

    async def drain_rank(self, request: admin_pb2.DrainRankRequest, _: RpcContext) -> admin_pb2.DrainRankResponse:
        """No new work for a rank."""
        rank = self._rank(request)
        self._driver.emit(RankDrained(rank, migrate=request.migrate))
        return admin_pb2.DrainRankResponse(rank=self._ranks.now()[rank])

    async def undrain_rank(self, request: admin_pb2.UndrainRankRequest, _: RpcContext) -> admin_pb2.UndrainRankResponse:
        """New work for it again."""
        rank = self._rank(request)
        self._driver.emit(RankUndrained(rank))
        return admin_pb2.UndrainRankResponse(rank=self._ranks.now()[rank])

    def _rank(self, request: admin_pb2.DrainRankRequest | admin_pb2.UndrainRankRequest) -> int:
        last = self._driver.router.ranks.size - 1
        if not request.HasField("rank") or request.rank > last:
            raise GatewayError(
                Reason.INVALID_RANK,
                f"rank: name one of 0..{last}",
                field="rank",
                rank=request.rank if request.HasField("rank") else None,
                valid_min=0,
                valid_max=last,
            )
        return request.rank


_RELOAD_REASONS: dict[Result, Reason] = {
    "invalid": Reason.CONFIG_INVALID,
    "refused": Reason.CONFIG_NEEDS_RESTART,
    "failed": Reason.CONFIG_NOT_APPLIED,
}


def _reload_message(reloader: Reloader | None) -> admin_pb2.Reload | None:
    """The last reload; None if there was none."""
    last = reloader.last if reloader is not None else None
    if last is None:
        return None
    return admin_pb2.Reload(
        result=admin_pb2.ReloadResult.Value(f"RELOAD_RESULT_{last.result.upper()}"),
        cause=last.cause,
        at_unix_s=last.at_unix_s,
        changed=last.changed,
        problems=last.problems,
    )


def to_struct(value: Mapping[str, object]) -> struct_pb2.Struct:
    """A JSON-like mapping as a protobuf Struct. Infinite costs are the strings that the record renders."""
    struct = struct_pb2.Struct()
    struct.update(msgspec.json.decode(msgspec.json.encode(value)))
    return struct
