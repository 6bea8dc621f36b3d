"""The calibration report: fit against data for every model, held-out errors, every parameter."""

import re
from collections import defaultdict
from collections.abc import Sequence
from math import exp

import numpy as np

from calibrate.clock.clocks import draw
from calibrate.network.between_nodes import PUBLISHED, NetworkRow, path_of
from calibrate.network.nvls import PUBLISHED as NVLS
from calibrate.network.nvls import NvlsRow
from reports.log_axes import label_log_axes
from reports.page import Badge, Detail, Figure, Section, Table, Text, new_figure, page, svg
from spec.calibration import Calibration, HeldOut, Parameter
from spec.clock_fit import ClockFit
from spec.collective import busbw_factor
from spec.collective_fit import CollectiveFit, NvlsFit
from spec.files import read_table
from spec.interval import Z90, significant
from spec.kernel import Kernel
from spec.kernel_fit import KernelFit
from spec.network_fit import NetworkFit

# Rows of numbers under a figure at most: what is left out stands in the calibration file.
MOST_NUMBERS = 400


def render(calibration: Calibration) -> str:
    """The report as one HTML document."""
    c = calibration
    counts = {
        source: sum(one.source == source for one in c.parameters)
        for source in ("measured", "published", "assumed")
    }
    sections = [
        Section("Held-out errors", _held_out(c.held_out)),
        Section("Kernels", _kernels(c)),
        Section("Collectives inside a node", _collectives(c)),
        Section("Networks between nodes", _networks(c)),
        Section("Clock and power", _clock(c)),
        Section("Parameters", [_parameters(c.parameters)]),
        Section("Input files", [_inputs(c)]),
    ]
    return page(
        f"Calibration of {c.system}",
        sections,
        subtitle=f"{c.device}; measured up to {c.created}. Fitted on rows of role fit of the "
        "microbenchmarks; no training step was read.",
        facts=[(f"{source} parameters", str(count)) for source, count in counts.items()],
    )


def _held_out(rows: Sequence[HeldOut]) -> list[Text | Table | Figure]:
    """A table for each way of holding out and its baseline; those with one row together."""
    groups: dict[tuple[str, str], list[HeldOut]] = defaultdict(list)
    for one in rows:
        groups[re.sub(r" \([^)]*\)", "", one.split), one.baseline].append(one)
    alone = [mine[0] for mine in groups.values() if len(mine) == 1]
    errors = ("rows", "median", "geometric mean", "p90", "baseline's median", "inside 90 %")
    tables = [
        Table(
            ("model", *errors),
            [(one.model, *_errors(one)) for one in mine],
            f"{split[:1].upper()}{split[1:]}; baseline: {baseline}",
        )
        for (split, baseline), mine in groups.items()
        if len(mine) > 1
    ]
    if alone:
        cells = [(one.model, one.split, one.baseline, *_errors(one)) for one in alone]
        tables.append(Table(("model", "held out", "baseline", *errors), cells, "Others"))
    return [
        Text(
            "Errors on rows that the model had not seen, beside a baseline on the same rows. An "
            "error is |predicted / measured - 1|, or degrees. Intervals should contain 90 % of "
            "the rows."
        ),
        *tables,
    ]


def _errors(one: HeldOut) -> tuple[str | int, ...]:
    return (
        one.rows,
        one.shown(one.median_error),
        one.shown(one.geometric_mean_error),
        one.shown(one.p90_error),
        one.shown(one.baseline_median_error),
        f"{one.inside_90:.0%}",
    )


def _kernels(c: Calibration) -> list[Text | Table | Figure]:
    blocks: list[Text | Table | Figure] = [
        Text(
            "Left: measured times at the reference clock against the physics (launch time, compute "
            "and memory ceilings). Right: measured over model, physics alone and with the learned "
            "correction; the band is the 90 % interval beside measured shapes. A measured shape is "
            "looked up (noisy ones lean on the model): projections use the model only for others."
        )
    ]
    return blocks + [_kernel(fit) for fit in c.kernels]


