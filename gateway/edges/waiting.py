"""How long a request waited in the gateway before a rank got it: one answer for logs and trailing metadata."""

from gateway.core.request import Request


def queue_ms(request: Request) -> float:
    """Milliseconds from acceptance to the first dispatch; to the end for a request that was never dispatched.

    0 for one that is still live and undispatched. Must be asked before `Request.unlink`.
    """
    until: float | None = None
    for sequence in request.sequences:
        sent_at = sequence.sent_at
        if sent_at is not None and (until is None or sent_at < until):
            until = sent_at
    if until is None:
        until = request.ended_at
    return 0.0 if until is None else (until - request.accepted_at) * 1e3
