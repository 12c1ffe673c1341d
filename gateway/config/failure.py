"""Settings of what happens when ranks fail. A leaf module; `schema.py` puts them into the whole."""

from typing import Annotated

from msgspec import Meta

from gateway.config.fields import Count, NonNegativeSeconds, Ratio, Seconds, Strict


class Silence(Strict, frozen=True, kw_only=True):
    """When a rank that sends nothing is given up. Only time with work in flight counts; prefill gets time of its own."""

    after_s: Annotated[
        Seconds,
        Meta(description="silence with work in flight after which the rank is lost; from half of it, no new work"),
    ] = 60.0
    prefill_tokens_per_s: Annotated[
        Count,
        Meta(description="slowest prefill that is still healthy; prompts without a token add their time at this rate"),
    ] = 2000
    quiet_s: Annotated[
        float,
        Meta(
            ge=0,
            le=30,
            description="a rank that is heard again takes work when no row of its earlier work came for this long",
        ),
    ] = 1.0


class Ejection(Strict, frozen=True, kw_only=True):
    """When a rank that fails again and again gets no new work for a while. Groups with `coupled` are left out."""

    after_failures: Annotated[
        Count,
        Meta(
            description="failures in a row, without a success between: a request that the engine failed on, a refused"
            " send, a silence, a loss soon after joining"
        ),
    ] = 5
    base_s: Annotated[Seconds, Meta(description="length of the first ejection; doubles with each until a success")] = (
        5.0
    )
    max_s: Annotated[Seconds, Meta(description="longest ejection")] = 300.0
    max_ratio: Annotated[
        Ratio, Meta(description="share of a group's ranks that may be ejected at once; never its last READY one")
    ] = 0.5
    young_s: Annotated[NonNegativeSeconds, Meta(description="a loss this soon after joining is a failure")] = 30.0


class Failure(Strict, frozen=True, kw_only=True):
    """How failing ranks are found, and what happens to requests whose rank is lost or could not be reached."""

    reroute: Annotated[bool, Meta(description="send those without a token to another rank")] = True
    resume: Annotated[
        bool, Meta(description="let another rank go on with greedy ones that have tokens; calls may decline it")
    ] = True
    max_attempts: Annotated[
        Count,
        Meta(description="ranks tried per sequence, the first one included; sends that a rank refused don't count"),
    ] = 3
    silence: Annotated[Silence | None, Meta(description="how silent ranks are found; null: never")] = Silence()
    eject: Annotated[Ejection | None, Meta(description="how failing ranks are taken out; null: never")] = Ejection()
