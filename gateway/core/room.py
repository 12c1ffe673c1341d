"""What a rank can take as a whole batch: every hard bound, counted on with each member.

Nothing is charged before a batch is complete, so what its first members take is not in the rank table yet.
"""

from gateway.core.entry import Entry
from gateway.core.gate import Gate
from gateway.core.ranks import RankTable


class Room:
    """The room on one rank behind `head`, which it can take. For one batch, and while nothing else is charged.

    A rank with members of the batch counts as busy, so `kv_limit` holds for those behind the head; it is the narrowest
    of the bounds on KV tokens.
    """

    __slots__ = ("_gate", "_kv_tokens", "_members", "_rank", "_table")

    def __init__(self, table: RankTable, gate: Gate, rank: int, head: Entry) -> None:
        self._table = table
        self._gate = gate
        self._rank = rank
        self._members = 1
        self._kv_tokens = head.prompt_tokens + head.max_tokens

    def takes(self, entry: Entry, tokens: int) -> bool:
        """Whether `entry` can go behind members with `tokens` prompt tokens together. If so, it counts as a member."""
        table, gate, rank = self._table, self._gate, self._rank
        prompt = entry.prompt_tokens
        kv_tokens = prompt + entry.max_tokens
        takes = (
            table.in_flight[rank] + self._members < gate.slots(rank)
            and prompt < table.max_model_len[rank]
            and gate.kv_fits(rank, prompt, ahead=tokens)
            and self._fits_budget(tokens + prompt, self._kv_tokens + kv_tokens)
        )
        if takes:
            self._members += 1
            self._kv_tokens += kv_tokens
        return takes

    def _fits_budget(self, prompt_tokens: int, kv_tokens: int) -> bool:
        table = self._table
        group = table.group_of[self._rank]
        budget = table.budgets[group]
        requests, prompts, kv = budget.max_requests, budget.max_prompt_tokens, budget.max_kv_tokens
        return (
            (requests is None or table.group_in_flight[group] + self._members < requests)
            and (prompts is None or table.group_prompt_tokens[group] + prompt_tokens <= prompts)
            and (kv is None or table.group_kv_tokens[group] + kv_tokens <= kv)
        )
