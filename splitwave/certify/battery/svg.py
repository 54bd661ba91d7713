"""Small plots as inline SVG: enough for a report that opens anywhere and loads nothing."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 28, 44
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
TICKS = 4


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one line; a y of None is a gap."""

    name: str
    points: Sequence[tuple[float, float | None]]


def plot(title: str, x_words: str, y_words: str, curves: Sequence[Curve]) -> str:
    """An `<svg>` with one line a curve. Its y axis begins at 0: a slope is what it seems."""
    drawn = [point for curve in curves for point in curve.points if point[1] is not None]
    if not drawn:
        return f"<p>{html.escape(title)}: nothing to draw.</p>"
    x_min, x_max = min(x for x, _ in drawn), max(x for x, _ in drawn)
    y_max = max(y for _, y in drawn if y is not None) * 1.1 or 1.0
    frame = _Frame(x_min, x_max if x_max > x_min else x_min + 1.0, y_max)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{html.escape(title)}</title>",
        _text(WIDTH / 2, 16, title, "middle"),
        *frame.axes(x_words, y_words),
        *(
            line
            for place, curve in enumerate(curves)
            for line in frame.line(curve, COLOURS[place % len(COLOURS)])
        ),
        *_legend(curves),
        "</svg>",
    ]
    return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class _Frame:
    x_min: float
    x_max: float
    y_max: float

    def x(self, value: float) -> float:
        share = (value - self.x_min) / (self.x_max - self.x_min)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.y_max * (HEIGHT - TOP - BOTTOM)

    def axes(self, x_words: str, y_words: str) -> list[str]:
        parts = []
        for tick in range(TICKS + 1):
            value = self.y_max * tick / TICKS
            y = self.y(value)
            parts.append(
                f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" class="grid"/>'
            )
            parts.append(_text(LEFT - 6, y + 4, f"{value:.3g}", "end"))
            value = self.x_min + (self.x_max - self.x_min) * tick / TICKS
            parts.append(_text(self.x(value), HEIGHT - BOTTOM + 16, f"{value:.3g}", "middle"))
        parts.append(_text(LEFT, TOP - 6, y_words, "start"))
        parts.append(_text(WIDTH - RIGHT, HEIGHT - 6, x_words, "end"))
        return parts

    def line(self, curve: Curve, colour: str) -> list[str]:
        """Polylines between gaps; a lone point is a dot."""
        runs: list[list[tuple[float, float]]] = [[]]
        for x, y in curve.points:
            if y is None:
                runs.append([])
            else:
                runs[-1].append((self.x(x), self.y(y)))
        parts = []
        for run in runs:
            if len(run) > 1:
                path = " ".join(f"{x:.1f},{y:.1f}" for x, y in run)
                parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.8" fill="{colour}"/>' for x, y in run
            ]
        return parts


def _legend(curves: Sequence[Curve]) -> list[str]:
    if len(curves) < 2:
        return []
    return [
        _text(LEFT + 70 * place, HEIGHT - 6, curve.name, "start", COLOURS[place % len(COLOURS)])
        for place, curve in enumerate(curves)
    ]


def _text(x: float, y: float, words: str, anchor: str, colour: str = "#333") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">'
        f"{html.escape(words)}</text>"
    )
