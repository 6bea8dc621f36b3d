"""Boards whose GPUs no switch joins (`mesh`), from collectives that were measured through one."""

from math import exp

from simulate.cost.uncertainty import assumed_factor
from simulate.hardware.transfer import SCALE_UP_SD
from spec.calibration import Calibration, Parameter
from spec.collective import busbw_factor
from spec.collective_fit import CollectiveCurve, CollectiveFit, CollectivePoint
from spec.fitted import changed
from spec.hardware import Node
from spec.interval import Z90

MESH = "transfer.mesh"


def meshed(calibration: Calibration, node: Node) -> Calibration:
    """The calibration on a node whose GPUs no switch joins; the same object where one does.

    A switch gives a group of any size all links of its GPUs. Without one a pair has its own links
    only, so a collective of n GPUs uses (n - 1) / (gpus - 1) of them, and a message one share. What
    of the links some group gets by a collective any does: a smaller one that gets less through a
    switch is held by its copies, and by links only where these are fewer than it fills.
    (NVIDIA HGX H100 and A100 4-GPU boards: "NVLink, GPU to GPU", 300 and 200 GB/s of 900 and 600;
    AMD Instinct MI300X: 7 links of 128 GB/s, one to each peer.)
    """
    if node.links_of(1) == 1:
        return calibration
    fits = tuple(_without_switch(fit, node) for fit in calibration.collectives)
    listed = [one for one in calibration.parameters if not one.name.startswith("collective.")]
    share = node.links_of(1)
    said = f"of its links, one of {node.gpus - 1} shares, join each pair of GPUs of {node.name}"
    listed.append(assumed_factor(MESH, share, SCALE_UP_SD, f"{said}: no switch"))
    for fit in fits:
        for curve in fit.curves:
            last = curve.points[-1]
            rate = last.bytes * busbw_factor(fit.collective, curve.ranks) / last.time_us / 1e3
            listed.append(
                Parameter(
                    name=f"collective.{fit.collective}.{curve.ranks}.busbw",
                    value=rate,
                    unit="GB/s",
                    low=rate * exp(-Z90 * last.sd),
                    high=rate * exp(Z90 * last.sd),
                    source="assumed",
                    detail="a switch's times, the bandwidth part by the links that reach "
                    f"{'a peer' if fit.collective == 'send_recv' else 'the group'}, where it would "
                    f"fill them; see {MESH}",
                )
            )
    return changed(calibration, collectives=fits, parameters=tuple(listed))


def _without_switch(fit: CollectiveFit, node: Node) -> CollectiveFit:
    """Curves for every group inside the node, their share of the links in the bandwidth part.

    They need no structure, which would draw them back to a switch's.
    """
    sizes = sorted({point.bytes for curve in fit.curves for point in curve.points})
    groups = range(2, node.gpus + 1)
    rates = {
        ranks: busbw_factor(fit.collective, ranks) / fit.time_us(ranks, sizes[-1])[0]
        for ranks in groups
    }
    curves = []
    for ranks in groups:
        links = node.links_of(1 if fit.collective == "send_recv" else ranks - 1)
        share = min(links * max(rates.values()) / rates[ranks], 1.0)
        times = [fit.time_us(ranks, size) for size in sizes]
        least = min(time for time, _ in times)
        points = tuple(
            CollectivePoint(
                bytes=size,
                time_us=least + (time - least) / share,
                sd=max(sd, SCALE_UP_SD),
            )
            for size, (time, sd) in zip(sizes, times, strict=True)
        )
        curves.append(CollectiveCurve(ranks=ranks, points=points))
    return changed(fit, curves=tuple(curves), structure=None)
