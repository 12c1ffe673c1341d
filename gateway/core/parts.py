"""The parts of one router that its steps share. Each has one owner of its data; this is only who they are."""

from collections.abc import Callable
from typing import NamedTuple

from gateway.config.schema import Config
from gateway.core.admission import Admission
from gateway.core.answers import Answers
from gateway.core.attempts import Attempts
from gateway.core.counters import Counters
from gateway.core.dispatcher import Dispatcher
from gateway.core.load import LoadBook
from gateway.core.policy import Policy
from gateway.core.predictor import Predictor
from gateway.core.ranks import RankTable
from gateway.core.registry import Registry


class Parts(NamedTuple):
    """Everything between an event and its effects. `dispatcher` is None in mode direct."""

    ranks: RankTable
    counters: Counters
    predictor: Predictor
    load: LoadBook
    admission: Admission
    answers: Answers
    registry: Registry
    policy: Policy
    attempts: Attempts
    dispatcher: Dispatcher | None


def build(config: Config, nonce: str, rng: Callable[[], float]) -> Parts:
    """The parts of a new router; `nonce` is 16 hex digits, `rng` gives uniform floats in [0, 1)."""
    ranks = RankTable(config)
    counters = Counters(ranks.size)
    predictor = Predictor(config.predictor)
    load = LoadBook(ranks, config.load, config.gateways, counters)
    policy = Policy(
        config.policy,
        config.filters,
        ranks,
        gateways=config.gateways,
        coupled=any(group.coupled for group in config.groups),
        rng=rng,
    )
    dispatcher = Dispatcher(config, ranks, policy, predictor) if config.scheduling.mode != "direct" else None
    batches = dispatcher.batches if dispatcher is not None else None
    attempts = Attempts(config, nonce, ranks, policy, predictor, load, batches, counters)
    return Parts(
        ranks=ranks,
        counters=counters,
        predictor=predictor,
        load=load,
        admission=Admission(config),
        answers=Answers(config),
        registry=Registry(config),
        policy=policy,
        attempts=attempts,
        dispatcher=dispatcher,
    )
