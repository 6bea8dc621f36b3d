"""What each measured device's products draw at a clock, beside the central one, their mean."""

from collections import defaultdict
from statistics import fmean, median

from calibrate.evidence import Evidence, Ledger, rounded
from calibrate.state import ClockState, is_product
from spec.calibration import DeviceFit
from spec.records import KernelRow

Shape = tuple[str, str, str]


def fit_devices(
    evidence: Evidence, state: ClockState, ledger: Ledger
) -> tuple[tuple[DeviceFit, ...], float]:
    """Each device's power, and their mean's beside that of all rows, which is the central one.

    From shapes that several devices of a run sustained under the power cap; devices count alike,
    however many rows they have, since whose steps are forecast is not known.

    A run of one device is set beside the others by shape; where there are no others, it is the
    central one. All are held at the same power (the readings of a second or two scatter around it
    by 2 %), so what differs is the clock that it leaves them: power goes as its inverse to
    `power_exponent`.
    """
    hashes = {
        (one.manifest.run, device.index): device.uuid_hash
        for one in evidence.runs
        for host in one.manifest.hosts
        for device in host.devices
    }
    clocks: dict[tuple[str, Shape], dict[int, float]] = defaultdict(dict)
    for run, row in evidence.rows(KernelRow):
        if not is_product(row) or not row.clock_mhz or not state.shows_power(row):
            continue
        if "power_cap" in (row.throttle or ""):
            clocks[run, (row.direction, row.dtype, row.shape)][row.device] = row.clock_mhz
    compared = {key: own for key, own in clocks.items() if len(own) > 1}
    by_shape: dict[Shape, list[float]] = defaultdict(list)
    for (_, shape), own in (compared or clocks).items():
        by_shape[shape] += own.values()
    lonely = {one.manifest.run for one in evidence.runs if len(one.manifest.device_hashes) == 1}
    compared |= {key: own for key, own in clocks.items() if key[0] in lonely and key[1] in by_shape}
    found: dict[str, list[float]] = defaultdict(list)
    for (run, shape), own in compared.items():
        usual = median(by_shape[shape])
        for device, clock in own.items():
            found[hashes[run, device]].append(float((usual / clock) ** state.power_exponent))
    if not found:
        return (), 1.0
    beside_rows = {name: float(median(factors)) for name, factors in found.items()}
    mean = fmean(beside_rows.values())
    powers = {name: rounded(power / mean) for name, power in beside_rows.items()}
    ledger.note(
        "clock.device_power",
        float(median(powers.values())),
        "factor",
        (min(powers.values()), max(powers.values())),
        "measured",
        f"{evidence.where(KernelRow, sum(map(len, compared.values())))}: power of products at "
        f"a clock, least and most of {len(powers)} devices; used for steps on those devices",
    )
    devices = tuple(
        DeviceFit(uuid_hash=name, power=powers[name])
        for name in dict.fromkeys(hashes.values())
        if name in powers
    )
    return devices, mean
