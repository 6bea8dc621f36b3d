"""Measures the clock that a GPU's multiprocessors count, beside the one that its monitor shows.

    python -m benchmarks.true_clock [--device N] [--seconds S] [--json [FILE]]

Products, sums and spins take turns under the power cap. Between them a kernel of one thread reads a
multiprocessor's cycle counter and its nanosecond counter; cycles over nanoseconds between two such
readings are the mean clock of what ran there. Needs an NVIDIA GPU and `cupy`, which compiles that
kernel. docs/power.md has what came out.
"""

import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from measure.devices import open_devices
from spec import command
from spec.errors import UserError, WorkError

STAMP = r"""
extern "C" __global__ void stamp(unsigned long long* out, int place) {
    unsigned multiprocessor; unsigned long long ns, cycles;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles));
    out[3 * place] = multiprocessor; out[3 * place + 1] = ns; out[3 * place + 2] = cycles;
}
"""
INSTALL = "pip install -e '.[measure,nvidia]' cupy-cuda13x, or the cupy of your CUDA"
MOST, SETTLING_S, AHEAD = 200_000, 1.5, 3  # stamps; not counted; turns issued before one has ended
CYCLES_PER_US = 1800  # of a spin, about


@dataclass(frozen=True)
class Load:
    """What takes turns: products of `size` cubed, sums of 8192 squared and a spin."""

    products: int = 0
    sums: int = 0
    spin_us: int = 0
    size: int = 8192

    def __str__(self) -> str:
        return f"{self.products} of {self.size}, {self.sums} sums, {self.spin_us} us"


LOADS = (
    Load(products=12),
    Load(sums=40),
    Load(products=4, sums=4),
    Load(products=2, sums=8),
    Load(products=4, spin_us=1000),
    Load(products=1, spin_us=500),
    Load(products=60, size=2048),
    Load(products=30, sums=4, size=2048),
)


@dataclass(frozen=True)
class Found:
    """MHz shown and counted, over whole turns and by what ran, and how long a product lasts."""

    load: str
    shown_mhz: float
    true_mhz: float | None
    products_mhz: float | None
    sums_mhz: float | None
    spin_mhz: float | None
    product_us: float | None


def mean_mhz(stamps: Any, pairs: Iterable[tuple[int, int]]) -> float | None:
    """Cycles over time between stamps, (multiprocessor, ns, cycles), of the same multiprocessor."""
    same = [(a, b) for a, b in pairs if stamps[a][0] == stamps[b][0]]
    ns = sum(int(stamps[b][1]) - int(stamps[a][1]) for a, b in same)
    return 1e3 * sum(int(stamps[b][2]) - int(stamps[a][2]) for a, b in same) / ns if ns else None


class Gpu:
    """One device, its operands and its stamps."""

    def __init__(self, device: int) -> None:
        monitors = open_devices("nvidia")
        if device >= len(monitors):
            raise UserError(
                f"--device is {device}; of this host's GPUs the last is {len(monitors) - 1}"
            )
        try:
            import cupy
            import torch
        except ImportError as error:
            raise UserError(f"{error.name} is missing; {INSTALL}") from None
        torch.cuda.set_device(device)
        cupy.cuda.Device(device).use()
        self.monitor = monitors[device]
        self.torch: Any = torch
        self.kernel = cupy.RawKernel(STAMP, "stamp")
        self.out, self.count = cupy.zeros(3 * MOST, dtype="uint64"), 0
        self.stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        of = {"device": "cuda", "dtype": torch.bfloat16}
        self.operands = {size: self.torch.randn(size, size, **of) for size in (2048, 8192)}
        self.results = {size: torch.empty_like(one) for size, one in self.operands.items()}

    def stamp(self) -> int:
        """Read the counters behind what was issued; the stamp's place."""
        with self.stream:
            self.kernel((1,), (1,), (self.out, self.count))
        self.count += 1
        return self.count - 1

    def turn(self, load: Load) -> tuple[int, int, int, int]:
        """Issue one turn: places of the stamps before and behind products, sums and the spin."""
        operand, result = self.operands[load.size], self.results[load.size]
        begin = self.stamp()
        for _ in range(load.products):
            self.torch.mm(operand, operand, out=result)
        multiplied = self.stamp()
        for _ in range(load.sums):
            self.torch.add(self.operands[8192], 1.0, out=self.results[8192])
        added = self.stamp()
        if load.spin_us:
            self.torch.cuda._sleep(load.spin_us * CYCLES_PER_US)
        return begin, multiplied, added, self.stamp()

    def run(self, load: Load, seconds: float) -> Found:
        """Turns for so long, of which those of the first 1.5 s do not count."""
        self.count, begin = 0, time.monotonic()
        turns, ends, shown = [], [], []
        while (at := time.monotonic() - begin) < seconds and self.count < MOST - 4:
            places = self.turn(load)
            ends.append(self.torch.cuda.Event())
            ends[-1].record()
            if len(ends) > AHEAD:
                ends[-1 - AHEAD].synchronize()
            if at > SETTLING_S:
                turns.append(places)
                shown.append(self.monitor.sm_clock_mhz())
        self.torch.cuda.synchronize()
        told = [clock for clock in shown if clock is not None]
        if not told:
            raise WorkError("NVML shows no clock of this GPU")
        stamps = self.out.get().reshape(-1, 3)

        def between(first: int, asked: int) -> float | None:
            pairs = ((one[first], one[first + 1]) for one in turns)
            return mean_mhz(stamps, pairs) if asked else None

        ns = statistics.fmean(float(stamps[b][1]) - float(stamps[a][1]) for a, b, *_ in turns)
        return Found(
            load=str(load),
            shown_mhz=statistics.fmean(told),
            true_mhz=mean_mhz(stamps, ((a[0], b[0]) for a, b in pairwise(turns))),
            products_mhz=between(0, load.products),
            sums_mhz=between(1, load.sums),
            spin_mhz=between(2, load.spin_us),
            product_us=ns / 1e3 / load.products if load.products else None,
        )


def main(arguments: Sequence[str]) -> None:
    """Run all loads and print a line for each."""
    parser = command.Parser(prog="python -m benchmarks.true_clock", description=__doc__)
    parser.add_argument(
        "--device",
        type=command.whole(0, 1023),
        default=0,
        metavar="N",
        help="which GPU (default: 0)",
    )
    seconds = command.whole(int(SETTLING_S) + 1, 600)
    parser.add_argument(
        "--seconds", type=seconds, default=5, metavar="S", help="of each load (default: 5)"
    )
    command.add_json(parser)
    options = parser.parse_args(arguments)
    gpu = Gpu(options.device)
    found = [asdict(gpu.run(load, options.seconds)) for load in LOADS]
    header = tuple(found[0])
    lines = [
        tuple(f"{v:.0f}" if isinstance(v, float) else v or "-" for v in one.values())
        for one in found
    ]
    text = "\n".join(command.aligned([header, *lines]))
    command.emit(options.json, {"schema": "true-clock/1", "loads": found}, text)


if __name__ == "__main__":
    sys.exit(command.run(main))
