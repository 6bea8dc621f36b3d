"""A self-contained HTML page: no network, light and dark, readable on a phone.

    page("Calibration of h200", [
        Section("Network", [
            Text("One paragraph. Plain text; it is escaped."),
            Table(("parameter", "value", "source"), [("efficiency", 0.81, Badge("published"))]),
            Figure(svg(figure, "network"), "Bus bandwidth against size", numbers=Table(...)),
        ]),
    ], subtitle="fitted on 4 GPUs")

- `page(title, sections, subtitle="", facts=())` returns the whole document as a string. `facts` are
  (label, value) pairs set large at the top: the two or three numbers that the page is about.
- `Section(title, blocks, group="")` is a heading with blocks under it; the page lists
  them, those of one group by its name alone.
- Blocks: `Text(text, kind="plain" | "note" | "warning")`, `Table(columns, rows, caption="")`,
  `Figure(svg, caption, numbers=None)`. A figure's `numbers` fold out under it with one click.
- A cell is a string, a number (set right, four significant digits), None (an empty cell), a
  `Badge`, a `Detail` or a tuple of these. `Badge("measured" | "published" | "assumed" |
  "simulated")` labels where a number comes from. `Detail(text)` shows a long text's beginning, and
  the whole with one click; a table with one takes the page's width, its text wrapped, and on a
  phone shows each row as lines.
- `svg(figure, name)` turns a matplotlib figure into inline SVG that follows the page's colours;
  draw on a figure from `new_figure()`, whose text and axes take the page's text colour.
  Bars come from `reports.bars`, which needs no matplotlib.

Everything but `Figure.svg` is escaped; give `Figure` only what `svg` or `bars` made.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from reports.brief import brief

if TYPE_CHECKING:
    from jinja2 import Template
    from matplotlib.figure import Figure as Drawing

Source = Literal["measured", "published", "assumed", "simulated"]

_SHARE = re.compile(r"[-+]?[\d.,]+ ?%|-")  # in percent; or the dash for none
# drawn in this colour, a line takes the page's text colour (light or dark)
INK = "#010203"
# one per series, told apart in both themes and by colour-blind readers (Okabe & Ito 2008)
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
# as small as a figure is drawn, so that its text of 9 points can be read; then it scrolls sideways
LEAST_PX_PER_INCH = 85


@dataclass(frozen=True)
class Badge:
    """Where a number comes from."""

    source: Source


@dataclass(frozen=True)
class Detail:
    """A text of any length, of which no more than `brief` of it is seen until it is opened."""

    text: str

    @property
    def brief(self) -> str:
        """What is seen at first."""
        return brief(self.text)


Cell = str | int | float | None | Badge | Detail | tuple[Any, ...]


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    kind: Literal["plain", "note", "warning"] = "plain"


@dataclass(frozen=True)
class Table:
    """Rows of cells under column names."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""


@dataclass(frozen=True)
class Figure:
    """A picture (what `svg` returned) and the numbers behind it."""

    svg: str
    caption: str
    numbers: Table | None = None


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: Sequence[Text | Table | Figure] = field(default_factory=tuple)
    group: str = ""

    @property
    def id(self) -> str:
        """Target of links to the section."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


def page(
    title: str,
    sections: Sequence[Section],
    subtitle: str = "",
    facts: Sequence[tuple[str, str]] = (),
) -> str:
    """The whole document; see the module's docstring."""
    links: dict[str, str] = {}
    for one in sections:
        links.setdefault(one.group or one.title, one.id)
    return _template().render(
        title=title, sections=sections, links=links, subtitle=subtitle, facts=facts
    )


@cache
def _template() -> "Template":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = _cell
    environment.filters["kind"] = lambda block: type(block).__name__
    environment.filters["numeric"] = _numeric
    environment.filters["columns"] = _columns
    environment.filters["detailed"] = lambda table: any(
        isinstance(cell, Detail) for row in table.rows for cell in row
    )
    environment.filters["parts"] = lambda cell: cell if isinstance(cell, tuple) else (cell,)
    return environment.get_template("page.html")


def _numeric(cell: Cell) -> bool:
    """Whether a cell is set like a number: one, a share, or the dash for none."""
    if isinstance(cell, str):
        return _SHARE.fullmatch(cell) is not None
    return isinstance(cell, (int, float))


def _columns(table: Table) -> list[tuple[str, str]]:
    """Each column's name, and its class, as most of its cells are: they are set alike."""
    shown = []
    for place, name in enumerate(table.columns):
        cells = [row[place] for row in table.rows if row[place] is not None]
        if 2 * sum(map(_numeric, cells)) > len(cells):
            shown.append((name, "number"))
        else:
            shown.append((name, "detail" if any(isinstance(c, Detail) for c in cells) else ""))
    return shown


def _cell(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        large = abs(value) >= 10_000
        return f"{value:,.0f}" if large else f"{value:.4g}"
    return str(value)


def new_figure(
    width: float = 7.0, height: float = 3.6, columns: int = 1
) -> tuple["Drawing", list[Any]]:
    """A matplotlib figure and its axes side by side, in the page's colours; sizes in inches."""
    from cycler import cycler
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Drawing

    style: dict[Any, Any] = {
        "text.color": INK,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "font.size": 9,
        "font.family": "sans-serif",
        "axes.grid": True,
        "grid.alpha": 0.2,
        "grid.color": INK,
        "axes.prop_cycle": cycler(color=COLOURS),
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with rc_context(style):
        figure = Drawing(figsize=(width, height), layout="constrained")
        axes = [figure.add_subplot(1, columns, index + 1) for index in range(columns)]
    return figure, axes


def svg(figure: "Drawing", name: str) -> str:
    """Inline SVG of a matplotlib figure. `name` is unique on the page: it keeps ids apart.

    Text stays text, and the output is the same for the same figure.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.legend import Legend
    from matplotlib.text import Text as Label

    for part in (figure, *figure.axes):
        for child in part.get_children():  # drawn outside of `new_figure`'s style
            if isinstance(child, Legend):
                child.set_frame_on(False)  # white, on dark pages too
            for label in child.findobj(Label) if isinstance(child, (Label, Legend)) else ():
                if isinstance(label, Label) and label.get_color() == "black":
                    label.set_color(INK)
    out = StringIO()
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": name}
    with rc_context(settings):
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        # `savefig` would draw twice, the first time for a layout that drawing finds anyway
        canvas: Any = FigureCanvasSVG(figure)  # whose methods have no types
        canvas.print_svg(out, metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    # ids are unique within one drawing only
    slug = re.sub(r"[^A-Za-z0-9]+", "-", name)
    text = re.sub(r'\bid="', f'id="{slug}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{slug}-", text)
    text = re.sub(r'<svg ([^>]*?)width="[^"]*"', r"<svg \1", text, count=1)
    least = f'style="min-width:{LEAST_PX_PER_INCH * figure.get_figwidth():.0f}px"'
    text = re.sub(r'<svg ([^>]*?)height="[^"]*"', rf"<svg {least} \1", text, count=1)
    return text.replace(INK, "currentColor")
