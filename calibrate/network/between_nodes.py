"""Collectives between nodes: fitted on this system's rows, else on published sweeps, else assumed.

The published sweeps are `calibrate/published/network.csv`, one line of an nccl-tests run each with
its citation. What they cannot tell apart is held by a prior, stated here with its source.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, log2
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, PositiveInt
from scipy.optimize import least_squares

from calibrate.evidence import Judged, Ledger, log_interval, rounded
from calibrate.network.structure import UNTOLD_SD, told
from spec.collective import busbw_factor
from spec.files import read_table
from spec.fitted import Positive, Source
from spec.hardware import GroupPath
from spec.interval import Z90
from spec.manifest import Manifest
from spec.network_fit import NetworkFit

PUBLISHED = Path(__file__).parents[1] / "published" / "network.csv"

# name: (median, sd of the logarithm) of the prior of every network
PRIORS: dict[str, tuple[float, float]] = {
    "launch_us": (10.0, 0.5),  # as collectives inside a node start
    "latency_us": (8.0, 1.0),
    # a step of a ring over NVLink, protocol Simple: NCCL, src/graph/tuning.cc, hwLat
    "local_step_us": (3.4, 0.7),
    "pipelining": (0.7, 0.4),
    "efficiency": (0.88, 0.08),  # of the ports' rate, after headers and imperfect routing
    "all_to_all_efficiency": (0.85, 0.15),
}
# Of a process over sockets, whatever its port's rate: `network.tcp.node_gbytes_per_s` of nodes of
# one process of 2x-h100-2x1, 2x-h200-2x1 and 4x-h200-4x1 (3.9 to 4.3), of two of 4x-h200-2x2 (9.7).
SOCKET_GBYTES_PER_S, SOCKET_SD = 4.3, 0.5
# Without any sweep that leaves nodes: one TCP stream through a loopback device or plain Ethernet.
# Wide: four H200 as two emulated nodes turned out five times faster than these values.
ASSUMED_TCP: dict[str, tuple[float, float]] = {
    "launch_us": (30.0, 0.5),
    "latency_us": (60.0, 1.0),
    "local_step_us": (10.0, 1.0),
    "pipelining": (0.5, 0.5),
    "efficiency": (0.7, 1.0),
    "all_to_all_efficiency": (0.6, 1.0),
}
# Where this system left its nodes itself its rows decide; efficiency is relative to the rate seen.
MEASURED: dict[str, tuple[float, float]] = {
    "launch_us": (30.0, 1.0),
    "latency_us": (60.0, 1.5),
    "local_step_us": (10.0, 1.0),
    "pipelining": (0.5, 1.0),
    "efficiency": (0.9, 0.3),
    "all_to_all_efficiency": (0.7, 0.5),
    "sharing": (1.0, 0.7),  # groups of one node share its ports, unless they show otherwise
}
UNITS = {name: "us" if name.endswith("_us") else "share" for name in MEASURED}
# The spread of efficiency from one cluster to another that one calibration cannot see: the default
# and the tuned sweep of one cluster in nccl-tests issue 309 reach 321 and 391 GB/s at 8 GiB.
CLUSTER_SD = 0.1
LEAST_LATENCY_SD = 0.2
# Error added per doubling of the nodes beyond those fitted on. Assumed until a longer series is
# fitted; nccl issue 1229 reports a reduce-scatter bus bandwidth that falls by about 5 % a doubling.
SCALE_SD = 0.05
# Beyond sizes that are all latency a time at most doubles with the size.
DOUBLING_SD = 0.7


class NetworkRow(BaseModel):
    """network.csv: one size of a published sweep."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    protocol: str
    system: str
    collective: str
    gpus: PositiveInt
    nodes: PositiveInt
    bytes: PositiveInt
    time_us: Positive
    port_gbits_per_s: Positive
    scale_up_busbw_gbytes_per_s: Positive
    source: str
    locator: str


@dataclass(frozen=True)
class Sample:
    """A timed collective that leaves the node, published or measured."""

    collective: str
    path: GroupPath
    nbytes: float
    time_us: float
    scale_up_busbw: float

    @property
    def busbw(self) -> float:
        """Bus bandwidth, 1e9 bytes/s."""
        return self.nbytes * busbw_factor(self.collective, self.path.ranks) / self.time_us / 1e3


def over_rdma(backend: str, manifest: Manifest) -> bool:
    """Whether a run's messages between nodes went over InfiniBand: NCCL's, unless it was off."""
    return backend in ("nccl", "rccl") and manifest.environment.get("NCCL_IB_DISABLE") != "1"


