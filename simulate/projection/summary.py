"""The terminal summary of a projection."""

from collections.abc import Mapping
from typing import Any

from reports.projection import fabric_words
from simulate.power.energy import lines as power_lines
from spec.interval import interval_text


def _memory(value: Mapping[str, Any]) -> str:
    """The three peaks of the fullest device."""
    peaks = (
        f"{name} {value[name]['median']:.1f} [{value[name]['low']:.1f}, {value[name]['high']:.1f}]"
        for name in ("allocated", "reserved", "device")
    )
    return f"{', '.join(peaks)} GiB of {value['capacity']:.1f} GiB"


def _percent(one: Mapping[str, float]) -> str:
    return f"{one['median']:.2%} [{one['low']:.2%}, {one['high']:.2%}]"


def summary(value: Mapping[str, Any]) -> str:
    """The terminal summary of a projection's JSON."""
    inputs = value["inputs"]
    p = inputs["parallelism"]

    def show(name: str, scale: float = 1.0, digits: int = 3) -> str:
        return interval_text(value[name], scale=scale, digits=digits)

    breakdown = value["breakdown_s"]
    step = value["step_time_s"]["median"]
    parts = ", ".join(
        f"{'other (host)' if name == 'other' else name} {share / step:.1%}"
        for name, share in sorted(breakdown.items(), key=lambda item: -item[1])
        if share / step >= 0.0005
    )
    peak = "assumed " if "peak_bf16_tflops" in inputs["node"]["assumed"] else ""
    sources: dict[str, int] = {}
    for one in value["provenance"]:
        sources[one["source"]] = sources.get(one["source"], 0) + 1
    lines = [
        f"{inputs['model']['name']} on {inputs['gpus']} GPUs: {inputs['node']['name']} nodes, "
        f"{fabric_words(inputs)}, calibrated on {inputs['calibration']['system']}",
        f"parallelism       {p['name']} ({p['chosen']})",
        f"step time         {show('step_time_s')} s",
        f"throughput        {show('tokens_per_s', 1e-6)} million tokens/s, "
        f"{show('tokens_per_s_per_gpu', 1, 4)} per GPU",
        f"MFU               {show('mfu', 100)} % of the {peak}bf16 peak, attention's masked half "
        "counted",
        f"breakdown         {parts}",
        f"within a run      1 step in 20 is {_percent(value['step_spread'])} over the median",
        f"goodput           {_percent(value['goodput']['share'])}, one failure every "
        f"{value['goodput']['failure_every_hours']:.3g} h",
        f"power per GPU     {show('power_w_per_gpu')} W at {value['clock_mhz']['median']:.0f} MHz",
        f"energy per step   {show('energy_j_per_step', 1e-3, 5)} kJ, "
        f"{show('tokens_per_j')} tokens/J",
        *power_lines(value),
        f"memory            {_memory(value['memory_gib'])}",
        "sources           "
        + ", ".join(f"{count} parameters {source}" for source, count in sorted(sources.items()))
        + f"; intervals hold {value['step_time_s']['level']:.0%}, all results simulated",
    ]
    for point in value.get("scaling", ()):
        if "impossible" in point:
            lines.append(f"at {point['gpus']:,} GPUs".ljust(18) + point["impossible"])
            continue
        step, mfu = point["step_time_s"], point["mfu"]["median"]
        lines.append(
            f"at {point['gpus']:,} GPUs".ljust(18)
            + f"{interval_text(step, 's', digits=4)}, MFU {mfu:.1%}, "
            + point["parallelism"]
        )
    astra = value.get("astra_sim")
    if astra and astra["ran"]:
        lines.append(
            f"Astra-Sim         {astra['step_time_s']:.4g} s ({astra['difference']:+.3%} against "
            f"our timeline; {astra['ranks']} ranks in {astra['wall_s']:.1f} s, {astra['version']})"
        )
    elif astra:
        lines.append(f"Astra-Sim         {astra['note']}")
    lines += [f"note              {sentence}" for sentence in value["warnings"]]
    return "\n".join(lines)
