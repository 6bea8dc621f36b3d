"""A published sweep of collectives inside a node: larger groups from its smaller ones."""

from collections import defaultdict
from collections.abc import Sequence
from math import exp, log
from pathlib import Path

import numpy as np
from pydantic import BaseModel, PositiveInt

from calibrate.evidence import Ledger
from calibrate.network.inside_node import LEAST_SD, Sweep, largest_from_smaller
from spec.collective import COLLECTIVES
from spec.collective_fit import CollectiveCurve, CollectivePoint
from spec.errors import UserError
from spec.files import read_table
from spec.row import Positive

NEEDED = ("collective", "gpus", "bytes", "time_us")


class PublishedRow(BaseModel):
    """A timed collective; `bytes` is nccl-tests' (`spec.collective`). Other columns are ignored."""

    collective: str = ""
    gpus: PositiveInt | None = None
    bytes: PositiveInt | None = None
    time_us: Positive | None = None
    gpu: str = ""
    nodes: PositiveInt = 1


def judge_sweep(path: Path, fitted: Sequence[int]) -> Ledger:
    """Errors on every group larger than those fitted on, of each GPU and collective of a file."""
    times: dict[tuple[str, str], dict[int, dict[int, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    rows = read_table(path, PublishedRow, others_ignored=True)
    for name in NEEDED:
        if not any(getattr(row, name) for row in rows):
            raise UserError(
                f"{path}: no row has anything in a column {name}; needed are {', '.join(NEEDED)}"
            )
    for row in rows:
        if row.gpus is None or row.bytes is None or row.time_us is None:
            continue  # a line of a table that prints less
        if row.nodes == 1 and row.collective in COLLECTIVES:
            times[row.gpu, row.collective][row.gpus][row.bytes].append(row.time_us)
    ledger = Ledger()
    for (gpu, name), groups in sorted(times.items()):
        if not set(fitted) <= set(groups):
            continue
        curves = {ranks: _curve(ranks, sizes) for ranks, sizes in groups.items()}
        smaller = tuple(curves[ranks] for ranks in sorted(fitted))
        for ranks in sorted(groups):
            if ranks > max(fitted):
                ledger.score(
                    f"collective.{name}" + (f", {gpu}" if gpu else ""),
                    f"groups of {ranks} from groups of {', '.join(map(str, sorted(fitted)))}",
                    largest_from_smaller(Sweep(name, (*smaller, curves[ranks]), True, 0)),
                    "bus bandwidth of the same size on the next smaller group",
                )
    if not ledger.held_out:
        listed = ", ".join(map(str, sorted(fitted)))
        raise UserError(
            f"{path}: no GPU has a collective inside a node timed on groups of {listed} and on a "
            "larger one; name others with --fit-groups"
        )
    return ledger


def _curve(ranks: int, sizes: dict[int, list[float]]) -> CollectiveCurve:
    """Medians by size, us; a sweep prints no spread."""
    points = (
        CollectivePoint(
            bytes=size, time_us=exp(float(np.median([log(one) for one in times]))), sd=LEAST_SD
        )
        for size, times in sorted(sizes.items())
    )
    return CollectiveCurve(ranks=ranks, points=tuple(points))
