"""TokenSpeed's msgpack wire: tagged arrays, append-only, one output message per engine step."""

from gateway.wire.tokenspeed.protocol import TokenSpeedProtocol

__all__ = ["TokenSpeedProtocol"]