def _kernel(fit: KernelFit) -> Figure:
    name = f"{fit.op} {fit.direction} {fit.dtype}"
    measured = np.array([point.raw_us for point in fit.points])
    physics = np.array([fit.physics_us(point.dims) for point in fit.points])
    model = np.array([fit.model_us(point.dims)[0] for point in fit.points])
    figure, (left, right) = new_figure(7.5, 2.9, columns=2)
    left.plot(physics, measured, "o", markersize=3)
    ends = [min(physics.min(), measured.min()), max(physics.max(), measured.max())]
    left.plot(ends, ends, "--", linewidth=1)
    left.set_xlabel("physics, us")
    left.set_ylabel("measured, us")
    right.plot(measured, measured / physics, "o", markersize=3, label="physics")
    right.plot(measured, measured / model, "x", markersize=4, label="with correction")
    right.axhspan(exp(-Z90 * fit.noise), exp(Z90 * fit.noise), alpha=0.15)
    right.set_xlabel("measured, us")
    right.set_ylabel("measured / model")
    right.legend()
    label_log_axes(left, "xy")
    label_log_axes(right, "x")
    ceiling = f", {_rate(fit.tflops)} TFLOP/s" if fit.tflops else ""
    caption = (
        f"{name}: {len(fit.points)} shapes; launch {fit.launch_us:.3g} us{ceiling}, "
        f"{_rate(fit.gbytes_per_s)} GB/s"
    )
    rows = [
        (
            Kernel(fit.op, fit.direction, point.dims, fit.dtype).shape,
            point.raw_us,
            float(by_physics),
            float(by_model),
            point.time_us,
            point.sd,
        )
        for point, by_physics, by_model in zip(fit.points, physics, model, strict=True)
    ]
    columns = ("shape", "measured us", "physics us", "model us", "looked up us", "sd")
    return Figure(svg(figure, name), caption, _numbers(columns, rows))


def _rate(value: float) -> str:
    """With three significant digits, a CPU's too; more only before the point."""
    return f"{value:,.0f}" if value >= 100 else significant(value, 3)


