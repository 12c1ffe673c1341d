"""Objectives for the time to first token (TTFT), by prompt length and priority.

The first bucket whose limit is not below the prompt's length counts; a prompt longer than every limit has no
objective. The configuration's checks see to it that limits ascend. All times are whole microseconds.
"""

from bisect import bisect_left
from math import inf
from typing import Literal

from gateway.config.scheduling import Slo

MAX_OBJECTIVE_US = 86_400_000_000
"""A day. Longer objectives count as a day: sums with a time must stay exact."""

EDF_FLOOR_US = 200_000
EDF_PREFILLS = 5
"""Without an objective, a prompt is due after five times its own prefill, but not before 200 ms."""


class SloTargets:
    """The objectives of the configuration. `margin_us` is what it keeps free below them."""

    __slots__ = ("_factors", "_limits", "_ttft_us", "margin_us", "mode")

    def __init__(self, settings: Slo) -> None:
        self.mode: Literal["off", "shadow", "enforce"] = settings.mode
        self.margin_us = _bounded(settings.margin_ms * 1000.0)
        self._limits = [inf if item.max_prompt_tokens is None else item.max_prompt_tokens for item in settings.ttft]
        self._ttft_us = [item.ttft_ms * 1000.0 for item in settings.ttft]
        self._factors = {item.priority: item.factor for item in settings.priorities}

    def objective_us(self, prompt_tokens: int, priority: int) -> int | None:
        """The TTFT objective in microseconds from arrival, at least 1. None: there is none for this length."""
        bucket = bisect_left(self._limits, prompt_tokens)
        if bucket == len(self._limits):
            return None
        return max(_bounded(self._ttft_us[bucket] * self._factors.get(priority, 1.0)), 1)

    def edf_deadline_us(self, prompt_tokens: int, priority: int, prefill_us: int) -> int:
        """When a prompt's first token is due, in microseconds from arrival: what the order `edf` goes by.

        Its objective if it has one, else the larger of 200 ms and five times its predicted prefill.
        The factor of a priority applies to objectives only.
        """
        objective_us = self.objective_us(prompt_tokens, priority)
        if objective_us is not None:
            return objective_us
        return max(EDF_FLOOR_US, EDF_PREFILLS * prefill_us)


def _bounded(microseconds: float) -> int:
    return round(min(microseconds, MAX_OBJECTIVE_US))