def path_of(ranks: int, nodes: int, gbytes_per_s: float, concurrent: int = 1) -> GroupPath:
    """The layout of a sweep; hops of its switches are part of the fitted latency."""
    return GroupPath(
        ranks=ranks,
        local_ranks=-(-ranks // nodes),
        nodes=nodes,
        concurrent=concurrent,
        gbytes_per_s=gbytes_per_s,
        latency_us=0.0,
        tier="nic",
    )


def fit_network(
    protocol: str,
    samples: Sequence[Sample],
    source: Source,
    detail: str,
    priors: dict[str, tuple[float, float]] = PRIORS,
    node_gbytes_per_s: float | None = None,
) -> tuple[NetworkFit, dict[str, float]]:
    """Maximum a posteriori fit, robust to outliers; also gives each parameter's sd (logarithmic).

    Residuals are of log(time).
    """
    names = list(priors)
    centre = np.array([log(priors[name][0]) for name in names])
    width = np.array([priors[name][1] for name in names])
    noise = 0.12

    def build(x: NDArray[np.float64], **more: Any) -> NetworkFit:
        values = {name: float(np.exp(value)) for name, value in zip(names, x, strict=True)}
        return NetworkFit.model_validate(
            {
                "protocol": protocol,
                "latency_sd": 0.0,
                "efficiency_sd": 0.0,
                "scale_sd": 0.0,
                "max_nodes": max((one.path.nodes for one in samples), default=1),
                "node_gbytes_per_s": node_gbytes_per_s,
                "source": source,
                "detail": detail,
                **values,
                **more,
            }
        )

    def residuals(x: NDArray[np.float64]) -> NDArray[np.float64]:
        fit = build(x)
        errors = [log(predict(fit, one) / one.time_us) / noise for one in samples]
        clipped = np.array(errors)
        # beyond two standard deviations an error counts linearly: single timings have outliers
        large = np.abs(clipped) > 2
        clipped[large] = np.sign(clipped[large]) * np.sqrt(4 * np.abs(clipped[large]) - 4)
        return np.concatenate([clipped, (x - centre) / width])

    if samples:
        found = least_squares(residuals, centre, method="trf", x_scale=width)
        covariance = np.linalg.inv(found.jac.T @ found.jac)
        x, sds = found.x, np.sqrt(np.diag(covariance))
    else:
        x, sds = centre, width
    spread = dict(zip(names, (float(sd) for sd in sds), strict=True))
    plain = build(x)
    if samples:
        latency_sd, efficiency_sd = _spreads(plain, samples)
    else:
        latency_sd, efficiency_sd = spread["latency_us"], spread["efficiency"]
    if source != "measured":
        efficiency_sd = max(efficiency_sd, CLUSTER_SD)
    fit = build(
        x,
        latency_sd=rounded(max(latency_sd, LEAST_LATENCY_SD)),
        efficiency_sd=rounded(max(efficiency_sd, 0.03)),
        scale_sd=SCALE_SD,
    )
    fit = fit.model_copy(update={name: rounded(float(getattr(fit, name))) for name in names})
    return fit, spread


def predict(fit: NetworkFit, sample: Sample) -> float:
    """The model's time of a sample."""
    return fit.time_us(sample.collective, sample.path, sample.nbytes, sample.scale_up_busbw)


def _spreads(fit: NetworkFit, samples: Sequence[Sample]) -> tuple[float, float]:
    """Spread of latency-bound and of bandwidth-bound times around the fit, 90th percentile."""
    small: list[float] = []
    large: list[float] = []
    for one in samples:
        time = predict(fit, one)
        start = fit.time_us(one.collective, one.path, 1.0, one.scale_up_busbw) / time
        (small if start > 0.5 else large).append(abs(log(time / one.time_us)))

    def spread(errors: list[float]) -> float:
        return float(np.quantile(errors, 0.9)) / Z90 if errors else 0.0

    return spread(small), spread(large)


def published_samples(protocol: str) -> list[Sample]:
    """The published sweeps of a protocol."""
    return [
        Sample(
            row.collective,
            path_of(row.gpus, row.nodes, row.port_gbits_per_s / 8),
            row.bytes,
            row.time_us,
            row.scale_up_busbw_gbytes_per_s,
        )
        for row in read_table(PUBLISHED, NetworkRow)
        if row.protocol == protocol
    ]


def citation(protocol: str) -> str:
    """Sources of a protocol's published sweeps."""
    rows = [row for row in read_table(PUBLISHED, NetworkRow) if row.protocol == protocol]
    systems = "; ".join(sorted({row.system for row in rows}))
    sources = "; ".join(sorted({row.source for row in rows}))
    return f"{len(rows)} rows of calibrate/published/network.csv ({systems}), from {sources}"


def judge_scaling(ledger: Ledger, protocol: str, samples: Sequence[Sample]) -> None:
    """Fit the smallest groups, judge the larger ones, beside constant bus bandwidth per size."""
    smallest = min(one.path.nodes for one in samples)
    fitted = [one for one in samples if one.path.nodes == smallest]
    larger = sorted({one.path.nodes for one in samples} - {smallest})
    if not larger:
        return
    fit, _ = fit_network(protocol, fitted, "published", "held-out fit")
    for nodes in larger:
        judged = []
        beyond = log2(nodes / fit.max_nodes) * fit.scale_sd
        for one in (one for one in samples if one.path.nodes == nodes):
            same = [other for other in fitted if other.collective == one.collective]
            if not same:
                continue
            near = min(same, key=lambda other: abs(log(other.nbytes / one.nbytes)))
            dumb = one.nbytes * busbw_factor(one.collective, one.path.ranks) / near.busbw / 1e3
            sd = fit.sd(one.collective, one.path, one.nbytes, one.scale_up_busbw)
            sd = float(np.hypot(sd, beyond))
            judged.append(Judged(predict(fit, one), sd, one.time_us, dumb))
        ranks = next(one.path.ranks for one in samples if one.path.nodes == nodes)
        ledger.score(
            f"network.{protocol}",
            f"published sweeps: fitted on {smallest} nodes, judged on {nodes} ({ranks} GPUs)",
            judged,
            "bus bandwidth of the same size on the smallest group",
        )


def assumed_tcp(ledger: Ledger) -> NetworkFit:
    """Sockets of a system none of whose collectives left a node over them."""
    detail = "one TCP stream; no collective of this system left its node"
    fit, sds = fit_network("tcp", [], "assumed", detail, ASSUMED_TCP)
    note_network(ledger, fit, sds, ASSUMED_TCP)
    ledger.note(
        "network.tcp.most_gbytes_per_s",
        SOCKET_GBYTES_PER_S,
        "GB/s",
        log_interval(SOCKET_GBYTES_PER_S, SOCKET_SD),
        "assumed",
        "of a process, however fast its port: nodes of one got 3.9 to 4.3 over a loopback device, "
        "of two 9.7 (H100, H200); its spread is drawn with network.tcp.efficiency's",
    )
    return fit.model_copy(update={"most_gbytes_per_s": SOCKET_GBYTES_PER_S})


def note_network(
    ledger: Ledger,
    fit: NetworkFit,
    sds: dict[str, float],
    priors: dict[str, tuple[float, float]] = PRIORS,
    wider: float = 1.0,
) -> None:
    """Enter a network's parameters, `sds` their spreads, of which they have so many times as much.

    One that is as uncertain as its prior is the prior: no row told it.
    """
    wide = {"latency_us": fit.latency_sd, "efficiency": fit.efficiency_sd}
    for name, unit in UNITS.items():
        if name not in sds:
            continue
        sd = max(wider * sds[name], wide.get(name, 0.0))
        prior = name in priors and sds[name] > 0.99 * priors[name][1]
        note_one(ledger, fit, name, float(getattr(fit, name)), unit, sd, prior)
    ledger.note(
        f"network.{fit.protocol}.scale_sd",
        fit.scale_sd,
        "log per doubling of nodes",
        (0.0, 2 * fit.scale_sd),
        "assumed",
        f"growth of the error beyond {fit.max_nodes} nodes; github.com/NVIDIA/nccl/issues/1229 "
        "reports bus bandwidth falling by about 5 % a doubling",
    )


def with_rate(ledger: Ledger, fit: NetworkFit) -> NetworkFit:
    """Enter a measured network's rate; where no message is long enough to show it, it is open."""
    rate = fit.node_gbytes_per_s or 0.0
    if any(told([point.time_us for point in curve.points]) for curve in fit.curves):
        note_one(ledger, fit, "node_gbytes_per_s", rate, "GB/s", 0.05)
        return fit
    ledger.note(
        f"network.{fit.protocol}.node_gbytes_per_s",
        rate,
        "GB/s",
        log_interval(rate, UNTOLD_SD),
        "assumed",
        f"none but short messages measured, nodes may be much faster: {fit.detail}",
    )
    curves = tuple(
        curve.model_copy(update={"beyond_sd": max(curve.beyond_sd, DOUBLING_SD)})
        for curve in fit.curves
    )
    return fit.model_copy(update={"efficiency_sd": UNTOLD_SD, "curves": curves})


def note_one(
    ledger: Ledger,
    fit: NetworkFit,
    name: str,
    value: float,
    unit: str,
    sd: float,
    prior: bool = False,
) -> None:
    """Enter one parameter of a network; `prior`: the rows behind the others do not tell it."""
    name = f"network.{fit.protocol}.{name}"
    source: Source = "assumed" if prior else fit.source
    detail = fit.detail
    if prior and fit.source != "assumed":
        detail = f"the prior of every network, which no row tells otherwise: {fit.detail}"
    low, high = log_interval(value, sd)
    if fit.node_gbytes_per_s is None and "efficiency" in name:
        high = max(min(high, 1.0), value)  # of the ports' rate
    ledger.note(name, value, unit, (low, high), source, detail)
