"""What held the clocks down while cases ran: shares of the telemetry's samples, by reason."""

import numpy as np

from calibrate.evidence import TELEMETRY_FILE, Evidence, Ledger, relative
from calibrate.telemetry import read_columns
from spec.throttle import CLASSES, throttle_class

BUSY_PCT = 50.0  # of its time a device ran kernels, for a sample to count


def note_throttling(evidence: Evidence, ledger: Ledger) -> None:
    """Enter the share of busy samples that each reason holds."""
    shares: dict[str, list[float]] = {name: [] for name in CLASSES}
    samples, files = 0, []
    for one in evidence.runs:
        path = one.path / TELEMETRY_FILE
        if not path.exists():
            continue
        columns = read_columns(path, ("throttle_reasons", "utilisation_pct"))
        if columns is None:
            continue
        masks = columns["throttle_reasons"]
        busy = np.isfinite(masks) & (columns["utilisation_pct"] >= BUSY_PCT)
        if not busy.any():
            continue
        known, counts = np.unique(masks[busy].astype(np.int64), return_counts=True)
        files.append(relative(path))
        samples += int(busy.sum())
        for name in shares:
            held = sum(int(n) for mask, n in zip(known, counts, strict=True)
                       if throttle_class(int(mask)) == name)  # fmt: skip
            shares[name].append(held / int(busy.sum()))
    for name, some in shares.items():
        if some:
            ledger.note(
                f"throttle.{name}_share",
                float(np.median(some)),
                "share",
                (min(some), max(some)),
                "measured",
                f"{', '.join(files)}: {samples} samples of busy devices; median, least and most "
                "of the runs",
            )
