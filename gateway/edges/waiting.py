"""How long a request waited in the gateway before a rank got it: one answer for logs and trailing metadata."""

from gateway.core.request import Request


def queue_ms(request: Request) -> float:
    """Milliseconds from acceptance to the first dispatch; to the end for a request that was never dispatched.

    0 for one that is still live and undispatched. Must be asked before `Request.unlink`.
    """
    sent_at = min((sequence.sent_at for sequence in request.sequences if sequence.sent_at is not None), default=None)
    until = request.ended_at if sent_at is None else sent_at
    return 0.0 if until is None else (until - request.accepted_at) * 1e3
