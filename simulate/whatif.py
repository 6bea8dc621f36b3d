"""Calibrations changed as a question asks: on devices that were measured, at another power cap."""

from collections.abc import Sequence

from spec.calibration import Calibration, ClockFit


def with_clock(
    calibration: Calibration, clock: ClockFit, product_power: float = 1.0
) -> Calibration:
    """The calibration with another clock model, its products' power times a factor."""
    kernels = tuple(
        one.model_copy(update={"active_power_w": one.active_power_w * product_power})
        if one.tflops and product_power != 1
        else one
        for one in calibration.kernels
    )
    changed = calibration.model_copy(update={"clock": clock, "kernels": kernels})
    for name in ("kernel_fits", "collective_fits"):  # cached by the calibration it was copied from
        changed.__dict__.pop(name, None)
    return changed


def on_devices(calibration: Calibration, hashes: Sequence[str]) -> Calibration:
    """The calibration for some devices: their mean where they were measured, else as it is."""
    known = {one.uuid_hash: one.power for one in calibration.clock.devices}
    powers = [known[name] for name in hashes if name in known]
    if not powers:
        return calibration
    return with_clock(calibration, calibration.clock, sum(powers) / len(powers))
