"""Why a GPU's clock is held down: bits, their names, and what they come to."""

# NVML's clocks-event-reason bits (nvml.h, nvmlClocksEventReason*); other vendors map onto them.
THROTTLE_BITS = {
    0x2: "application_clocks",
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
    0x100: "display_clocks",
}
# hw_slowdown is set with each of the two below it, which say why
CLASSES = {
    "power_cap": 0x4,
    "heat": 0x20 | 0x40,
    "other": 0x2 | 0x8 | 0x10 | 0x80 | 0x100,
}


def throttle_names(mask: int) -> str | None:
    """The reasons in a bit mask joined by +, idleness left out; None when there is none."""
    names = [name for bit, name in THROTTLE_BITS.items() if mask & bit]
    return "+".join(names) or None


def throttle_class(mask: int) -> str | None:
    """What a mask comes to: heat before the power cap before anything else; None for nothing."""
    return next((name for name in ("heat", "power_cap", "other") if mask & CLASSES[name]), None)
