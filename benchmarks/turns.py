"""Products and memory-bound kernels in turns on an NVIDIA GPU: what a lower clock leaves of both.

    python -m benchmarks.turns --out benchmarks/turns.json

Eleven gigabytes and a minute of one GPU; no setting of it is changed. `turns.json` is of one H200
(docs/power.md has what follows from it). Clock and energy are NVML's over the last three of six
seconds, durations those of CUDA events.
"""

import argparse
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

# memory-bound kernel, products of a turn, memory-bound kernels of a turn
TURNS = (
    *(("accumulate", 4 - others, others) for others in range(5)),
    *(("add", products, others) for products, others in ((0, 4), (1, 4), (2, 4), (4, 2), (4, 0))),
)
SECONDS, SETTLE, SAMPLE_S, TURNS_A_BATCH = 6.0, 3.0, 0.02, 8


def operations() -> dict[str, Callable[[], Any]]:
    """An 8192 cubed product, a bf16 gradient added to an fp32 one, a sum of bf16 tensors."""
    import torch

    def random(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda").to(torch.bfloat16)

    left, right, x, y, gradient = (random(*s) for s in ((8192, 8192),) * 2 + ((2**29,),) * 3)
    product, total = torch.empty_like(left), torch.empty_like(x)
    main = torch.zeros(2**29, device="cuda")
    return {
        "gemm": lambda: torch.mm(left, right, out=product),
        "accumulate": lambda: main.add_(gradient),
        "add": lambda: torch.add(x, y, out=total),
    }


def turn(
    ops: dict[str, Callable[[], Any]], kind: str, products: int, others: int
) -> dict[str, Any]:
    """Clock, MHz, power, W, and each kernel's median duration, ms, once the clock has settled."""
    import pynvml
    import torch

    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    samples: list[tuple[float, int, int]] = []  # time, MHz, mJ
    done = threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_S):
            clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
            energy = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
            samples.append((time.monotonic(), clock, energy))

    sampler = threading.Thread(target=sample)
    sampler.start()
    start, times = time.monotonic(), {"gemm": [], kind: []}  # type: ignore[var-annotated]
    while time.monotonic() - start < SECONDS:
        marks = []
        for name, count in (("gemm", products), (kind, others)) * TURNS_A_BATCH:
            if count:
                before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                before.record()
                for _ in range(count):
                    ops[name]()
                after.record()
                marks.append((name, count, before, after))
        torch.cuda.synchronize()
        if time.monotonic() - start > SETTLE:
            for name, count, before, after in marks:
                times[name].append(before.elapsed_time(after) / count)
    done.set()
    sampler.join()
    settled = [one for one in samples if one[0] - start > SETTLE]
    (begin, _, first), (end, _, last) = settled[0], settled[-1]
    return {
        "kind": kind,
        "gemms": products,
        "others": others,
        "clock_mhz": fmean(clock for _, clock, _ in settled),
        "power_w": (last - first) / (end - begin) / 1e3,
        "ms": {name: median(some) for name, some in times.items() if some},
    }


def main() -> None:
    """Every turn, a line each, and all of them to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, default=Path("turns.json"), metavar="FILE.json")
    out = parser.parse_args().out
    import pynvml

    pynvml.nvmlInit()
    ops, rows = operations(), []
    for one in TURNS:
        rows.append(turn(ops, *one))
        print(json.dumps(rows[-1]), flush=True)
    out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
