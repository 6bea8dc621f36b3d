"""A network model per protocol: measured where a system left its nodes, else published or assumed.

A measured network keeps, beside the fitted formula, the measured sizes of every layout of groups:
what a training step sends is then mostly looked up.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt

import numpy as np

from calibrate.alone import ABSURD, highest
from calibrate.evidence import (
    INDEPENDENT,
    TELEMETRY_FILE,
    Evidence,
    Judged,
    Ledger,
    core_share,
    median_sd,
    rounded,
)
from calibrate.network.at_once import Alone, luck_sd, through_us
from calibrate.network.between_nodes import (
    MEASURED,
    Sample,
    assumed_tcp,
    citation,
    fit_network,
    judge_scaling,
    note_network,
    note_one,
    over_rdma,
    path_of,
    predict,
    published_samples,
    with_rate,
)
from calibrate.network.held import with_held
from calibrate.network.inside_node import LEAST_SD
from calibrate.network.visits import (
    RDMA,
    SHAPED,
    SHAPED_CPU,
    SOCKETS,
    Assumed,
    Visited,
    with_visits,
)
from calibrate.telemetry import LARGE_BYTES, LEAST_SAMPLES, read_power
from spec.collective import busbw_factor
from spec.collective_fit import CollectivePoint
from spec.errors import UserError
from spec.hardware import GroupPath
from spec.interval import Z90
from spec.manifest import Manifest
from spec.network_fit import NetworkCurve, NetworkFit
from spec.records import CollectiveRow

UNKNOWN_BEND = 0.2  # where fewer than three sizes were measured; assumed
LARGE = 2**20  # bytes: what steps send between nodes is mostly larger
SCALE_UP = 1e6  # 1e9 bytes/s: never what limits a collective over such networks


@dataclass(frozen=True)
class Crossing:
    """A measured row that leaves its node."""

    row: CollectiveRow
    path: GroupPath
    in_turns: bool = False  # each device has a share of a core, and waits for its turn
    devices: tuple[str, ...] = ()  # hashes of the run's devices
    alone_us: float | None = None  # of one of several groups, where that was measured
    shaped: bool = False  # links between nodes have a set rate

    @property
    def time_us(self) -> float:
        """What it lasts in a step: the median, as outliers are none of it.

        Of several groups until all are through: a step goes on then. Where a host waits for its
        turn, a repeat is short or as long as that, and it is their mean that many add up to.
        """
        return self.row.mean_us if self.in_turns else through_us(self.row, self.alone_us)

    @property
    def sd(self) -> float:
        """Of `time_us` (logarithm), from the spread of its repeats."""
        if not self.in_turns:
            return median_sd([self.row])
        return self.row.std_us / self.row.mean_us / sqrt(min(self.row.repeats, INDEPENDENT))

    @property
    def sample(self) -> Sample:
        """As the fit of the formula takes it."""
        return Sample(self.row.collective, self.path, self.row.bytes, self.time_us, SCALE_UP)

    @property
    def visited(self) -> Visited:
        """As the spread of visits takes it."""
        what = *self.layout, self.row.groups, self.row.bytes
        large = self.row.bytes >= LARGE
        return Visited(what, self.devices, self.time_us, luck_sd(self.row), large)

    @property
    def layout(self) -> tuple[str, int, int, int]:
        """What `NetworkFit.curves` are told apart by."""
        return self.row.collective, self.path.ranks, self.path.nodes, self.path.concurrent


def assumed_of(protocol: str, rows: Sequence[Crossing]) -> Assumed:
    """What is assumed of visits, by what copies the messages."""
    if protocol == "infiniband":
        return RDMA
    if all(one.row.backend == "gloo" for one in rows):
        return SHAPED_CPU
    return SHAPED if all(one.shaped for one in rows) else SOCKETS


def concurrent(row: CollectiveRow, per_node: int) -> int:
    """Groups of a row that share its first node."""
    found = 0
    for number in range(row.groups):
        block, offset = divmod(number, row.stride)
        first = block * row.ranks * row.stride + offset
        found += first < per_node
    return found


def per_node(manifest: Manifest) -> int:
    """Devices of one node, emulated or not."""
    return len(manifest.hosts[0].devices) // manifest.emulated_nodes


def crossings(evidence: Evidence, role: str = "fit") -> dict[str, list[Crossing]]:
    """This system's rows that leave a node (emulated nodes included), by protocol.

    Sockets are told from InfiniBand by NCCL's own switch; what RDMA ran on is not recorded, so it
    is taken as InfiniBand. Several groups at once count where the manifest tells the nodes' size.
    """
    found: dict[str, list[Crossing]] = defaultdict(list)
    for one in evidence.runs:
        manifest = one.manifest
        several = len(manifest.hosts) * manifest.emulated_nodes > 1
        alone = Alone(one.fit(CollectiveRow))
        for row in one.table(CollectiveRow):
            if row.role != role or row.nodes < 2 or row.ranks < row.nodes:
                continue
            if row.groups > 1 and not several:
                continue
            beside = concurrent(row, per_node(manifest)) if several else 1
            path = path_of(row.ranks, row.nodes, 1.0, beside)
            one_of = Crossing(
                row,
                path,
                core_share(manifest) < 1,
                manifest.device_hashes,
                alone.time_us(row),
                manifest.link_mbit_per_s is not None,
            )
            rdma = over_rdma(row.backend, manifest)
            found["infiniband" if rdma else "tcp"].append(one_of)
    return found


def fit_networks(
    evidence: Evidence, ledger: Ledger, idle_w: float | None = None
) -> tuple[NetworkFit, ...]:
    """A model per protocol: measured where this system left its nodes, else published, assumed.

    With `idle_w` a measured one also gets the power that its collectives draw above it.
    """
    measured, judged = crossings(evidence), crossings(evidence, "judge")
    found: list[NetworkFit] = []
    for protocol in ("infiniband", "ethernet"):
        samples = published_samples(protocol)
        judge_scaling(ledger, protocol, samples)
        if protocol in measured:
            rows = measured[protocol], judged.get(protocol, [])
            found.append(fit_measured(protocol, *rows, evidence, ledger, idle_w))
            continue
        fit, sds = fit_network(protocol, samples, "published", citation(protocol))
        found.append(fit)
        note_network(ledger, fit, sds)
        if protocol == "ethernet":
            detail = f"RoCE is taken to behave as AWS EFA does, with twice its spread: {fit.detail}"
            wider = {
                "protocol": "roce",
                "latency_sd": 2 * fit.latency_sd,
                "efficiency_sd": 2 * fit.efficiency_sd,
                "detail": detail,
            }
            found.append(fit.model_copy(update=wider))
            note_network(ledger, found[-1], sds, wider=2.0)
    if "tcp" in measured:
        rows = measured["tcp"], judged.get("tcp", [])
        found.append(fit_measured("tcp", *rows, evidence, ledger, idle_w))
    else:
        found.append(assumed_tcp(ledger))
    return tuple(found)


def fit_measured(
    protocol: str,
    rows: Sequence[Crossing],
    judged: Sequence[Crossing],
    evidence: Evidence,
    ledger: Ledger,
    idle_w: float | None = None,
) -> NetworkFit:
    """Efficiency is relative to the node's rate: the fastest that any one group used its ports."""

    every = [*rows, *judged]
    formula, _ = _formula(protocol, every, "all rows")
    # those far too short would be looked up, and count for spreads
    absurd = [one for one in every if one.time_us < ABSURD * predict(formula, one.sample)]
    if len(absurd) == len(every):
        raise UserError(
            f"collectives.csv: all rows between nodes ({protocol}) take less than {ABSURD:g} of "
            "what they say together; measure them again"
        )
    rows = [one for one in rows if one not in absurd]
    judge_sizes(ledger, protocol, rows)
    fit, _ = _with_curves(protocol, rows, "held-out fit")
    score(ledger, fit, "rows of role judge", judged, rows)
    rows = [one for one in every if one not in absurd]
    detail = evidence.where(CollectiveRow, len(rows))
    if absurd:
        detail += f", without {len(absurd)} far shorter than the others say"
    fit, sds = _with_curves(protocol, rows, detail)
    fit = with_rate(ledger, fit)
    note_network(ledger, fit, sds, MEASURED)
    assumed = assumed_of(protocol, rows)
    one_host = all(len(one.manifest.hosts) == 1 for one in evidence.runs)
    fit = fit.model_copy(update={"one_device": assumed is SOCKETS and one_host})
    fit = with_visits(fit, [one.visited for one in rows], assumed, ledger)
    fit = with_held(fit, evidence, ledger)
    for name, several in (("active_w", False), ("active_inside_w", True)):
        power = None if idle_w is None else between_nodes_w(evidence, several)
        if power is not None and idle_w is not None:
            active = rounded(max(power - idle_w, 0.0))
            note_one(ledger, fit, name, active, "W", 0.1)
            fit = fit.model_copy(update={name: active})
    return fit


