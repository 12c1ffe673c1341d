"""A small real engine: data-parallel ranks that dial a gateway and speak TokenSpeed's or vLLM's wire.

The scheduler is a pure tick machine, the model is behind one seam (`engine_stub.backend`), and each
family's structs are declared here from their format, never shared with the gateway: the two sides
check each other.
"""
