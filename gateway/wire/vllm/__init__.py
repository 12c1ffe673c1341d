"""vLLM's engine-core wire: untagged positional arrays with maps for statistics and sampling."""

from gateway.wire.vllm.protocol import VllmProtocol

__all__ = ["VllmProtocol"]
