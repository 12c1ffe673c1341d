"""How long a request may wait in the queue: the queue's rules by priority, and what the call itself asks for."""

from math import inf
from typing import NamedTuple

from gateway.config.scheduling import Queue
from gateway.core.events import RequestArrived


class WaitLimit(NamedTuple):
    """After how many seconds a request's wait ends, and whether the call asked for it or the queue's rules did."""

    wait_s: float
    is_calls: bool


class TimeOuts:
    """Times in seconds; infinity: never.

    `timeout_s` ends the wait or puts the request behind all others, as `timeout_action` says. What a call asks for is how
    long its caller waits: it ends the wait, whatever the action.
    """

    __slots__ = ("_action", "_default_s", "_levels", "_may_ask")

    def __init__(self, settings: Queue) -> None:
        self._levels = {level.priority: level for level in settings.levels}
        self._default_s = inf if settings.timeout_s is None else settings.timeout_s
        self._action = settings.timeout_action
        self._may_ask = settings.allow_timeout_override

    def timeout_s(self, priority: int) -> float:
        """The queue's time-out for requests of this priority."""
        level = self._levels.get(priority) if self._levels else None
        return level.timeout_s if level is not None and level.timeout_s is not None else self._default_s

    def asked_s(self, arrived: RequestArrived) -> float:
        """What the call asks for."""
        asked_s = arrived.queue_timeout_s
        return asked_s if asked_s is not None and asked_s < inf and self._may_ask else inf

    def is_delay(self, priority: int) -> bool:
        """Whether the queue's time-out only puts requests of this priority behind all others."""
        level = self._levels.get(priority) if self._levels else None
        action = level.timeout_action if level is not None else None
        return (action or self._action) == "delay"

    def limit(self, arrived: RequestArrived) -> WaitLimit:
        """After how long a request's wait ends, and by whom."""
        asked_s = self.asked_s(arrived)
        own_s = inf if self.is_delay(arrived.priority) else self.timeout_s(arrived.priority)
        return WaitLimit(min(asked_s, own_s), is_calls=asked_s <= own_s)