def _numbers(columns: Sequence[str], rows: Sequence[tuple[str | float, ...]]) -> Table:
    if len(rows) <= MOST_NUMBERS:
        return Table(columns, rows)
    caption = f"every {-(-len(rows) // MOST_NUMBERS)}th of {len(rows)}; all are in the calibration"
    return Table(columns, rows[:: -(-len(rows) // MOST_NUMBERS)], caption)


def _collectives(c: Calibration) -> list[Text | Table | Figure]:
    if not c.collectives:
        return [Text("None was measured.", "warning")]
    blocks: list[Text | Table | Figure] = [
        Text(
            "Bus bandwidth as nccl-tests defines it. Points are measured, solid lines interpolate "
            "them; dashed lines are groups that were not measured, carried over by structure."
        )
    ]
    blocks += map(_collective, c.collectives)
    published = read_table(NVLS, NvlsRow)
    return blocks + [_nvls(fit, [r for r in published if r.gpu == fit.gpu]) for fit in c.nvls]


def _collective(fit: CollectiveFit) -> Figure:
    figure, (axes,) = new_figure(6.0, 3.0)
    rows = []
    largest = fit.curves[-1].ranks
    others = [2 * largest] if fit.collective != "send_recv" else []
    sizes = np.array([float(point.bytes) for point in fit.curves[-1].points])
    grid = np.geomspace(sizes[0], sizes[-1], 60)
    for ranks in [curve.ranks for curve in fit.curves] + others:
        rate = busbw_factor(fit.collective, ranks) / 1e3
        line = [size * rate / fit.time_us(ranks, float(size))[0] for size in grid]
        dashed = ranks in others
        (drawn,) = axes.plot(grid, line, "--" if dashed else "-", label=f"{ranks} ranks")
        for curve in fit.curves:
            if curve.ranks != ranks:
                continue
            points = [(point.bytes, point.bytes * rate / point.time_us) for point in curve.points]
            axes.plot(*zip(*points, strict=True), "o", markersize=3, color=drawn.get_color())
            rows += [
                (ranks, point.bytes, point.time_us, busbw, point.sd)
                for point, (_, busbw) in zip(curve.points, points, strict=True)
            ]
    axes.set_xlabel("bytes")
    axes.set_ylabel("bus bandwidth, GB/s")
    axes.legend()
    label_log_axes(axes, "xy")
    columns = ("ranks", "bytes", "measured us", "bus bandwidth GB/s", "sd")
    return Figure(svg(figure, fit.collective), fit.collective, _numbers(columns, rows))


def _nvls(fit: NvlsFit, rows: Sequence[NvlsRow]) -> Figure:
    figure, (axes,) = new_figure(6.0, 3.0)
    sizes = np.geomspace(fit.curve.points[0].bytes, fit.curve.points[-1].bytes, 60)
    for ranks in sorted({row.gpus for row in rows}):
        rate = busbw_factor("all_reduce", ranks) / 1e3
        line = [size * rate / fit.time_us(ranks, float(size))[0] for size in sizes]
        style = "-" if ranks == fit.curve.ranks else "--"
        (drawn,) = axes.plot(sizes, line, style, label=f"{ranks} ranks")
        points = [(row.bytes, row.bytes * rate / row.time_us) for row in rows if row.gpus == ranks]
        axes.plot(*zip(*points, strict=True), "o", markersize=3, color=drawn.get_color())
    axes.set_xlabel("bytes")
    axes.set_ylabel("bus bandwidth, GB/s")
    axes.legend()
    label_log_axes(axes, "xy")
    caption = (
        f"all_reduce through the switches (NVLS) on {fit.gpu}, published, for --nvls: fitted on "
        f"{fit.curve.ranks} ranks"
    )
    if any(row.gpus != fit.curve.ranks for row in rows):
        caption += "; dashed lines by structure, beside points that they had not seen"
    numbers = [(row.gpus, row.bytes, row.time_us, row.source, row.locator) for row in rows]
    columns = ("ranks", "bytes", "time us", "source", "where")
    return Figure(svg(figure, f"nvls {fit.gpu}"), caption, _numbers(columns, numbers))


def _networks(c: Calibration) -> list[Text | Table | Figure]:
    blocks: list[Text | Table | Figure] = [
        Text(
            "Between nodes. Points are the published sweeps that the model was fitted on, lines "
            "the model on the same systems. Where this system measured collectives across nodes "
            "itself, those rows replace the published ones."
        )
    ]
    published = read_table(PUBLISHED, NetworkRow)
    for fit in c.networks:
        mine = [row for row in published if row.protocol == fit.protocol]
        if fit.source == "published" and mine:
            blocks.append(_network(fit, mine))
        else:
            blocks.append(Text(f"{fit.protocol}: {fit.source}. {fit.detail}", "note"))
    return blocks


def _network(fit: NetworkFit, rows: Sequence[NetworkRow]) -> Figure:
    kinds = sorted({row.collective for row in rows})
    figure, panels = new_figure(2.8 * len(kinds) + 1.5, 3.0, columns=len(kinds))
    for axes, kind in zip(panels, kinds, strict=True):
        for gpus in sorted({row.gpus for row in rows if row.collective == kind}):
            same = [row for row in rows if row.collective == kind and row.gpus == gpus]
            rate = busbw_factor(kind, gpus) / 1e3
            path = path_of(gpus, same[0].nodes, same[0].port_gbits_per_s / 8)
            cap = same[0].scale_up_busbw_gbytes_per_s
            sizes = np.geomspace(min(row.bytes for row in same), max(row.bytes for row in same), 50)
            line = [one * rate / fit.time_us(kind, path, float(one), cap) for one in sizes]
            (drawn,) = axes.plot(sizes, line, label=f"{gpus} GPUs")
            axes.plot(
                [row.bytes for row in same],
                [row.bytes * rate / row.time_us for row in same],
                "o",
                markersize=2.5,
                color=drawn.get_color(),
            )
        axes.set_title(kind, fontsize=9)
        axes.set_xlabel("bytes")
        axes.legend()
        label_log_axes(axes, "xy")
    panels[0].set_ylabel("bus bandwidth, GB/s")
    numbers = [
        (row.system, row.collective, row.gpus, row.bytes, row.time_us, row.source, row.locator)
        for row in rows
    ]
    columns = ("system", "collective", "GPUs", "bytes", "time us", "source", "where")
    caption = f"{fit.protocol}, fitted on {len(rows)} published rows"
    return Figure(svg(figure, f"network {fit.protocol}"), caption, _numbers(columns, numbers))


def _clock(c: Calibration) -> list[Text | Table | Figure]:
    clock = c.clock
    if clock.power_limit_w is None:
        return [Text("No power limit could be read: the clock is taken as constant.", "note")]
    bent = ", bent as their duration is between both clocks" if clock.product_bend else ""
    text = Text(
        f"Power at the clock f is {clock.idle_w:.0f} W + active power, which for kernels bound by "
        f"arithmetic goes as (f / {clock.reference_mhz:.0f} MHz) ^ {clock.power_exponent:.2f}"
        f"{bent}; the clock is the highest whose mean power stays under {clock.cap_w:.0f} W."
    )
    drawing = sorted(c.kernels, key=lambda fit: -fit.active_power_w)
    rows = [
        (
            f"{fit.op} {fit.direction}",
            fit.active_power_w,
            clock.clock_mhz(*draw(fit, clock, fit.active_power_w)),
            _capped_power(clock, *draw(fit, clock, fit.active_power_w)),
        )
        for fit in drawing
    ]
    columns = ("kernel", "active power W at reference clock", "sustained MHz", "sustained W")
    return [text, Table(columns, rows)]


def _capped_power(clock: ClockFit, compute_w: float, memory_w: float) -> float:
    return clock.power_w(compute_w, clock.clock_mhz(compute_w, memory_w), memory_w)


def _parameters(parameters: Sequence[Parameter]) -> Table:
    order: dict[str, int] = {"assumed": 0, "published": 1, "measured": 2}
    return Table(
        ("parameter", "value", "90 % interval", "unit", "source", "from"),
        [
            (
                one.name,
                one.value,
                f"{one.low:.4g} to {one.high:.4g}",
                one.unit,
                Badge(one.source),
                Detail(one.detail),
            )
            for one in sorted(parameters, key=lambda one: order[one.source])
        ],
        "assumed first, then published, then measured",
    )


def _inputs(c: Calibration) -> Table:
    rows = [(one.path, one.rows, "lent" if one.lent else "", one.sha256) for one in c.inputs]
    columns = ("file", "rows of role fit", "", "sha256")
    return Table(columns, rows, "lent: by another system of the same GPU")
