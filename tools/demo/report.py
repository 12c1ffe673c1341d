"""The demo's live table and its summary, in plain text."""

import sys
from collections import Counter
from urllib.request import urlopen

from gateway.v1 import gateway_pb2
from tools.demo.replay import Replay, Result, percentiles
from tools.demo.stack import Ports

_CLEAR = "\x1b[{lines}A\x1b[J"


class LiveTable:
    """One row per rank, redrawn in place on a terminal, appended otherwise."""

    def __init__(self) -> None:
        self._drawn = 0

    def draw(self, ranks: list[gateway_pb2.Rank], replay: Replay) -> None:
        """Show the ranks as the gateway sees them right now."""
        lines = [
            f"sent {replay.started:4d}/{len(replay.jobs)}  done {len(replay.results):4d}",
            "rank  state  in-flight  running  waiting  kv usage  cost",
        ]
        for rank in ranks:
            state = gateway_pb2.RankState.Name(rank.state).removeprefix("RANK_STATE_")
            lines.append(
                f"{rank.rank:4d}  {state:5s}  {rank.in_flight:9d}  {rank.running:7d}  {rank.waiting:7d}"
                f"  {rank.kv_usage:8.3f}  {rank.cost:.0f}"
            )
        if sys.stdout.isatty() and self._drawn:
            sys.stdout.write(_CLEAR.format(lines=self._drawn))
        self._drawn = len(lines)
        print("\n".join(lines), flush=True)


def summary(results: list[Result], wall_s: float, metrics_text: str) -> list[str]:
    """The figures that a reader wants after a run."""
    errors = Counter(result.error for result in results if result.error is not None)
    tokens = sum(result.tokens for result in results)
    lines = [
        f"requests {len(results)}  tokens {tokens}  in {wall_s:.1f} s  ({tokens / wall_s:.0f} tokens/s)",
        f"{'ms':<6}{'p50':>9}{'p95':>9}{'p99':>9}",
    ]
    series = {
        "TTFT": [result.ttft_s for result in results if result.ttft_s is not None],
        "ITL": [gap for result in results for gap in result.gaps_s],
        "E2E": [result.e2e_s for result in results if result.e2e_s is not None],
    }
    for name, values in series.items():
        lines.append(f"{name:<6}" + "".join(f"{value * 1e3:9.1f}" for value in percentiles(values)))
    lines += _shares(results)
    lines.append(f"clamps {_total(metrics_text, 'rankgate_snapshot_clamps_total'):.0f}  errors {sum(errors.values())}")
    lines += [f"  {count} x {error}" for error, count in errors.most_common(5)]
    return lines


def _shares(results: list[Result]) -> list[str]:
    requests: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    for result in results:
        if result.rank is not None:
            requests[result.rank] += 1
            tokens[result.rank] += result.tokens
    if not requests:
        return []
    mean = sum(tokens.values()) / len(tokens)
    shares = "  ".join(f"rank {rank}: {requests[rank]} requests, {tokens[rank]} tokens" for rank in sorted(requests))
    return [shares, f"imbalance of tokens (max / mean) {max(tokens.values()) / mean:.3f}"]


def fetch_metrics(ports: Ports) -> str:
    """The gateway's metrics page."""
    with urlopen(f"http://127.0.0.1:{ports.metrics}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def _total(text: str, name: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith((name + "{", name + " ")))


def next_steps(ports: Ports) -> list[str]:
    """Commands that work against a kept demo."""
    call = f".venv/bin/grpcurl -plaintext 127.0.0.1:{ports.grpc}"
    data = """'{"prompt_token_ids": [1, 2, 3], "sampling": {"max_tokens": 8}}'"""
    return [
        f"{call} list",
        f"{call} gateway.v1.GatewayService/ListRanks",
        f"{call.replace('-plaintext', f'-plaintext -d {data}')} gateway.v1.GatewayService/Generate",
        f".venv/bin/grpcurl -plaintext 127.0.0.1:{ports.admin} gateway.v1.AdminService/ListDecisions",
        f".venv/bin/rankgate ranks --address 127.0.0.1:{ports.grpc}",
        f"curl -s http://127.0.0.1:{ports.metrics}/metrics | grep rankgate_",
    ]