def _with_curves(
    protocol: str, rows: Sequence[Crossing], detail: str
) -> tuple[NetworkFit, dict[str, float]]:
    """The formula on these rows, with their curves, and the sds of its parameters."""
    fit, sds = _formula(protocol, rows, detail)
    return fit.model_copy(update={"curves": curves(fit, rows)}), sds


def _formula(
    protocol: str, rows: Sequence[Crossing], detail: str
) -> tuple[NetworkFit, dict[str, float]]:

    def used(one: Sample) -> float:
        twice = one.collective == "all_reduce" and one.path.nodes == 2
        return one.busbw / (busbw_factor(one.collective, one.path.ranks) if twice else 1.0)

    samples = [one.sample for one in rows]
    alone = [one for one in samples if one.path.concurrent == 1]
    rate = rounded(highest(used(one) for one in alone or samples))
    return fit_network(protocol, samples, "measured", detail, MEASURED, rate)


def between_nodes_w(evidence: Evidence, several: bool) -> float | None:
    """Median board power during large collectives between nodes in which all devices take part.

    several: of groups with several ranks in a node, else of those with one in each.
    """
    readings: list[float] = []
    for one in evidence.runs:
        path = one.path / TELEMETRY_FILE
        if not path.exists():
            continue
        devices = sum(len(host.devices) for host in one.manifest.hosts)
        large = {
            row.case_id
            for row in one.fit(CollectiveRow)
            if row.nodes > 1
            and row.bytes >= LARGE_BYTES
            and row.ranks * row.groups >= devices
            and (row.ranks > row.nodes) is several
        }
        cases, power, _ = read_power(path)
        readings += list(power[np.isin(cases, list(large))])
    return float(np.median(readings)) if len(readings) >= LEAST_SAMPLES else None


