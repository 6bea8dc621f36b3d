"""A GPU's temperature from its power: thermal resistances and time constants, out of telemetry.

Judged on each run by a fit on others, a part of runs left out: given the first minute, which
tells where the run starts from, the model follows the power that was measured and must say how warm
each device is wherever that power has been steady for some seconds. `heat-100` of the heat suite is
judged with its power held constant, too. Of runs with training steps only temperature and power are
read, never how long a step took.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from calibrate.evidence import (
    TELEMETRY_FILE,
    Evidence,
    Ledger,
    log_interval,
    relative,
    rounded,
)
from calibrate.telemetry import read_columns
from spec.calibration import HeldOut
from spec.interval import Z90
from spec.results import ResultSet
from spec.thermal import DeviceHeat, Resistance, ThermalFit, exponential_mean

Array = NDArray[np.float64]

BIN_S = 1.0  # the sensor tells whole degrees, about once a second
LEAST_S = 60.0
LEAST_RISE_C = 8.0  # between the coolest and the hottest second of a trace
KNOWN_S = 60.0  # of a run that is given
STEADY_BINS, STEADY_SPREAD = 7, 0.05  # power is steady: its sd over so many bins, over its mean
END_BINS = 3  # of those, judged
STEADY_CASE, STEADY_END_S = "heat-100", 30.0
TIMES_S = (1.0, 30.0)  # to start from
POLES = len(TIMES_S)
FOLDS = 12  # parts that runs are left out in: a fit for each run takes minutes with a hundred runs
INDEPENDENT_S = 5.0  # errors of one second resemble those of the next


@dataclass(frozen=True)
class Trace:
    """One device through one run, in bins of BIN_S."""

    run: str
    uuid_hash: str
    time_s: Array
    power_w: Array
    temperature_c: Array
    steady: tuple[float, float] | None = None  # when STEADY_CASE began and ended


def loaded_span(one: Trace, begin: float, end: float) -> tuple[float, float]:
    """When the load of a case began and ended: workers take a while to start it."""
    inside = (one.time_s >= begin) & (one.time_s <= end)
    power = np.where(inside, one.power_w, 0.0)
    busy = np.flatnonzero(power > 0.5 * float(np.median(power[inside])))
    return float(one.time_s[busy[0]]), float(one.time_s[busy[-1]])


@dataclass
class Errors:
    """Of temperatures, in degrees; the model's and those of what takes no model."""

    own: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)
    run: list[str] = field(default_factory=list)

    def add(
        self,
        fitted: ThermalFit,
        one: Trace,
        rise: Array,
        known: NDArray[np.bool_],
        window: NDArray[np.bool_],
    ) -> None:
        """What a rise above rest says of a window, both as the seconds known show them."""
        real = float(one.temperature_c[window].mean())
        rest, scale = start(fitted, rise[known], one.temperature_c[known])
        self.own.append(abs(rest + scale * float(rise[window].mean()) - real))
        self.held.append(abs(float(one.temperature_c[known][-5:].mean()) - real))
        self.mean.append(abs(float(one.temperature_c[known].mean()) - real))
        self.run.append(one.run)

    def rms_c(self, without: str | None = None) -> float:
        """Root mean square, of all runs or of all but one."""
        kept = [e for e, run in zip(self.own, self.run, strict=True) if run != without]
        return float(np.sqrt(np.mean(np.square(kept)))) if kept else float("nan")

    def inside(self, usual_c: float) -> float:
        """Share inside the 90 % interval that the errors of the other runs give.

        `usual_c` is their root mean square where there is no other run.
        """
        sds = [self.rms_c(run) for run in self.run]
        sds = [sd if np.isfinite(sd) else usual_c for sd in sds]
        return float(np.mean([e <= Z90 * sd for e, sd in zip(self.own, sds, strict=True)]))

    def score(self, ledger: Ledger, split: str, usual_c: float) -> None:
        """Enter them beside the better baseline; nothing where there are none."""
        if not self.own:
            return
        held, mean = float(np.median(self.held)), float(np.median(self.mean))
        ledger.held_out.append(
            HeldOut(
                model="temperature",
                unit="C",
                split=split,
                rows=len(self.own),
                median_error=rounded(float(np.median(self.own))),
                p90_error=rounded(float(np.quantile(self.own, 0.9))),
                baseline="temperature after 60 s held" if held <= mean else "mean of the 60 s",
                baseline_median_error=rounded(min(held, mean)),
                inside_90=rounded(self.inside(usual_c)),
            )
        )


def start(fitted: ThermalFit, rise: Array, temperature_c: Array) -> tuple[float, float]:
    """Rest, C, and how much more than the model says a device warms, from its first seconds.

    Least squares; the factor leans on 1 as devices differ, seconds counting as `INDEPENDENT_S`.
    """
    weight = BIN_S / INDEPENDENT_S / max(fitted.error_c, 0.1) ** 2
    around, mean = rise - rise.mean(), float(temperature_c.mean())
    known = weight * float(around @ around)
    prior = 1 / max(fitted.resistance_sd, 0.02) ** 2
    scale = (weight * float(around @ temperature_c) + prior) / (known + prior)
    return mean - scale * float(rise.mean()), scale


