"""All-reduces inside the switches (NVLS): fitted on published sweeps, as ours were without it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel, PositiveInt

from calibrate.evidence import Judged, Ledger, log_interval, rounded
from calibrate.network.structure import PIPELINING, STRUCTURE_NOISE, Array, most_likely, soft
from spec.collective import busbw_factor
from spec.collective_fit import CollectiveCurve, CollectivePoint, NvlsFit, SwitchStructure
from spec.files import read_table
from spec.fitted import Source
from spec.row import Positive

PUBLISHED = Path(__file__).parents[1] / "published" / "nvls.csv"
# What NCCL 2.27 chose by default, by group on H200 and B200 and by size on H200; others as H200.
LEAST_FROM = "github.com/stas00/ml-engineering@744d01e network/README.md"
LEAST_RANKS = {"H200": 5, "B200": 6, "H100": 5}
LEAST_BYTES = 2**21
SWEEP_SD = 0.05  # one node beside another: two published sweeps of H100 differ by 0 to 5 %
GROUP_SD = 0.05  # a doubling of the group; assumed, five published groups are within 2 %


class NvlsRow(BaseModel):
    """nvls.csv: one size of a published sweep; `bytes` is nccl-tests' (`spec.collective`)."""

    gpu: str
    gpus: PositiveInt
    bytes: PositiveInt
    time_us: Positive
    source: str
    locator: str


def fit_nvls(ledger: Ledger) -> tuple[NvlsFit, ...]:
    """A fit of each GPU's largest group; smaller groups, and sizes left out, judge them."""
    rows = read_table(PUBLISHED, NvlsRow)
    fits, groups, sizes = [], [], []
    for gpu in sorted({row.gpu for row in rows}):
        mine = [row for row in rows if row.gpu == gpu]
        most = max(row.gpus for row in mine)
        full = [row for row in mine if row.gpus == most]
        fit, sds = _fit(gpu, full)
        for name, sd in sds.items():
            value = getattr(fit.structure, name)
            unit = {"launch_us": "us", "pipelining": "share"}.get(name, "GB/s")
            source = f"nvls.csv: all-reduces of {most} {gpu}, {len(full)} sizes; {full[0].source}"
            interval = log_interval(value, sd)
            ledger.note(f"nvls.{gpu}.{name}", value, unit, interval, "published", source)
        chosen = f"nvls.csv: NCCL 2.27 by default; {LEAST_FROM}"
        for name, value, unit, known in (
            ("least_ranks", fit.least_ranks, "ranks", gpu != "H100"),
            ("least_bytes", fit.least_bytes, "bytes", gpu == "H200"),
        ):
            rule: Source = "published" if known else "assumed"
            detail = chosen if known else "as on H200"
            ledger.note(f"nvls.{gpu}.{name}", value, unit, (value / 2, value * 2), rule, detail)
        fits.append(fit)
        groups += [_judged(fit, row) for row in mine if row.gpus != most]
        for part in (0, 1):
            other, _ = _fit(gpu, full[part::2])
            sizes += [_judged(other, row) for row in full[1 - part :: 2]]
    name, baseline = "nvls.all_reduce", "bus bandwidth of the largest message of the largest group"
    ledger.score(name, "groups of 5 to 7 from groups of 8", groups, baseline)
    ledger.score(name, "every other size left out", sizes, baseline)
    ledger.note(
        "nvls.structure_sd",
        GROUP_SD,
        "log per doubling of ranks",
        (0.02, 0.1),
        "assumed",
        "groups of 5 to 7 are within 2 % of what groups of 8 say; smaller ones are not published",
    )
    return tuple(fits)


def _fit(gpu: str, rows: Sequence[NvlsRow]) -> tuple[NvlsFit, dict[str, float]]:
    ranks = rows[0].gpus
    sizes = np.array([float(row.bytes) for row in rows])
    times = np.array([row.time_us for row in rows])
    centre = {
        "launch_us": float(times.min()) / 2,
        "link_gbytes_per_s": float((sizes / times).max()) / 1e3,
        "pipelining": PIPELINING[0],
    }
    widths = np.array([1.0, 0.5, PIPELINING[1]])
    start = np.log(np.array(list(centre.values())))
    noise = np.hypot(SWEEP_SD, STRUCTURE_NOISE)

    def residuals(x: Array) -> Array:
        structure = SwitchStructure.model_construct(**dict(zip(centre, np.exp(x), strict=True)))
        model = np.array([structure.time_us(ranks, size) for size in sizes])
        return np.concatenate([soft(np.log(model / times) / noise), (x - start) / widths])

    values, sds = most_likely(list(centre), residuals, start, widths)
    points = tuple(
        CollectivePoint(bytes=row.bytes, time_us=row.time_us, sd=SWEEP_SD) for row in rows
    )
    fit = NvlsFit(
        gpu=gpu,
        least_ranks=LEAST_RANKS[gpu],
        least_bytes=LEAST_BYTES,
        curve=CollectiveCurve(ranks=ranks, points=points),
        structure=SwitchStructure(**{name: rounded(value) for name, value in values.items()}),
        structure_sd=GROUP_SD,
    )
    return fit, sds


def _judged(fit: NvlsFit, row: NvlsRow) -> Judged:
    """A row beside the fit, and beside the bus bandwidth of the fit's largest message."""
    time, sd = fit.time_us(row.gpus, row.bytes)
    largest = fit.curve.points[-1]
    busbw = largest.bytes * busbw_factor("all_reduce", fit.curve.ranks) / largest.time_us
    dumb = row.bytes * busbw_factor("all_reduce", row.gpus) / busbw
    return Judged(time, sd, row.time_us, dumb)
