"""What a GPU draws that computes nothing: idle, between kernels, among peers."""

from calibrate.evidence import Ledger, log_interval
from calibrate.state import CORE_IDLE_W, CORE_SOURCE, ClockState
from calibrate.telemetry import Telemetry
from spec.fitted import Source

# shares of the room between idle and power limit, and of the limit, where no telemetry shows them:
# 0.39 to 0.41, 0.08 to 0.10 and 0.10 to 0.11 on four H200, two H200 and two H100
COMMUNICATION_SHARE, WAITING_SHARE = 0.40, 0.09
IDLE_SHARE = 0.11
# what GPUs that share layers draw while their hosts issue, over what a GPU draws between kernels:
# two H200, two H100 and four H200
SHARED_READY = 1.7


def idle_w(telemetry: Telemetry, limit: float | None, ledger: Ledger) -> float:
    """Power of an idle device, W."""
    measured = telemetry.idle_w()
    if measured is not None:
        value, detail = measured, f"{telemetry.detail}: 5th percentile of power between cases"
    elif limit is not None:
        value, detail = IDLE_SHARE * limit, f"{IDLE_SHARE:.0%} of the power limit: no telemetry"
    else:
        value, detail = CORE_IDLE_W, f"no power could be read: one core, {CORE_SOURCE}"
    source: Source = "assumed" if measured is None else "measured"
    interval = log_interval(value, 0.4 if measured is None else 0.1)
    ledger.note("clock.idle_w", value, "W", interval, source, detail)
    return value


def fit_ready(telemetry: Telemetry, state: ClockState, ledger: Ledger) -> None:
    """Above idle between kernels, and of devices that share layers while their hosts issue.

    Nothing, and None, where no step of next to no arithmetic was looked at.
    """

    def above(watts: float, least: float, name: str, what: str) -> float:
        value = max(watts - state.idle_w, least)
        detail = f"{telemetry.detail}: {what} at the largest clock, above idle"
        interval = log_interval(value, 0.1)
        return ledger.note(f"clock.{name}", value, "W", interval, "measured", detail)

    ready, shared = telemetry.ready_w(), telemetry.ready_shared_w()
    if ready is not None:
        what = "10th percentile of power in nil steps"
        state.ready_w = above(ready, 0.0, "ready_w", what)
    if shared is not None:
        what = "mean power of nil steps over TP, CP or EP"
        state.ready_shared_w = above(shared, state.ready_w, "ready_shared_w", what)
    elif state.ready_w:
        value = SHARED_READY * state.ready_w
        interval = state.ready_w, (2 * SHARED_READY - 1) * state.ready_w
        detail = f"{SHARED_READY:g} times clock.ready_w: no nil steps over TP, CP or EP"
        state.ready_shared_w = ledger.note(
            "clock.ready_shared_w", value, "W", interval, "assumed", detail
        )


def among_peers_w(telemetry: Telemetry, state: ClockState, ledger: Ledger) -> dict[str, float]:
    """Power above idle while a device communicates, and while it waits for a peer, by name."""
    powers = {}
    for name, size, share, measured in (
        ("communication_w", "large", COMMUNICATION_SHARE, telemetry.communication_w()),
        ("waiting_w", "small", WAITING_SHARE, telemetry.waiting_w()),
    ):
        source: Source = "assumed" if measured is None else "measured"
        if measured is not None:
            value = max(measured - state.idle_w, 0.0)
            interval = log_interval(value, 0.1)
            detail = f"{telemetry.detail}: power during {size} collectives, above idle"
        else:
            value = share * state.room_w
            interval = (0.5 * value, 1.5 * value)
            detail = f"{share:.0%} of {state.room_reason}; no telemetry of it"
        ledger.note(f"clock.{name}", value, "W", interval, source, detail)
        powers[name] = value
    return powers