def traces(found: ResultSet) -> list[Trace]:
    """The devices of a run whose temperature moved."""
    path = found.path / TELEMETRY_FILE
    if not path.exists():
        return []
    names = ("time_s", "device", "power_w", "temperature_c", "case_id")
    columns = read_columns(path, names)
    if columns is None:
        return []
    time, device, power, temperature = (columns[name].astype(np.float64) for name in names[:4])
    cases = columns["case_id"]
    good = np.isfinite(time) & np.isfinite(power) & np.isfinite(temperature)
    hashes = {one.index: one.uuid_hash for host in found.manifest.hosts for one in host.devices}
    listed = []
    for index, name in hashes.items():
        mine = good & (device == index)
        order = np.argsort(time[mine], kind="stable")
        when = time[mine][order]
        if len(when) < 2 or when[-1] - when[0] < LEAST_S:
            continue
        warmth = temperature[mine][order]
        if np.ptp(warmth) < LEAST_RISE_C:
            continue
        edges = np.arange(when[0], when[-1], BIN_S)
        spans = case_spans(when, cases[mine][order])
        listed.append(
            Trace(
                run=found.manifest.run,
                uuid_hash=name,
                time_s=edges[1:],
                power_w=means(when, power[mine][order], edges),
                temperature_c=means(when, warmth, edges),
                steady=next(((b, e) for case, b, e in spans if case == STEADY_CASE), None),
            )
        )
    return listed


def means(time: Array, values: Array, edges: Array) -> Array:
    """Mean of a quantity, held from one sample to the next, between edges."""
    whole = np.concatenate([[0.0], np.cumsum(np.diff(time) * values[:-1])])
    mean: Array = np.diff(np.interp(edges, time, whole)) / np.diff(edges)
    return mean


def case_spans(time: Array, cases: NDArray[np.str_]) -> list[tuple[str, float, float]]:
    """(case, begin, end) of every stretch of samples of one case; those between cases left out."""
    cuts = np.flatnonzero(cases[1:] != cases[:-1]) + 1
    bounds = [0, *cuts.tolist(), len(cases)]
    return [
        (str(cases[first]), float(time[first]), float(time[last - 1]))
        for first, last in itertools.pairwise(bounds)
        if cases[first]
    ]


def fit_heat(evidence: Evidence, ledger: Ledger) -> ThermalFit | None:
    """The thermal model of a system; None where no device's telemetry shows it warm up."""
    every = [(one, traces(one)) for one in evidence.runs]
    used = [trace for _, some in every for trace in some]
    if not used:
        return None
    found = model(used)
    where = ", ".join(relative(one.path / TELEMETRY_FILE) for one, some in every if some)
    runs = list(dict.fromkeys(one.run for one in used))
    apart: list[ThermalFit] = []
    cases, steady = Errors(), Errors()
    for first in range(min(len(runs), FOLDS)) if len(runs) > 1 else ():
        left_out = set(runs[first::FOLDS])
        others = model([one for one in used if one.run not in left_out])
        apart.append(others)
        for one in used:
            if one.run in left_out:
                judge(others, one, cases)
                judge_steady(others, one, steady)
    _note(ledger, found, used, apart, where)
    if cases.own:
        found = found.model_copy(update={"error_c": rounded(cases.rms_c())})
    usual = found.error_c
    cases.score(ledger, "steady power, each run by a fit on others and its first 60 s", usual)
    split = f"last {STEADY_END_S:.0f} s of a constant load, given its first 60 s"
    steady.score(ledger, split, usual)
    return found


def model(used: Sequence[Trace]) -> ThermalFit:
    """The model of some traces."""
    times, devices, rest, error = solve(used)
    totals = np.array([one.total_c_per_w for one in devices])
    central = Resistance(
        fast_c_per_w=rounded(float(np.median([one.fast_c_per_w for one in devices]))),
        slow_c_per_w=rounded(float(np.median([one.slow_c_per_w for one in devices]))),
    )
    return ThermalFit(
        fast_s=rounded(times[0]),
        slow_s=rounded(times[1]),
        central=central,
        resistance_sd=rounded(float(np.std(np.log(totals), ddof=1)) if len(totals) > 1 else 0.1),
        rest_c=rounded(float(np.median(rest))),
        rest_sd_c=rounded(float(np.std(rest, ddof=1)) if len(rest) > 1 else 3.0),
        error_c=rounded(error),
        power_w=rounded(max(float(np.quantile(one.power_w, 0.9)) for one in used)),
        devices=tuple(devices),
    )


