"""What a published row prints of its speed, turned to seconds per step."""

import itertools
import math
import re
from dataclasses import dataclass

from simulate.series.rows import SeriesRow
from spec.model import ModelSpec

# What a metric's name means, its blanks and underscores as blanks. MFU counts a model's FLOPs and
# HFU recomputed ones.
_S, _GPU, _PER = r"(s|sec|seconds?)", r"(gpu|device|gcd)s?", r"(/| per )"
_METRICS = (
    (
        rf"((train )?(step|iteration|iter) tim(e|ing)\b"
        rf"|(time|ms|msecs?|milliseconds?|{_S}){_PER}(step|iter|iteration)\b)",
        "step",
    ),
    (rf"(tgs\b|tok(en)?s?{_PER}({_S}{_PER}{_GPU}|{_GPU}{_PER}{_S})\b)", "tokens"),
    (rf"tok(en)?s?{_PER}{_S}( total)?$", "tokens_total"),
    (rf"(samples?|seq(uence)?s?){_PER}({_S}{_PER}{_GPU}|{_GPU}{_PER}{_S})\b", "samples_gpu"),
    (rf"(samples?|seq(uence)?s?){_PER}{_S}( total)?$", "samples"),
    (r"(mfu|model flops? utili[sz]ation)\b", "mfu"),
    (r"(hfu|hardware flops? utili[sz]ation)\b", "hfu"),
)
UTILISATION = ("mfu", "hfu")
RATES = ("tokens", "tokens_total", "samples", "samples_gpu")
ALIKE = 1.1  # two times of one step


def metric_kind(name: str) -> str | None:
    """What a metric's name means: a kind of `_METRICS`, model or hardware (FLOPs)."""
    plain = re.sub(r"[\s_]+", " ", name.strip().lower())
    plain = re.sub(r"^((elapsed|avg\.?|average|mean|median|total|global) )+", "", plain)
    if re.search(r"\((k|m|min|minutes|h|hours|us)\)", plain):
        return None
    if "tflop" in plain and re.search(rf"{_PER}{_GPU}\b", plain) and "aggregate" not in plain:
        return "hardware" if "hardware" in plain or "recompute" in plain else "model"
    return next((kind for pattern, kind in _METRICS if re.match(pattern, plain)), None)


def _unit(name: str, kind: str, value: float) -> float:
    """What a value is to be multiplied with, for seconds and shares."""
    if kind == "step" and re.search(r"(?<![a-z])(ms|msecs?|milliseconds?)(?![a-z])", name.lower()):
        return 1e-3
    percent = kind in UTILISATION and ("%" in name or value > 1)
    return 1e-2 if percent else 1.0


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
    names none.
    """
    found = metrics_of(row)
    printed = [one for one in found if one.value is not None]
    if not printed and row.blind:
        named = any(row.text(f"metric{suffix}") for suffix in ("", "2", "3"))
        printed = found or [Metric("step_time_s", "step", None)] * (row.use == "test" and not named)
    return min(printed, key=lambda one: one.kind in UTILISATION, default=None)


def metrics_of(row: SeriesRow) -> list[Metric]:
    """All of a row's metrics that are understood."""
    found = []
    for suffix in ("", "2", "3"):
        name, value = row.text(f"metric{suffix}"), row.number(f"value{suffix}")
        kind = metric_kind(name)
        if kind is not None:
            unit = _unit(f"{name} {row.text(f'value{suffix}')}", kind, value or 0.0)
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
    """Seconds per step that a metric's value of 1 means; `peak_tflops` is what utilisation
    is of.

    Hardware FLOPs count the forward pass again under full recomputation: 8 instead of 6 per
    weight and token (arXiv 2104.04473, eq. 3). See `SeriesRow.recompute_counted`.
    """
    kind, unit = found.kind, found.unit
    again = kind in ("hardware", "hfu") or row.recompute_counted
    if kind == "step":
        return unit
    if kind == "samples":
        return batch / unit
    if kind == "samples_gpu":
        return batch / (unit * gpus)
    if kind == "tokens":
        return batch * model.seq_len / (unit * gpus)
    if kind == "tokens_total":
        return batch * model.seq_len / unit
    if kind in UTILISATION:
        unit *= peak_tflops
    flops = model.step_flops(batch)
    if again and recompute == "full":  # layers only: logits are not computed again
        logits = 2 * model.vocab * model.hidden * model.seq_len * batch
        flops += flops / 3 - logits
    return flops / (unit * 1e12 * gpus)


def contradiction(row: SeriesRow, model: ModelSpec, batch: int, gpus: int) -> str | None:
    """A sentence where a row's step time and a rate beside it make another batch than it prints."""
    found = [one for one in metrics_of(row) if one.value is not None]
    steps = [one for one in found if one.kind == "step"]
    rates = [one for one in found if one.kind in RATES]
    if row.whole("global_batch") is None or row.whole("seq_len") is None:
        return None
    for step, rate in itertools.product(steps, rates):
        each, times = (
            one.seconds(unit_seconds(one, row, model, batch, gpus, "none", 0.0))
            for one in (step, rate)
        )
        if each and times and abs(math.log(each / times)) > math.log(ALIKE):
            return (
                f"{step.name} {step.value:.8g} and {rate.name} {rate.value:.8g} make "
                f"{batch * each / times:.3g} sequences of {model.seq_len} a step, and global_batch "
                f"is {batch}: correct what is another run's"
            )
    return None
