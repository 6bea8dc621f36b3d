"""Horizontal bars as SVG, in the page's colours.

Written out here, as to import matplotlib and to draw with it takes longer than the projection that
such bars show.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from reports.page import COLOURS

WIDTH, RIGHT = 720.0, 700.0  # user units: of the drawing, and where its axis ends
PITCH, MOST = 24.0, 24  # height of a row; with more rows than that all are thinner
LETTERS, LETTER = 40, 8.0  # of a label at most, and the width of one


@dataclass(frozen=True)
class Bar:
    """A row: a bar from `start` to `end`, and where there is a `mark`, a point."""

    label: str
    start: float
    end: float
    colour: str = COLOURS[0]
    mark: float | None = None


def bars(rows: Sequence[Bar], unit: str, line: float | None = None, dashed: bool = False) -> str:
    """The drawing, its first row on top; `line` crosses all rows, and `unit` names the axis."""
    points = [x for row in rows for x in (row.start, row.end, row.mark) if x is not None]
    low, high = _limits([*points, line] if line is not None else points)
    left = 12 + LETTER * max((min(len(row.label), LETTERS) for row in rows), default=0)
    pitch = PITCH * min(MOST / max(len(rows), 1), 1)
    bottom = 4 + pitch * len(rows)

    def x(value: float) -> float:
        return left + (RIGHT - left) * (value - low) / (high - low)

    drawn = []
    for tick in ticks(low, high):
        drawn.append(_vertical(x(tick), bottom + 4, 'stroke="currentColor" stroke-opacity=".2"'))
        drawn.append(_text(x(tick), bottom + 18, f"{tick:.6g}", "middle"))
    for index, row in enumerate(rows):
        middle = 4 + pitch * (index + 0.5)
        start, end = sorted((x(row.start), x(row.end)))
        drawn.append(
            f'<rect x="{start:.1f}" y="{middle - 0.35 * pitch:.1f}" width="{end - start:.1f}" '
            f'height="{0.7 * pitch:.1f}" fill="{row.colour}"/>'
        )
        if row.mark is not None:
            drawn.append(
                f'<circle cx="{x(row.mark):.1f}" cy="{middle:.1f}" r="4" fill="{COLOURS[1]}"/>'
            )
        if index % ceil(len(rows) / MOST) == 0:
            words = row.label if len(row.label) <= LETTERS else row.label[: LETTERS - 1] + "…"
            drawn.append(_text(left - 8, middle + 4, words, "end"))
    axis = x(min(max(low, 0.0), high))  # at nought where it can be seen
    drawn.append(_vertical(axis, bottom, 'stroke="currentColor"'))
    drawn.append(f'<path d="M{left:.1f} {bottom:.1f}H{RIGHT:.1f}" stroke="currentColor"/>')
    if line is not None:
        dashes = ' stroke-dasharray="6 4"' if dashed else ""
        drawn.append(_vertical(x(line), bottom, f'stroke="{COLOURS[1]}" stroke-width="2"{dashes}'))
    drawn.append(_text((left + RIGHT) / 2, bottom + 38, unit, "middle"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {bottom + 46:.0f}" '
        f'font-family="sans-serif" font-size="13" fill="currentColor" role="img">{"".join(drawn)}'
        "</svg>"
    )


def ticks(low: float, high: float, steps: int = 10) -> list[float]:
    """Round numbers from `low` to `high`, with at most so many steps between them."""
    least = (high - low) / steps
    power = 10.0 ** floor(log10(least))
    step = next(power * by for by in (1, 2, 5, 10) if power * by >= 0.999 * least)
    return [step * index for index in range(ceil(low / step), floor(high / step) + 1)]


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Ends of the axis: some room beside the values, but none beyond a nought."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    room = 0.04 * (high - low) or 0.04 * abs(low) or 1.0
    return low - room if low else 0.0, high + room if high or not low else 0.0


def _vertical(x: float, bottom: float, style: str) -> str:
    return f'<path d="M{x:.1f} 4V{bottom:.1f}" {style}/>'


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
