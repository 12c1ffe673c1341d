"""How long an engine takes: prefill of one request or of a batch, and one decode step.

Predictions are whole microseconds: cheap requests don't all become 0, and sums of them are exact. A formula is a
user's text, so every result is checked (see `Predictor.prefill_us`); nothing here raises and nothing is remembered
of single requests.

**Calibration** follows the ratio of actual to predicted time as moving averages of its logarithm, so that one late
request can't outweigh many others. Of a quick and a slow average the lower one counts: a prediction that is too high
leaves ranks without work, one that is too low costs little. Down is therefore quick, up is slow.
The ratio is taken to unscaled predictions: a scale that fed on its own results would overshoot by as much as is in
flight at the time.
"""

from collections.abc import Callable, Sequence
from math import exp, log, nan

from gateway.config.scheduling import Predictor as Settings
from gateway.config.schema import Config
from gateway.core.formula_syntax import FormulaError
from gateway.core.predictor_formula import Member, PrefillFormula, StepFormula, compile_prefill, compile_step

__all__ = ["FormulaError", "Predictor", "PrefillFormula", "StepFormula", "compile_prefill", "compile_step"]

MAX_US = 3_600_000_000
"""An hour. No prediction is longer, whatever a formula says."""
_MAX_MS = MAX_US / 1000.0

PRIOR_US_PER_TOKEN = 30
"""Stands in where there is no usable formula. No engine's figure: it orders requests by what they have to compute."""
_MOST_PRIOR_TOKENS = MAX_US // PRIOR_US_PER_TOKEN

MIN_SAMPLES = 32
"""The scale stays 1 for as many samples: a few don't tell a wrong formula from a busy moment."""
LEAST_SCALE, MOST_SCALE = 0.1, 10.0
_QUICK, _SLOW = 1 / 16, 1 / 128


