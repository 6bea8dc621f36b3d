"""What each measured device draws at a clock, beside the central one, their mean."""

from collections import defaultdict
from collections.abc import Sequence
from math import exp, log
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from calibrate.evidence import Evidence, Ledger, rounded
from calibrate.state import ClockState, is_compute, is_product
from spec.clock_fit import DeviceFit
from spec.records import KernelRow

Shape = tuple[str, str, str, str]
Factors = dict[str, float]  # by hash of a device
READ_SD = 0.02  # of a row's power: where the loss turns linear
HELD = 1e-3  # weight that holds devices near the usual one, where no shape sets them beside others


def placed_devices(evidence: Evidence) -> dict[tuple[str, int], str]:
    """The hash of every device, by run and index."""
    return {
        (one.manifest.run, device.index): device.uuid_hash
        for one in evidence.runs
        for host in one.manifest.hosts
        for device in host.devices
    }


def fit_devices(evidence: Evidence, state: ClockState, ledger: Ledger) -> tuple[DeviceFit, ...]:
    """Devices beside their mean.

    Devices count alike, however many rows they have: whose steps are forecast is not known.
    From sustained shapes: products under the power cap, memory-bound kernels below it.

    All products are held at the same power (the readings of a second or two scatter around it by
    2 %), so what differs is the clock that it leaves them: power goes as its inverse to the slope
    of power. Memory-bound kernels run at the largest clock, and their power is read.
    """
    rows = [(run, row) for run, row in evidence.rows(KernelRow) if state.shows_power(row)]
    capped = [(run, row) for run, row in rows if "power_cap" in (row.throttle or "")]
    by_clock = [
        (run, row, 1 / state.power_scale(row.clock_mhz))
        for run, row in capped
        if is_product(row) and row.clock_mhz
    ]
    read = [
        (run, row, state.active_w(row))
        for run, row in rows
        if not is_compute(row.op) and "power_cap" not in (row.throttle or "")
    ]
    names = placed_devices(evidence)
    products, memory = _beside_rows(names, by_clock), _beside_rows(names, read)
    memory = {name: factor for name, factor in memory.items() if name in products}
    if not products:
        return ()
    of_products, of_memory = fmean(products.values()), fmean(memory.values() or [1.0])
    fits = tuple(
        DeviceFit(
            uuid_hash=name,
            power=rounded(power / of_products),
            memory=rounded(memory.get(name, of_memory) / of_memory),
        )
        for name, power in products.items()
    )
    for name, what, known, used in (
        ("power", "products", products, by_clock),
        ("memory", "memory-bound kernels", memory, read),
    ):
        factors = [getattr(one, name) for one in fits if one.uuid_hash in known]
        if not factors:
            continue
        ledger.note(
            f"clock.device_{name}",
            float(median(factors)),
            "factor",
            (min(factors), max(factors)),
            "measured",
            f"{evidence.where(KernelRow, len(used))}: what {what} draw at a clock, least and most "
            f"of {len(factors)} devices beside their mean; used for steps on those devices",
        )
    return fits


def _beside_rows(
    names: dict[tuple[str, int], str], drawn: Sequence[tuple[str, KernelRow, float]]
) -> Factors:
    """What each device draws beside the usual one; `names` are their hashes, by run and index.

    Of shapes that several devices ran, in whichever runs: a row's power is its shape's times its
    device's, by least squares of logarithms (soft_l1), as not all devices ran the same shapes. A
    device that no other one stands beside is the usual one.
    """
    own: dict[Shape, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run, row, power in drawn:
        shape = row.op, row.direction, row.dtype, row.shape
        own[shape][names[run, row.device]].append(power)
    several = len({name for devices in own.values() for name in devices}) > 1
    compared = [devices for devices in own.values() if len(devices) > several]
    known = {name for devices in compared for name in devices}
    if not known:
        return {}
    ordered = [name for name in dict.fromkeys(names.values()) if name in known]
    places = {name: at for at, name in enumerate(ordered)}
    read = [
        (at_shape, places[name], log(median(powers)))
        for at_shape, devices in enumerate(compared)
        for name, powers in devices.items()
    ]
    of_shape, of_device, level = (np.array(column) for column in zip(*read, strict=True))

    def off(at: NDArray[np.float64]) -> NDArray[np.float64]:
        devices, shapes = np.split(at, [len(places)])
        return np.append(devices[of_device] + shapes[of_shape] - level, HELD * devices)

    usual = [level[of_shape == at].mean() for at in range(len(compared))]
    start = np.append(np.zeros(len(places)), usual)
    found = least_squares(off, start, loss="soft_l1", f_scale=READ_SD).x
    return {name: exp(found[at]) for name, at in places.items()}
