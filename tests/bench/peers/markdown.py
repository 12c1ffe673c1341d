"""The headline figures as tables for `docs/benchmarks.md`."""

from tests.bench.peers.collect import Results
from tests.bench.peers.kinds import BASE, PEERS, Peer
from tests.bench.peers.report import COLUMNS
from tests.bench.peers.scenarios import ALL, EVERYWHERE, SCALE

_UNITS = dict(COLUMNS)


def tables(results: Results) -> str:
    """Ours beside the direct peer in every scenario, then the others in those that all of them have."""
    same = [peer for peer in PEERS.values() if peer.same_job]
    others = [peer for peer in PEERS.values() if not peer.same_job]
    compared = [name for name in ALL if name not in SCALE]
    return f"{_table(results, compared, same)}\n{_table(results, list(EVERYWHERE), others)}"


def _table(results: Results, scenarios: list[str], peers: list[Peer]) -> str:
    titles = " | ".join(peer.title for peer in peers)
    lines = [f"| scenario | {titles} |", "|---" * (len(peers) + 1) + "|"]
    for name in scenarios:
        if name in results.runs or name in results.failures:
            cells = " | ".join(_cell(results, name, peer) for peer in peers)
            lines.append(f"| {name}, {_UNITS[ALL[name].unit]} | {cells} |")
    return "\n".join([*lines, ""])


def _cell(results: Results, name: str, peer: Peer) -> str:
    unit = ALL[name].unit
    values, middle = results.values(name, peer.name, unit), results.median(name, peer.name, unit)
    if middle is None:
        failed = peer.name in results.failures.get(name, {})
        return "failed" if failed else "not run" if peer.name in results.not_run else ""
    base = results.median(name, BASE, unit)
    ratio = f" ({middle / base:.2f}x)" if base and peer.name != BASE else ""
    spread = f" [{_short(values[0])}-{_short(values[-1])}]" if len(values) > 1 else ""
    return f"{_short(middle)}{spread}{ratio}"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
