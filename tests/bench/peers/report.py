"""The figures as a text table, each with its spread and its ratio to the direct peer."""

from tests.bench.peers.collect import Results
from tests.bench.peers.kinds import BASE, PEERS
from tests.bench.peers.scenarios import ALL, RANKS, ROWS_PER_BATCH, SCALE

COLUMNS = (
    ("us_per_token", "µs/token"),
    ("us_per_request", "µs/request"),
    ("tokens_per_s", "tokens/s"),
    ("requests_per_s", "requests/s"),
    ("ttft_p50_ms", "TTFT p50 ms"),
    ("ttft_p99_ms", "p99"),
    ("gap_p50_ms", "gap p50 ms"),
    ("gap_p99_ms", "p99"),
    ("cpu_share", "core used"),
    ("rss_mb", "RSS MB"),
    ("kb_per_stream", "kB/stream"),
    ("refused", "refused before"),
)
LOWER_IS_BETTER = {"us_per_token", "us_per_request", "ttft_p50_ms", "kb_per_stream"}
FLAT = 0.25


def table(results: Results) -> str:
    """Everything that was measured, scenario by scenario."""
    lines = [
        "median [lowest-highest] of the headline figure, its ratio to the direct peer (below 1 is better), the rest"
    ]
    for name in [each for each in ALL if each in results.runs or each in results.failures]:
        lines += ["", f"{name} ({ALL[name].unit})", *_scenario(results, name)]
    lines += ["", *_direct(results), *_scale(results)]
    lines += [f"not run: {peer} ({PEERS[peer].title}): {why}" for peer, why in results.not_run.items()]
    return "\n".join(lines)


def _scenario(results: Results, name: str) -> list[str]:
    unit = ALL[name].unit
    base = results.median(name, BASE, unit)
    lines = []
    for peer, kind in PEERS.items():
        values = results.values(name, peer, unit)
        if values:
            middle = results.median(name, peer, unit) or 0.0
            ratio = f"{middle / base:6.2f}x" if base else "       "
            spread = f"{middle:9.2f} [{values[0]:.2f}-{values[-1]:.2f}]"
            rest = ", ".join(_others(results, name, peer, unit))
            lines.append(f"  {kind.title:27} {spread:28} {ratio}  {rest}")
        if (why := results.failures.get(name, {}).get(peer)) is not None:
            lines.append(f"  {kind.title:27} failed: {why}")
    return lines


def _others(results: Results, name: str, peer: str, unit: str) -> list[str]:
    found = []
    for figure, title in COLUMNS:
        value = results.median(name, peer, figure)
        if figure != unit and value:
            found.append(f"{title} {value:.0f}" if value >= 1000 else f"{title} {value:.3g}")
    return found


def _direct(results: Results) -> list[str]:
    """What a gateway adds to the time to the first token."""
    lines = []
    for peer, kind in PEERS.items():
        behind = results.direct.get("zmq" if kind.engine == "zmq" else peer)
        through = results.median("light", peer, "ttft_p50_ms")
        if behind is not None and through is not None:
            lines.append(f"  {kind.title:27} {through:.3f} ms, without it {behind:.3f}: +{through - behind:.3f}")
    return ["added time to first token, one stream", *lines] if lines else []


def _scale(results: Results) -> list[str]:
    """How the cost per token goes with streams and ranks, and what a batch costs whatever is in it."""
    lines = []
    by_streams = [results.median(f"paced{streams}", "fast", "us_per_token") for streams in (256, 1024, 4096)]
    by_ranks = [results.median(f"ranks{ranks}", "fast", "us_per_token") for ranks in RANKS[1:]]
    labels = ("streams 256 -> 4096", f"ranks {RANKS[1]} -> {RANKS[-1]}, {ROWS_PER_BATCH} rows a batch")
    for label, values in zip(labels, (by_streams, by_ranks), strict=True):
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            growth = max(known) / known[0] - 1.0
            costs = " -> ".join(f"{value:.2f}" for value in known)
            lines.append(f"  µs/token, {label}: {costs}, at most {growth:+.0%} (aim: {FLAT:+.0%})")
    fit = batch_cost(results)
    if fit is not None:
        lines.append(
            f"  fixed cost of a batch {fit[0]:.0f} µs, of a token {fit[1]:.2f} µs (256 streams over 1 to 64 ranks)"
        )
    return ["growth, ours on transport fast", *lines, ""] if lines else []


def batch_cost(results: Results) -> tuple[float, float] | None:
    """(µs per batch, µs per token): a straight line through the cost per token over batches per token."""
    points = []
    for ranks in RANKS:
        name = f"spread{ranks}"
        cost = results.median(name, "fast", "us_per_token")
        tokens_per_s = results.median(name, "fast", "tokens_per_s")
        if cost is None or not tokens_per_s:
            return None
        batches_per_s = ranks * 1e3 / SCALE[name].step_ms
        points.append((batches_per_s / tokens_per_s, cost))
    across = sum(x for x, _ in points) / len(points)
    up = sum(y for _, y in points) / len(points)
    slope = sum((x - across) * (y - up) for x, y in points) / sum((x - across) ** 2 for x, _ in points)
    return slope, up - slope * across