def curves(fit: NetworkFit, rows: Sequence[Crossing]) -> tuple[NetworkCurve, ...]:
    """The measured sizes of every layout, with the spread of what is read between them.

    All groups of a parallel axis send at once, so of rows that differ in the number of groups (and
    share a node with as many) those with the most count.
    """
    layouts: dict[tuple[str, int, int, int], list[Crossing]] = defaultdict(list)
    for one in rows:
        layouts[one.layout].append(one)
    found = []
    for (kind, *_), same in sorted(layouts.items()):
        most = max(one.row.groups for one in same)
        sizes: dict[int, list[Crossing]] = defaultdict(list)
        for one in same:
            if one.row.groups == most:
                sizes[one.row.bytes].append(one)
        points = []
        for size, timed in sorted(sizes.items()):
            own = float(np.hypot(_sd(timed), LEAST_SD))
            time = float(np.exp(np.median([log(one.time_us) for one in timed])))
            points.append(CollectivePoint(bytes=size, time_us=rounded(time), sd=rounded(own, 3)))
        found.append(_with_spreads(fit, kind, points, same[0].path))
    return tuple(found)


def _sd(timed: Sequence[Crossing]) -> float:
    """Of a size's time, over its rows."""
    if any(one.in_turns for one in timed):
        return float(np.median([one.sd for one in timed]))
    return median_sd([one.row for one in timed])


def _with_spreads(
    fit: NetworkFit, kind: str, points: Sequence[CollectivePoint], path: GroupPath
) -> NetworkCurve:
    """A layout's sizes, with what its own neighbours say of a size between two of them."""
    model = np.array(
        [predict(fit, Sample(kind, path, p.bytes, 1.0, SCALE_UP)) for p in points], dtype=float
    )
    sizes = np.log2(np.array([float(p.bytes) for p in points]))
    residuals = np.log(np.array([p.time_us for p in points]) / model)
    large = model > 2 * predict(fit, Sample(kind, path, 1.0, 1.0, SCALE_UP))
    bends: dict[bool, list[float]] = {False: [], True: []}
    for i in range(1, len(points) - 1):
        ends = [i - 1, i + 1]
        between = np.interp(sizes[i], sizes[ends], residuals[ends])
        bends[bool(large[i])].append(abs(float(between - residuals[i])))

    def spread(part: bool) -> float:
        errors = bends[part] or bends[not part]
        return rounded(float(np.quantile(errors, 0.9)) / Z90 if errors else UNKNOWN_BEND, 3)

    last = UNKNOWN_BEND
    if len(points) > 1:
        last = float(abs(residuals[-1] - residuals[-2]) / (sizes[-1] - sizes[-2]))
    return NetworkCurve(
        collective=kind,
        ranks=path.ranks,
        nodes=path.nodes,
        concurrent=path.concurrent,
        latency_bend=spread(False),
        bend=spread(True),
        beyond_sd=rounded(last, 3),  # a doubling may change as much as the last one did
        points=tuple(points),
    )


def judge_sizes(ledger: Ledger, protocol: str, rows: Sequence[Crossing]) -> None:
    """Every other size left out, beside the largest message's bus bandwidth."""
    sizes = sorted({one.row.bytes for one in rows})
    left_out = set(sizes[1::2])
    kept = [one for one in rows if one.row.bytes not in left_out]
    if not kept or not left_out:
        return
    fit, _ = _with_curves(protocol, kept, "held-out fit")
    out = [one for one in rows if one.row.bytes in left_out]
    score(ledger, fit, "every other size left out", out, kept)


def score(
    ledger: Ledger,
    fit: NetworkFit,
    split: str,
    rows: Sequence[Crossing],
    known: Sequence[Crossing],
) -> None:
    """Judge rows by a fit, beside the best bus bandwidth of the same collective in `known`."""
    best: dict[str, float] = {}
    for one in known:
        best[one.row.collective] = max(best.get(one.row.collective, 0.0), one.sample.busbw)
    judged = []
    for one in rows:
        sample = one.sample
        if sample.collective not in best:
            continue
        sd = fit.sd(sample.collective, one.path, sample.nbytes, SCALE_UP)
        sd = float(np.hypot(sd, one.sd))
        dumb = sample.nbytes * busbw_factor(sample.collective, one.path.ranks)
        dumb /= best[sample.collective] * 1e3
        judged.append(Judged(predict(fit, sample), sd, sample.time_us, dumb))
    ledger.score(f"network.{fit.protocol}", split, judged, "constant bus bandwidth")