def solve(
    used: Sequence[Trace],
) -> tuple[tuple[float, ...], list[DeviceHeat], list[float], float]:
    """Common time constants, resistances by device, rest by trace, and the residual's sd, C.

    Resistances and rests enter linearly and are none of them negative: they are solved for at each
    pair of time constants that the outer search tries (variable projection).
    """
    from scipy.optimize import least_squares, nnls

    by_device: dict[str, list[Trace]] = {}
    for one in used:
        by_device.setdefault(one.uuid_hash, []).append(one)

    @lru_cache(maxsize=4 * len(used))  # each slope of the search moves one of two times
    def lagged(device: str, index: int, time: float) -> Array:
        return exponential_mean(by_device[device][index].power_w, time, BIN_S)

    def linear(times: Iterable[float]) -> tuple[list[Array], Array]:
        answers, misses = [], []
        for device, some in by_device.items():
            blocks = []
            for index, one in enumerate(some):
                own = np.zeros((len(one.power_w), len(some)))
                own[:, index] = 1.0
                lags = [lagged(device, index, float(time)) for time in times]
                blocks.append(np.column_stack([*lags, own]))
            matrix = np.vstack(blocks)
            measured = np.concatenate([one.temperature_c for one in some])
            answer, _ = nnls(matrix, measured)
            answers.append(answer)
            misses.append(matrix @ answer - measured)
        return answers, np.concatenate(misses)

    searched = least_squares(
        lambda logs: linear(np.exp(logs))[1],
        np.log(TIMES_S),
        bounds=(np.log([0.2, 5.0]), np.log([5.0, 300.0])),
    )
    times = tuple(float(time) for time in np.exp(searched.x))
    answers, misses = linear(times)
    devices = [
        DeviceHeat(uuid_hash=name, fast_c_per_w=rounded(answer[0]), slow_c_per_w=rounded(answer[1]))
        for name, answer in zip(by_device, answers, strict=True)
    ]
    rest = [float(one) for answer in answers for one in answer[POLES:]]
    return times, devices, rest, float(np.std(misses))


def _note(
    ledger: Ledger,
    found: ThermalFit,
    used: Sequence[Trace],
    apart: Sequence[ThermalFit],
    where: str,
) -> None:
    for name in ("fast_s", "slow_s"):
        value = getattr(found, name)
        wide = (0.5 * value, 2 * value)
        if apart:
            # a fit without one of n parts moves by about an n-th of how far they differ; Student's
            ends = np.log([getattr(one, name) for one in apart])
            sd = float(np.sqrt((len(ends) - 1) * np.mean((ends - ends.mean()) ** 2)))
            wide = log_interval(value, sd * float(stdtrit(len(ends) - 1, 0.95)) / Z90)
        how = "jackknife over runs" if apart else "one run: a factor of two, assumed"
        ledger.note(f"thermal.{name}", value, "s", wide, "measured", f"{where}; interval: {how}")
    totals = [one.total_c_per_w for one in found.devices]
    ledger.note(
        "thermal.resistance_c_per_w",
        found.central.total_c_per_w,
        "C/W",
        (float(np.quantile(totals, 0.05)), float(np.quantile(totals, 0.95))),
        "measured",
        f"{where}: core above rest for each watt of board power; interval over {len(totals)} "
        "devices, whose places in their node are not known",
    )
    ledger.note(
        "thermal.rest_c",
        found.rest_c,
        "C",
        (found.rest_c - Z90 * found.rest_sd_c, found.rest_c + Z90 * found.rest_sd_c),
        "measured",
        f"{len(used)} traces of the same files: core without power, extrapolated: the inlet, which "
        "was not read, and what the coolant picked up before the GPU",
    )


def judge(fitted: ThermalFit, one: Trace, errors: Errors) -> None:
    """Where the power is steady after a trace's first minute, each such stretch once."""
    known = one.time_s - one.time_s[0] < KNOWN_S
    rise = fitted.rise_c(fitted.of(one.uuid_hash), one.power_w, BIN_S)
    end = int(known.sum()) + STEADY_BINS
    while end <= len(rise):
        power = one.power_w[end - STEADY_BINS : end]
        if power.std() > STEADY_SPREAD * power.mean():
            end += 1
            continue
        window = np.zeros(len(rise), dtype=np.bool_)
        window[end - END_BINS : end] = True
        errors.add(fitted, one, rise, known, window)
        end += STEADY_BINS


def judge_steady(fitted: ThermalFit, one: Trace, errors: Errors) -> None:
    """The end of a constant load from its first minute, its power taken to stay as it is."""
    if one.steady is None or one.steady[1] - one.steady[0] < KNOWN_S + STEADY_END_S:
        return
    begin, end = loaded_span(one, *one.steady)
    past = one.time_s < begin + KNOWN_S
    loaded = past & (one.time_s > begin + KNOWN_S / 4)
    last = (one.time_s > end - STEADY_END_S) & (one.time_s <= end)
    power = np.where(past, one.power_w, float(one.power_w[loaded].mean()))
    errors.add(fitted, one, fitted.rise_c(fitted.of(one.uuid_hash), power, BIN_S), loaded, last)
