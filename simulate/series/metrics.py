"""What a published row prints of its speed, turned to seconds per step."""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from simulate.series.hardware import gpus_of_a_node, node_of
from simulate.series.metric_names import FLOPS, RATES, UTILISATION, metric_kind, metric_unit
from simulate.series.rows import METRICS, SeriesRow
from spec.model import ModelSpec

ALIKE = 1.1  # two times of one step
# FLOPs with full recomputation over the model's: the forward pass twice
AGAIN, NEAR_AGAIN = 4 / 3, 1.08


Kinds = tuple[str, ...]


@dataclass(frozen=True)
class Metric:
    """What a row prints of its speed; `value` is None where it is to be projected blindly."""

    name: str
    kind: str
    value: float | None
    unit: float = 1.0

    def of_fp8(self, fp8: bool) -> bool:
        """Whether a utilisation is of the FP8 peak: as its name says, else as the row computes.

        Sources print it so: of the FP8 rows of llm-foundry and dgxc-benchmarking that print time
        and MFU the bf16 peak would give twice that (medians of 1.99 and 2.00), of their bf16 rows
        1.00.
        """
        if re.search("bf16|bfloat16", self.name.lower()):
            return False
        return fp8 or re.search("fp8|float8", self.name.lower()) is not None

    def at(self, seconds: float, unit_s: float) -> float:
        """The value of a step of so many seconds, where one of 1 means `unit_s`."""
        return seconds / unit_s if self.kind == "step" else unit_s / seconds

    def seconds(self, unit_s: float) -> float | None:
        """What the value means, where one of 1 means `unit_s`."""
        if self.value is None:
            return None
        return self.value * unit_s if self.kind == "step" else unit_s / self.value


def metric_of(row: SeriesRow) -> Metric | None:
    """The first of a row's metrics that become seconds; utilisation where no other does.

    A blind row's is the one that it leaves empty; of one that is marked its step time where it
    names none that is understood.
    """
    found = metrics_of(row)
    printed = [one for one in found if one.value is not None]
    if not printed and row.blind:
        printed = found or [Metric("step_time_s", "step", None)] * (row.use == "test")
    return min(printed, key=lambda one: one.kind in UTILISATION, default=None)


def metrics_of(row: SeriesRow) -> list[Metric]:
    """All of a row's metrics that are understood."""
    found = []
    for metric, cell in METRICS:
        name, value = row.text(metric), row.number(cell)
        kind = metric_kind(name)
        if kind is not None:
            unit = metric_unit(f"{name} {row.text(cell)}", kind, value or 0.0)
            found.append(Metric(name, kind, value, unit))
    return found


def unit_seconds(
    found: Metric,
    row: SeriesRow,
    model: ModelSpec,
    batch: int,
    gpus: int,
    recompute: str,
    peak_tflops: float,
) -> float:
    """Seconds per step that a metric's value of 1 means; utilisation is of `peak_tflops`.

    Hardware FLOPs count the forward pass again under full recomputation: 8 instead of 6 per
    weight and token (arXiv 2104.04473, eq. 3). See `SeriesRow.recompute_counted`.
    """
    kind, unit = found.kind, found.unit
    again = kind in ("hardware", "hardware_total", "hfu") or row.recompute_counted
    if kind == "step":
        return unit
    if kind == "steps":
        return 1 / unit
    shares = float(gpus)
    if kind.endswith("_node"):
        node = node_of(row.text("gpu_type"))
        shares = max(gpus / (gpus_of_a_node(node) if node else 1), 1.0)
    elif kind.endswith("_total") or kind == "samples":
        shares = 1.0
    if kind in RATES:
        return batch * (model.seq_len if kind.startswith("tokens") else 1) / (unit * shares)
    if kind in UTILISATION:
        unit *= peak_tflops
    flops = model.step_flops(batch)
    if again and recompute == "full":  # layers only: logits are not computed again
        logits = 2 * model.vocab * model.hidden * model.seq_len * batch
        flops += flops / 3 - logits
    return flops / (unit * 1e12 * shares)


_STEPS = ("step", "steps")


def _beside(
    row: SeriesRow, model: ModelSpec, batch: int, gpus: int, one: Kinds, other: Kinds
) -> Iterator[tuple[Metric, Metric, float, float]]:
    """A row's metrics of two kinds, each with the seconds per step that it means by itself.

    Those of FLOP/s as the model's; none where batch or length are not printed.
    """
    if row.whole("global_batch") is None or row.whole("seq_len") is None:
        return
    found = [
        (metric, metric.seconds(unit_seconds(metric, row, model, batch, gpus, "none", 0.0)))
        for metric in metrics_of(row)
        if metric.kind in (*one, *other)
    ]
    for (first, each), (second, times) in itertools.product(found, found):
        if first.kind in one and second.kind in other and each and times:
            yield first, second, each, times


def counts_recomputation(row: SeriesRow, model: ModelSpec, batch: int, gpus: int) -> str | None:
    """A sentence where a row's FLOP/s hold full recomputation, by a time or a rate beside them."""
    if row.lora or row.recompute_counted:
        return None
    for known, flops, each, times in _beside(row, model, batch, gpus, (*_STEPS, *RATES), FLOPS):
        if abs(math.log(each / times / AGAIN)) <= math.log(NEAR_AGAIN):
            return (
                f"{flops.name} {flops.value:.8g} is {each / times:.2f} times the model's by "
                f"{known.name} {known.value:.8g}: it counts full recomputation"
            )
    return None


def contradiction(row: SeriesRow, model: ModelSpec, batch: int, gpus: int) -> str | None:
    """A sentence where a row's step time and a rate beside it make another batch than it prints."""
    for step, rate, each, times in _beside(row, model, batch, gpus, _STEPS, RATES):
        if abs(math.log(each / times)) > math.log(ALIKE):
            return (
                f"{step.name} {step.value:.8g} and {rate.name} {rate.value:.8g} make "
                f"{batch * each / times:.3g} sequences of {model.seq_len} a step, and global_batch "
                f"is {batch}: correct what is another run's"
            )
    return None
