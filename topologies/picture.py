"""A small SVG of a topology with the loads of its tiers: a sketch with a few of each level's parts.

Text and outlines take the colour of the text around them (`currentColor`), so the picture is
readable on light and on dark pages; a tier's links are coloured and thickened by its utilisation,
which is also written beside them.
"""

from collections.abc import Sequence
from html import escape
from typing import Protocol

from spec.hardware import Fabric, Node
from topologies.layout import Tier, gbytes, node_count, ports, tiers, torus_dimensions

WIDTH, LEFT, ROW, BOX = 720, 232, 84, 26  # user units; labels stand left of LEFT
IDLE, BUSY, FULL = "#0072b2", "#e69f00", "#d55e00"  # told apart by colour-blind readers too


class Load(Protocol):
    """What is drawn of a tier: see `topologies.tiers.TierLoad`."""

    @property
    def tier(self) -> str: ...
    @property
    def utilisation(self) -> float: ...
    @property
    def saturated(self) -> bool: ...


Point = tuple[float, float]


class _Canvas:
    """Collects SVG elements."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self.loads = {load.tier: load for load in loads}
        self.links: list[str] = []
        self.shapes: list[str] = []

    def link(self, tier: str, a: Point, b: Point, bow: float = 0.0) -> None:
        """A link of `tier`; `bow` lifts its middle."""
        colour, width = self.style(tier)
        middle = f"{(a[0] + b[0]) / 2:.0f} {(a[1] + b[1]) / 2 - 2 * bow:.0f}"
        self.links.append(
            f'<path d="M{a[0]:.0f} {a[1]:.0f}Q{middle} {b[0]:.0f} {b[1]:.0f}" fill="none" '
            f'stroke="{colour}" stroke-width="{width:.1f}" stroke-opacity=".75"/>'
        )

    def style(self, tier: str) -> tuple[str, float]:
        """Colour and width of the links of a tier."""
        load = self.loads.get(tier)
        if load is None:
            return "currentColor", 0.6
        colour = FULL if load.saturated else BUSY if load.utilisation >= 0.5 else IDLE
        return colour, 1 + 3.5 * min(load.utilisation, 1.0)

    def box(self, x: float, y: float, width: float, label: str = "", height: float = BOX) -> None:
        """A rectangle centred on (x, y)."""
        self.shapes.append(
            f'<rect x="{x - width / 2:.0f}" y="{y - height / 2:.0f}" width="{width:.0f}" '
            f'height="{height:.0f}" rx="4" fill="#8a939d" fill-opacity=".28" '
            'stroke="currentColor" stroke-opacity=".6"/>'
        )
        if label:
            self.text(x, y + 4, label, "middle")

    def text(
        self, x: float, y: float, words: str, anchor: str = "start", soft: bool = False
    ) -> None:
        """Words in the page's colour."""
        self.shapes.append(
            f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"'
            + (' fill-opacity=".72"' if soft else "")
            + f">{escape(words)}</text>"
        )

    def label(self, y: float, tier: str, detail: str) -> None:
        """Name, use and rate of a tier, left of its links."""
        load = self.loads.get(tier)
        use = "not used" if load is None or not load.utilisation else f"{load.utilisation:.1%}"
        if load is not None and load.saturated:
            use += " saturated"
        self.text(0, y - 8, f"{tier}: {use}")
        self.text(0, y + 8, detail, soft=True)
        colour, _ = self.style(tier)
        share = min(load.utilisation, 1.0) if load is not None else 0.0
        self.shapes.append(
            f'<rect x="0" y="{y + 14:.0f}" width="200" height="5" rx="2" fill="currentColor" '
            f'fill-opacity=".15"/><rect x="0" y="{y + 14:.0f}" width="{200 * share:.0f}" '
            f'height="5" rx="2" fill="{colour}"/>'
        )

    def svg(self, height: float, title: str) -> str:
        """The document."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
            'font-family="sans-serif" font-size="13" fill="currentColor" role="img">'
            f"<title>{escape(title)}</title>{''.join(self.links)}{''.join(self.shapes)}</svg>"
        )


def picture(node: Node, fabric: Fabric, gpus: int, loads: Sequence[Load] = ()) -> str:
    """The SVG of `gpus` GPUs in nodes of `node` on `fabric`. UserError if they do not fit it."""
    canvas = _Canvas(loads)
    nodes = node_count(node, gpus)
    title = f"{gpus:,} GPUs: {nodes:,} nodes of {node.name} on {fabric.name}"
    if nodes == 1:
        y = float(_nodes(canvas, node, gpus, 1, ROW / 2, 1)[0][1])
        return canvas.svg(y + ROW / 2 + 10, title)
    found = tiers(node, fabric, nodes)
    if fabric.kind == "torus":
        return canvas.svg(_torus(canvas, node, fabric, nodes, found), title)
    rows = len(found) + 1 + (found[-1].name in ("global", "optical"))
    height = ROW * rows
    bottom = height - ROW / 2
    shown = min(nodes, 8)
    below = _nodes(canvas, node, gpus, nodes, bottom, shown)
    detail = f"{ports(node, fabric)} x {gbytes(fabric.nic_gbits_per_s):g} GB/s a node"
    canvas.label(bottom - ROW / 2, "nic", detail)
    _switches(canvas, fabric, found, below, bottom)
    return canvas.svg(height, title)


def _spread(count: int) -> list[float]:
    """Middles of `count` columns of the drawing."""
    step = (WIDTH - LEFT) / count
    return [LEFT + step * (index + 0.5) for index in range(count)]


def _nodes(canvas: _Canvas, node: Node, gpus: int, nodes: int, y: float, shown: int) -> list[Point]:
    """The row of nodes with their GPUs; their upper middles."""
    places = _spread(shown)
    wide = min((WIDTH - LEFT) / shown - 8, 220)
    chips = min(node.gpus, gpus, 8 if shown == 1 else 4)
    colour, width = canvas.style("scale-up")
    for x in places:
        canvas.box(x, y, wide, height=34)
        step = wide / (chips + 1)
        canvas.shapes.append(
            f'<path d="M{x - wide / 2 + 6:.0f} {y + 9:.0f}h{wide - 12:.0f}" stroke="{colour}" '
            f'stroke-width="{width:.1f}"/>'
        )
        for index in range(chips):
            left = x - wide / 2 + step * (index + 1) - 4
            canvas.shapes.append(
                f'<rect x="{left:.0f}" y="{y - 10:.0f}" width="8" height="8" fill="currentColor" '
                'fill-opacity=".7"/>'
            )
            canvas.shapes.append(
                f'<path d="M{left + 4:.0f} {y - 2:.0f}v11" stroke="{colour}" stroke-width="1"/>'
            )
    canvas.label(y, "scale-up", f"{node.scale_up_gbytes_per_s:g} GB/s a GPU")
    some = f"{nodes:,} nodes of {node.gpus} GPUs" if nodes > 1 else f"{gpus} GPUs in one node"
    canvas.text(LEFT + (WIDTH - LEFT) / 2, y + 33, some, "middle", soft=True)
    return [(x, y - 17) for x in places]


def _switches(
    canvas: _Canvas, fabric: Fabric, found: Sequence[Tier], below: list[Point], bottom: float
) -> None:
    """Rows of switches above the nodes, and the links of every tier."""
    rails = fabric.kind == "rail-optimised"
    outer = found[-1].name if found[-1].name in ("global", "optical") else ""
    inner = [tier for tier in found if tier.name != outer]
    names = ["leaf", "spine", "core"]
    split = 2 if len(found) > 2 else 1  # pods or groups that are drawn apart
    for level, tier in enumerate(inner):
        y = bottom - ROW * (level + 1)
        top = level == len(inner) - 1 and not outer
        name = names[level] if level < len(names) else f"level {level + 1}"
        if fabric.kind == "single-switch":
            name = "switch"
        count = 1 if top and level == 0 else 2 if top else 4
        if rails:
            count, name = 3, f"{name}, rail"
        places = _spread(count)
        wide = min((WIDTH - LEFT) / count - 30, 150)
        for index, x in enumerate(places):
            rail = f" {(1, 2, ports_label(fabric))[index]}" if rails else ""
            canvas.box(x, y, wide, name + rail)
            for position, point in enumerate(below):
                if _joined(position, len(below), index, count, level, split, rails, top):
                    canvas.link(tier.name, point, (x, y + BOX / 2))
        if level:
            canvas.label(y + ROW / 2, tier.name, _rate(tier))
        below = [(x, y - BOX / 2) for x in places]
    if not outer:
        return
    y = bottom - ROW * (len(inner) + 1)
    tier = found[-1]
    if outer == "optical":
        canvas.box(LEFT + (WIDTH - LEFT) / 2, y, WIDTH - LEFT - 40, "optical circuit switches")
        for point in below:
            canvas.link(outer, point, (point[0], y + BOX / 2))
    else:
        half = len(below) // 2
        for index in range(half):
            canvas.link(outer, below[index], below[index + half], bow=ROW * 0.45)
        canvas.text(
            LEFT + (WIDTH - LEFT) / 2, y - 4, f"{tier.blocks} groups, all linked", "middle", True
        )
    canvas.label(y + ROW / 2, outer, _rate(tier))


def ports_label(fabric: Fabric) -> str:
    """Name of the last rail: all others are like it."""
    return str(fabric.ports_per_node) if fabric.ports_per_node else "n"


def _joined(
    position: int,
    below: int,
    index: int,
    count: int,
    level: int,
    split: int,
    rails: bool,
    top: bool,
) -> bool:
    """Whether the sketch links part `position` of the row below with switch `index`."""
    if rails:
        return level == 0 or position == index
    if level == 0:
        return position * count // below == index
    return top or position * split // below == index * split // count


def _rate(tier: Tier) -> str:
    return f"{tier.gbytes_per_s:.4g} GB/s a node; {tier.blocks:,} x {tier.nodes:,} nodes"


def _torus(canvas: _Canvas, node: Node, fabric: Fabric, nodes: int, found: Sequence[Tier]) -> float:
    """A corner of the torus, its wrapping links as arcs; the height of the drawing."""
    sizes = torus_dimensions(fabric, nodes)
    columns, rows = min(sizes[0], 4), min(sizes[1], 3) if len(sizes) > 1 else 1
    layers = 2 if len(sizes) > 2 else 1
    height = ROW * (rows + 0.8)
    step = (WIDTH - LEFT) / (columns + 0.6)
    places = {
        (i, j, k): (LEFT + step * (i + 0.5) + 34 * k, ROW * (j + 0.75) - 30 * k)
        for i in range(columns)
        for j in range(rows)
        for k in range(layers)
    }
    for (i, j, k), point in places.items():
        for other in ((i + 1, j, k), (i, j + 1, k), (i, j, k + 1)):
            if other in places:
                canvas.link("torus", point, places[other])
        if i == 0 and columns > 2:
            canvas.link("torus", point, places[columns - 1, j, k], bow=16)
        canvas.box(*point, 34, height=18)
    shape = " x ".join(map(str, sizes))
    canvas.text(LEFT + (WIDTH - LEFT) / 2, height - 6, f"{shape} nodes", "middle", soft=True)
    canvas.label(ROW * 0.5, "torus", f"{found[-1].gbytes_per_s:g} GB/s a node, all links")
    canvas.label(
        ROW * 1.25, "nic", f"{ports(node, fabric)} x {gbytes(fabric.nic_gbits_per_s):g} GB/s"
    )
    canvas.label(ROW * 2.0, "scale-up", f"{node.scale_up_gbytes_per_s:g} GB/s a GPU")
    return max(height, ROW * 2.5)
