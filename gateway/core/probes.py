"""Signs of life from ranks that say nothing: an engine without work is silent for ever, so it is given some.

A probe is a request for one token, which nobody waits for and no ledger holds. A rank has at most one at a time; the
one before it is aborted. It goes to suspects that have nothing else in flight and to ranks that were lost for their
silence: at once, since it lies in their socket when they wake up, and then less and less often.
"""

from gateway.config.schema import Config
from gateway.core.columns import resize
from gateway.core.counters import Counters
from gateway.core.effects import AbortOnRank, Effect, ProbeRank
from gateway.core.ranks import RankTable
from gateway.core.strays import probe_prefix
from gateway.types import EngineRequest, Sampling

FIRST_S = 5.0
MAX_S = 60.0
_SAMPLING = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)


class Probes:
    """What was asked of each rank, and when to ask again."""

    def __init__(self, config: Config, nonce: str, table: RankTable, counters: Counters) -> None:
        self._prefix = probe_prefix(nonce)
        self._eos_token_ids = config.model.eos_token_ids
        self._table = table
        self._counters = counters
        self._sent = 0
        self.out: list[str | None] = [None] * table.size
        """The wire id of the probe that a rank has not answered yet."""
        self._due_at = [0.0] * table.size
        self._wait_s = [FIRST_S] * table.size

    def resize(self) -> None:
        """Take as many ranks as the table has now."""
        size = self._table.size
        resize(self.out, size, lambda: None)
        resize(self._due_at, size, float)
        resize(self._wait_s, size, lambda: FIRST_S)

    def is_out(self, rank: int) -> bool:
        """Whether the rank owes an answer."""
        return self.out[rank] is not None

    def is_due(self, rank: int, now: float) -> bool:
        """Whether it is time to ask the rank again."""
        return now >= self._due_at[rank]

    def ask(self, rank: int, now: float, effects: list[Effect]) -> None:
        """Send the rank a probe."""
        incarnation = self._table.incarnation[rank]
        last = self.out[rank]
        if last is not None:
            effects.append(AbortOnRank(rank, incarnation, (last,)))
        self._sent += 1
        self._counters.probes[rank] += 1
        wire_id = self.out[rank] = f"{self._prefix}{rank}-{self._sent}"
        self._due_at[rank] = now + self._wait_s[rank]
        self._wait_s[rank] = min(2 * self._wait_s[rank], MAX_S)
        request = EngineRequest(
            wire_id=wire_id, prompt_token_ids=[0], sampling=_SAMPLING, eos_token_ids=self._eos_token_ids
        )
        effects.append(ProbeRank(rank, incarnation, request))

    def settled(self, rank: int) -> None:
        """The rank was heard, or can't be reached any more."""
        self.out[rank] = None
        self._wait_s[rank] = FIRST_S
