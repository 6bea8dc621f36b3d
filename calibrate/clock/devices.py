"""What each measured device draws at a clock, beside the central one, their mean."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median

from calibrate.evidence import Evidence, Ledger, rounded
from calibrate.state import ClockState, is_compute, is_product
from spec.calibration import DeviceFit
from spec.records import KernelRow

Shape = tuple[str, str, str, str]
Factors = dict[str, float]  # by hash of a device


def fit_devices(
    evidence: Evidence, state: ClockState, ledger: Ledger
) -> tuple[tuple[DeviceFit, ...], dict[bool, float]]:
    """Devices beside their mean, and that beside all rows, by whether arithmetic is the bound.

    Devices count alike, however many rows they have: whose steps are forecast is not known.
    From sustained shapes: products under the power cap, memory-bound kernels below it.

    All products are held at the same power (the readings of a second or two scatter around it by
    2 %), so what differs is the clock that it leaves them: power goes as its inverse to
    `power_exponent`. Memory-bound kernels run at the largest clock, and their power is read.
    """
    rows = [(run, row) for run, row in evidence.rows(KernelRow) if state.shows_power(row)]
    capped = [(run, row) for run, row in rows if "power_cap" in (row.throttle or "")]
    by_clock = [
        (run, row, row.clock_mhz**-state.power_exponent)
        for run, row in capped
        if is_product(row) and row.clock_mhz
    ]
    read = [
        (run, row, state.active_w(row))
        for run, row in rows
        if not is_compute(row.op) and "power_cap" not in (row.throttle or "")
    ]
    products, memory = _beside_rows(evidence, by_clock), _beside_rows(evidence, read)
    memory = {name: factor for name, factor in memory.items() if name in products}
    if not products:
        return (), {}
    of_rows = {True: fmean(products.values()), False: fmean(memory.values() or [1.0])}
    fits = tuple(
        DeviceFit(
            uuid_hash=name,
            power=rounded(power / of_rows[True]),
            memory=rounded(memory.get(name, of_rows[False]) / of_rows[False]),
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
    return fits, of_rows


def _beside_rows(evidence: Evidence, drawn: Sequence[tuple[str, KernelRow, float]]) -> Factors:
    """What each device draws beside the median row of a shape, median over its shapes.

    Of shapes that several devices ran, in whichever runs; a device that no other one stands beside
    is the usual one.
    """
    hashes = {
        (one.manifest.run, device.index): device.uuid_hash
        for one in evidence.runs
        for host in one.manifest.hosts
        for device in host.devices
    }
    own: dict[Shape, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run, row, power in drawn:
        shape = row.op, row.direction, row.dtype, row.shape
        own[shape][hashes[run, row.device]].append(power)
    compared = [by_device for by_device in own.values() if len(by_device) > 1]
    if len({name for by_device in own.values() for name in by_device}) == 1:
        compared = list(own.values())
    found: dict[str, list[float]] = defaultdict(list)
    for by_device in compared:
        usual = median(power for powers in by_device.values() for power in powers)
        for name, powers in by_device.items():
            found[name].append(median(powers) / usual)
    return {
        name: float(median(found[name])) for name in dict.fromkeys(hashes.values()) if name in found
    }
