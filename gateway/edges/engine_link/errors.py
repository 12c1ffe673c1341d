"""Errors of the engine link that end a start; nothing a peer sends is one of them."""


class LinkError(OSError):
    """An address can't be bound or a socket directory can't be used. `address` names it."""

    def __init__(self, address: str, problem: str) -> None:
        super().__init__(f"{address}: {problem}")
        self.address = address
        self.problem = problem
