"""The standard engine service of the groups' family, so that existing clients take the gateway for one engine."""

from gateway.config.schema import Config
from gateway.edges.driver import Driver
from gateway.edges.grpc_engine.tokenspeed import TokenSpeedService
from gateway.edges.grpc_engine.vllm import VllmService
from gateway.edges.grpc_methods import Service


def engine_service(config: Config, driver: Driver) -> Service:
    """The one engine service that this gateway offers.

    Exactly one, because clients detect an engine's family by which service answers first.
    """
    if config.groups[0].protocol == "tokenspeed":
        return TokenSpeedService(config, driver).service()
    return VllmService(config, driver).service()
