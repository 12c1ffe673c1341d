"""The parts of one router that its steps share. Each has one owner of its data; this is only who they are."""

from typing import NamedTuple

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
