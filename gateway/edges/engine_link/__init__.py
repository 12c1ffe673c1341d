"""The southbound edge: ZMQ sockets between this gateway and its engine ranks."""

from gateway.edges.engine_link.counters import LinkCounters
from gateway.edges.engine_link.errors import LinkError
from gateway.edges.engine_link.link import EngineLink
from gateway.edges.engine_link.rank_link import LinkState

__all__ = ["EngineLink", "LinkCounters", "LinkError", "LinkState"]
