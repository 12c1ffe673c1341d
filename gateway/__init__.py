"""rankgate: a load-balancing gateway for data-parallel LLM engine ranks."""

__version__ = "0.1.0"
