"""A small line plot with a logarithmic y axis, as SVG that needs nothing else."""

import html
import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 56, 150, 34, 44
COLOURS = (
    "#b3261e", "#e08600", "#1a6fb0", "#7a4fb5", "#2b8a3e", "#5c5f66", "#0b8a8f", "#c2407a",
    "#806000",
)  # fmt: skip
FLOOR = "#000"
LABEL_GAP = 13.0
TICKS = (1, 2, 5)

Line = Sequence[tuple[float, float]]


def plot(title: str, x_words: str, y_words: str, lines: Mapping[str, Line], dashed: str) -> str:
    """An `<svg>`; each line is named at its right end, and the one called `dashed` is dashed."""
    points = [point for line in lines.values() for point in line]
    assert points
    axes = _Axes([x for x, _ in points], [y for _, y in points])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'style="font:11px sans-serif;background:#fff">',
        f"<title>{html.escape(title)}</title>",
        _text(LEFT, 16, title),
        _text(LEFT - 46, 30, y_words, colour="#444"),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_words, anchor="middle", colour="#444"),
        *axes.grid(sorted({x for x, _ in points})),
    ]
    ends = {name: axes.y(line[-1][1]) for name, line in lines.items()}
    labels = spaced(ends)
    for place, (name, line) in enumerate(lines.items()):
        colour = FLOOR if name == dashed else COLOURS[place % len(COLOURS)]
        parts += axes.line(line, colour, dashed=name == dashed)
        parts.append(_text(WIDTH - RIGHT + 8, labels[name] + 4, name, colour=colour))
    return "\n".join([*parts, "</svg>", ""])


def spaced(ends: Mapping[str, float]) -> dict[str, float]:
    """Heights of labels, as near to their lines' ends as they go without touching."""
    placed: dict[str, float] = {}
    last = -math.inf
    for name in sorted(ends, key=lambda one: ends[one]):
        last = max(ends[name], last + LABEL_GAP)
        placed[name] = last
    over = max(0.0, last - (HEIGHT - BOTTOM)) if placed else 0.0
    return {name: y - over for name, y in placed.items()}


class _Axes:
    """From values to places."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self._low_x, self._high_x = math.log(min(xs)), math.log(max(xs))
        self._low_y, self._high_y = math.log(min(ys) * 0.8), math.log(max(ys) * 1.25)

    def x(self, value: float) -> float:
        width = WIDTH - LEFT - RIGHT - 20
        span = self._high_x - self._low_x
        share = (math.log(value) - self._low_x) / span if span else 0.5
        return LEFT + 10 + share * width

    def y(self, value: float) -> float:
        share = (math.log(value) - self._low_y) / (self._high_y - self._low_y)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def grid(self, xs: Sequence[float]) -> list[str]:
        parts = []
        for power in range(-4, 6):
            for tick in (digit * 10.0**power for digit in TICKS):
                if self._low_y <= math.log(tick) <= self._high_y:
                    y = self.y(tick)
                    parts.append(
                        f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" '
                        'stroke="#ddd"/>'
                    )
                    parts.append(_text(LEFT - 6, y + 4, f"{tick:g}", anchor="end", colour="#444"))
        bottom = HEIGHT - BOTTOM + 16
        return parts + [_text(self.x(x), bottom, f"{x:g}", anchor="middle") for x in xs]

    def line(self, line: Line, colour: str, *, dashed: bool) -> list[str]:
        places = [(self.x(x), self.y(y)) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        stroke = f'fill="none" stroke="{colour}" stroke-width="1.8"{dash}'
        dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>' for x, y in places]
        return [f'<polyline points="{path}" {stroke}/>', *dots]


def _text(x: float, y: float, words: str, *, anchor: str = "start", colour: str = "#222") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">'
        f"{html.escape(words)}</text>"
    )
