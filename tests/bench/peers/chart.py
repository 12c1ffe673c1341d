"""The ratios to the direct peer as an SVG bar chart, written by hand: no plotting library."""

import math
from xml.sax.saxutils import escape

from tests.bench.peers.collect import Results
from tests.bench.peers.kinds import BASE, PEERS
from tests.bench.peers.scenarios import ALL

WIDTH, LABELS, BAR, GAP, TOP = 860, 110, 13, 14, 64
COLOURS = ("#555555", "#0b6e4f", "#3aa17e", "#7fb069", "#c98b2b", "#3f6fb5", "#8d5a97", "#b5534a", "#d08aa0")
DECADES = (0.1, 10.0)


def chart(results: Results) -> str:
    """Bars from the line of 1: to the left is cheaper than the direct peer, to the right dearer. Logarithmic."""
    rows = list(_rows(results))
    height = TOP + sum(GAP + BAR * len(bars) for _, bars in rows) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="18" font-size="14">Cost and time beside {escape(PEERS[BASE].title)} = 1 (less is better)</text>',
        *_legend(),
        *_grid(height),
    ]
    y = TOP + 8
    for scenario, bars in rows:
        parts.append(f'<text x="10" y="{y + BAR * len(bars) / 2 + 4:.0f}">{escape(scenario)}</text>')
        for peer, ratio, low, high in bars:
            parts += _bar(y, peer, ratio, low, high)
            y += BAR
        y += GAP
    return "\n".join([*parts, "</svg>", ""])


def _rows(results: Results) -> list[tuple[str, list[tuple[str, float, float, float]]]]:
    rows = []
    for name, scenario in ALL.items():
        base = results.median(name, BASE, scenario.unit)
        bars = []
        for peer in PEERS:
            values = results.values(name, peer, scenario.unit)
            if base and values and peer != BASE and values[0] > 0:
                middle = results.median(name, peer, scenario.unit) or 0.0
                bars.append((peer, middle / base, values[0] / base, values[-1] / base))
        if bars:
            rows.append((name, bars))
    return rows


def _x(ratio: float) -> float:
    low, high = map(math.log10, DECADES)
    share = (min(max(math.log10(ratio), low), high) - low) / (high - low)
    return LABELS + share * (WIDTH - LABELS - 60)


def _legend() -> list[str]:
    parts, x = [], 10.0
    for colour, (name, _) in zip(COLOURS, PEERS.items(), strict=True):
        if name == BASE:
            continue
        parts.append(f'<rect x="{x:.0f}" y="28" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14:.0f}" y="37">{escape(name)}</text>')
        x += 32 + 6.6 * len(name)
    return parts


def _grid(height: int) -> list[str]:
    parts = []
    for ratio in (0.1, 0.2, 0.5, 1, 2, 5, 10):
        x, colour = _x(ratio), "#222" if ratio == 1 else "#ddd"
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{height - 24}" stroke="{colour}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 10}" text-anchor="middle">{ratio:g}x</text>')
    return parts


def _bar(y: float, peer: str, ratio: float, low: float, high: float) -> list[str]:
    start, end = sorted((_x(1.0), _x(ratio)))
    middle = y + BAR / 2
    colour = COLOURS[list(PEERS).index(peer)]
    return [
        f'<rect x="{start:.1f}" y="{y + 1:.0f}" width="{max(end - start, 1):.1f}" height="{BAR - 2}" fill="{colour}"/>',
        f'<line x1="{_x(low):.1f}" y1="{middle:.1f}" x2="{_x(high):.1f}" y2="{middle:.1f}" stroke="black"/>',
        f'<text x="{max(end, _x(high)) + 4:.1f}" y="{middle + 4:.1f}">{ratio:.2f}x</text>',
    ]
