"""The engine side of both wires, declared here from their formats and from nothing of the gateway's."""