class Predictor:
    """Predicted times. Without settings there is no model: every new token counts 30 us, which is good for order only.

    `scale` is what predictions are multiplied with: 1.0 unless calibrated. `faults` counts the results of formulas
    that had to be replaced.
    """

    __slots__ = (
        "_batch",
        "_calibration",
        "_settings",
        "_single",
        "_step",
        "_us_per_ms",
        "faults",
        "has_model",
        "has_step_model",
        "scale",
    )

    def __init__(self, settings: Settings | None = None) -> None:
        """Raises `FormulaError` for a formula that can't be compiled."""
        self.faults = 0
        self.scale = 1.0
        self._us_per_ms = 1000.0
        self._calibration: _Calibration | None = None
        self._settings: Settings | None = None
        self._use(settings)

    def configure(self, config: Config) -> None:
        """Go by other formulas. What calibration has learnt stays while it is of the same one."""
        if config.predictor != self._settings:
            self._use(config.predictor)

    def _use(self, settings: Settings | None) -> None:
        is_same = (
            settings is not None
            and self._settings is not None
            and (settings.prefill_ms, settings.calibrate) == (self._settings.prefill_ms, self._settings.calibrate)
        )
        text = settings.prefill_ms if settings is not None else f"{PRIOR_US_PER_TOKEN / 1000} * total_new_tokens"
        _, single, batch = compile_prefill(text)
        step: Callable[[int, int], float] | None = None
        if settings is not None and settings.step_ms is not None:
            step = compile_step(settings.step_ms).step
        self._single, self._batch, self._step = single, batch, step
        self._settings = settings
        self.has_model = settings is not None
        self.has_step_model = step is not None
        if not is_same:
            self.scale = 1.0
            self._us_per_ms = 1000.0
            self._calibration = _Calibration() if settings is not None and settings.calibrate else None

    def prefill_us(self, prompt_tokens: int, cached_tokens: int = 0) -> int:
        """Microseconds to prefill one request: 0 to `MAX_US`, scaled.

        A result below 0 (a fitted line may cross it) counts as 0, one above an hour as an hour, and one that is NaN or
        can't be computed (division by zero, `log(0)`) as 30 us per new token. All three are counted in `faults`.
        """
        if not self.has_model and not cached_tokens and 0 < prompt_tokens <= _MOST_PRIOR_TOKENS:
            return PRIOR_US_PER_TOKEN * prompt_tokens
        if not 0 <= cached_tokens <= prompt_tokens:
            prompt_tokens, cached_tokens = _clamped(prompt_tokens, cached_tokens)
        # At least one token is computed, even of a prompt that is cached as a whole.
        new_tokens = prompt_tokens - cached_tokens or 1
        if not self.has_model:
            return min(PRIOR_US_PER_TOKEN * new_tokens, MAX_US)
        try:
            milliseconds = self._single(prompt_tokens, cached_tokens, new_tokens, 1 if cached_tokens else 0)
        except (ArithmeticError, ValueError):
            milliseconds = nan
        return self._checked_us(milliseconds, new_tokens)

    def batch_us(self, members: Sequence[tuple[int, int]]) -> int:
        """Microseconds to prefill `(prompt_tokens, cached_tokens)` together; 0 for none. Checked as `prefill_us`."""
        if len(members) < 2:
            return self.prefill_us(*members[0]) if members else 0
        batch: list[Member] = []
        for member in members:
            prompt, cached = member
            if not 0 <= cached <= prompt:
                prompt, cached = _clamped(prompt, cached)
            batch.append((prompt, cached, prompt - cached or 1, 1 if cached else 0))
        try:
            milliseconds = self._batch(batch)
        except (ArithmeticError, ValueError):
            milliseconds = nan
        return self._checked_us(milliseconds, sum([new_tokens for _, _, new_tokens, _ in batch]))

    def step_us(self, in_flight_decode: int, ctx_tokens: int) -> int | None:
        """Microseconds of one decode step, not scaled.

        None means that it isn't known: there is no formula, or its result is no time from 0 to an hour (counted in
        `faults`). The rank's measured time between batches is the better guess then.
        """
        if self._step is None:
            return None
        try:
            milliseconds = self._step(in_flight_decode, ctx_tokens)
        except (ArithmeticError, ValueError):
            milliseconds = nan
        if not 0 <= milliseconds <= _MAX_MS:
            self.faults += 1
            return None
        return int(milliseconds * 1000.0 + 0.5)

    def observe(self, predicted_us: int, actual_us: int) -> None:
        """Learn from a prefill that ended; moves `scale` if the settings say so.

        `predicted_us` is the unscaled prediction (see `observe_prefill`). An actual time of 0 says that the prefill ran
        together with the one observed before: both predictions are compared with that one's time. What was predicted
        to take no time says nothing.
        """
        if self._calibration is not None:
            self.scale = self._calibration.add(max(predicted_us, 0), min(actual_us, MAX_US))
            self._us_per_ms = 1000.0 * self.scale

    def observe_prefill(self, prompt_tokens: int, cached_tokens: int, actual_us: int) -> None:
        """`observe` for one request, which is predicted anew: what was predicted when it came may have another scale."""
        if self._calibration is not None:
            self.observe(round(self.prefill_us(prompt_tokens, cached_tokens) / self.scale), actual_us)

    def _checked_us(self, milliseconds: float, new_tokens: int) -> int:
        if not 0 <= milliseconds <= _MAX_MS:
            self.faults += 1
            if milliseconds < 0:
                return 0
            if milliseconds > _MAX_MS:
                return MAX_US
            milliseconds = new_tokens * PRIOR_US_PER_TOKEN / 1000.0
        microseconds = milliseconds * self._us_per_ms + 0.5
        return int(microseconds) if microseconds < MAX_US else MAX_US


class _Calibration:
    """Two moving averages of log(actual / predicted); each is a plain mean until it has enough samples.

    A sample is a prefill that took time together with those after it that took none: the one a rank's time is given
    to stands for all that it started at once.
    """

    __slots__ = ("_actual_us", "_predicted_us", "_quick", "_samples", "_scale", "_slow")

    def __init__(self) -> None:
        self._actual_us = 0
        self._predicted_us = 0
        self._samples = 0
        self._quick = 0.0
        self._slow = 0.0
        self._scale = 1.0

    def add(self, predicted_us: int, actual_us: int) -> float:
        """Take one more prefill into account. The scale that follows from the samples that are complete."""
        if actual_us <= 0:
            self._predicted_us += predicted_us
            return self._scale
        if self._predicted_us and self._actual_us:
            self._add_sample(self._actual_us / self._predicted_us)
        self._predicted_us, self._actual_us = predicted_us, actual_us
        return self._scale

    def _add_sample(self, ratio: float) -> None:
        logarithm = log(min(max(ratio, LEAST_SCALE), MOST_SCALE))
        self._samples += 1
        share = 1.0 / self._samples
        self._quick += (logarithm - self._quick) * max(share, _QUICK)
        self._slow += (logarithm - self._slow) * max(share, _SLOW)
        if self._samples >= MIN_SAMPLES:
            self._scale = min(max(exp(min(self._quick, self._slow)), LEAST_SCALE), MOST_SCALE)


def _clamped(prompt_tokens: int, cached_tokens: int) -> tuple[int, int]:
    """No more than the prompt is cached, and nothing is less than nothing."""
    prompt_tokens = max(prompt_tokens, 0)
    return prompt_tokens, min(max(cached_tokens, 0), prompt_tokens)
