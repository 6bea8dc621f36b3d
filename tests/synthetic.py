"""A made-up system whose true parameters are known: result sets to try fits and simulators on.

Nothing here was measured. `write_result_set` draws the rows that measuring a fake GPU would give
from the constants of `Truth`, the same ones for the same seed; a fit that sees the rows should give
the constants back.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import sin
from pathlib import Path

import numpy as np

from spec.collective import COLLECTIVES, busbw_factor
from spec.files import write_json, write_table
from spec.kernel import Kernel, ceil_div
from spec.manifest import Device, Host, Manifest
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.records import TABLES, CollectiveRow, InterferenceRow, KernelRow
from spec.results import read_result_set
from spec.row import Row
from spec.step import kernels_of

COMPUTE = ("gemm", "grouped_gemm", "attention")
SIZES = tuple(2**power for power in range(10, 31, 2))


@dataclass(frozen=True)
class Truth:
    """The fake GPU: rates at the reference clock."""

    reference_mhz: float = 1980.0
    power_limit_w: float = 700.0
    idle_w: float = 80.0
    power_exponent: float = 2.4
    compute_w: float = 900.0
    memory_w: float = 420.0
    device_spread: float = 0.02  # sustained clock from one device to another
    launch_us: float = 3.5
    host_us: float = 6.0
    memory_gbytes_per_s: float = 4000.0
    multiprocessors: int = 132
    noise: float = 0.01  # of one row, from one shape to the next
    interference: float = 0.12
    step_latency_us: float = 1.2
    collective_launch_us: float = 9.0

    def tflops(self, kernel: Kernel) -> float:
        """Ceiling of a compute-bound operation."""
        return {
            ("gemm", "forward"): 800.0,
            ("gemm", "dgrad"): 760.0,
            ("gemm", "wgrad"): 730.0,
            ("attention", "forward"): 620.0,
            ("attention", "backward"): 480.0,
        }.get((kernel.op, kernel.direction), 600.0)

    def gbytes_per_s(self, op: str) -> float:
        """Achieved memory bandwidth of an operation."""
        share = {"copy": 0.85, "adam": 0.8, "rope": 0.3, "cross_entropy": 0.4, "rmsnorm": 0.5}
        return self.memory_gbytes_per_s * share.get(op, 0.7)

    def kernel_us(self, kernel: Kernel) -> float:
        """Duration at the reference clock, without noise: roofline and a smooth departure."""
        memory = kernel.bytes / (self.gbytes_per_s(kernel.op) * 1e3)
        compute = 0.0
        if kernel.flops:
            compute = kernel.flops / (self.tflops(kernel) * 1e6)
            if kernel.op == "gemm":
                m, n, k = kernel.dims
                rows, columns = {"forward": (m, n), "dgrad": (m, k), "wgrad": (n, k)}[
                    kernel.direction
                ]
                tiles = ceil_div(rows, 128) * ceil_div(columns, 256)
                waves = ceil_div(tiles, self.multiprocessors) * self.multiprocessors
                compute *= waves * 128 * 256 / (rows * columns)
        departure = 0.05 * sin(sum(np.log(kernel.dims)))
        return (self.launch_us + max(compute, memory)) * float(np.exp(departure))

    def collective_us(self, kind: str, ranks: int, nbytes: float) -> float:
        """Duration in the node: latency by ring steps, then bus bandwidth."""
        steps = 1 if kind == "send_recv" else (ranks - 1) * (2 if kind == "all_reduce" else 1)
        latency = self.collective_launch_us + steps * self.step_latency_us
        busbw = 390.0 if kind == "send_recv" else 360.0
        return latency + nbytes * busbw_factor(kind, ranks) / (busbw * 1e3)

    def active_w(self, op: str) -> float:
        """Power above idle at the reference clock."""
        return self.compute_w if op in COMPUTE else self.memory_w

    def clock_mhz(self, op: str) -> float:
        """Sustained clock under the power cap."""
        room = self.power_limit_w - self.idle_w
        share = (room / self.active_w(op)) ** (1 / self.power_exponent)
        return self.reference_mhz * min(1.0, share)


def shapes(
    models: Iterable[str] = ("llama3-8b", "llama3-70b"), tps: Iterable[int] = (1, 2, 4, 8)
) -> list[Kernel]:
    """Kernels of the models' training steps, as `measure` times them, and launch-bound ones."""
    found: set[Kernel] = set()
    tps = tuple(tps)
    for name in models:
        model = load_model(name)
        for tp in tps:
            p = Parallelism(tp=tp, sequence_parallel=tp > 1)
            found |= kernels_of(model, p)
        small = model.resized(seq_len=64)
        found |= kernels_of(small, Parallelism(tp=max(tps), sequence_parallel=max(tps) > 1))
    found |= {Kernel("copy", "forward", (2**power,)) for power in range(14, 31, 2)}
    found |= {Kernel("adam", "forward", (10**power,)) for power in range(5, 10)}
    vectors = {one for one in found if one.op == "grad_accumulate" and one.dims[0] < 2**16}
    # in the fake GPU's memory; a vector's gradient is too short to be sustained at so much power
    fitting = [kernel for kernel in found if kernel.bytes < 120e9 and kernel not in vectors]
    return sorted(fitting, key=lambda kernel: (kernel.op, kernel.direction, kernel.dims))


def _quantiles(median: float, spread: float) -> dict[str, float | int]:
    return {
        "repeats": 20,
        "median_us": median,
        "p10_us": median * (1 - 1.28 * spread),
        "p90_us": median * (1 + 1.28 * spread),
        "min_us": median * (1 - 2 * spread),
        "mean_us": median * (1 + 0.1 * spread),
        "std_us": median * spread,
    }


def kernel_rows(truth: Truth, devices: int, rng: np.random.Generator) -> list[KernelRow]:
    """kernels.csv: every shape in a burst on device 0, compute-bound ones sustained as well."""
    rows = []
    tilt = np.exp(rng.normal(0, truth.device_spread, devices))
    tilt /= tilt[0]
    for index, kernel in enumerate(shapes()):
        exact = truth.kernel_us(kernel) * float(np.exp(rng.normal(0, truth.noise)))
        states = [("burst", 0)]
        if kernel.op in COMPUTE or index % 5 == 0:
            states.append(("sustained", 0))
        if index % 7 == 0:
            states += [("sustained", device) for device in range(1, devices)]
        for state, device in states:
            clock = truth.reference_mhz
            power = None
            if state == "sustained":
                clock = min(clock, truth.clock_mhz(kernel.op) * float(tilt[device]))
                scale = (clock / truth.reference_mhz) ** truth.power_exponent
                wanted = truth.idle_w + truth.active_w(kernel.op) * scale
                power = min(wanted, truth.power_limit_w) * float(np.exp(rng.normal(0, 0.005)))
            slower = truth.reference_mhz / clock if kernel.op in COMPUTE else 1.0
            time = exact * slower * float(np.exp(rng.normal(0, 0.003)))
            rows.append(
                KernelRow.model_validate(
                    {
                        "case_id": f"{kernel.op}-{kernel.direction}-{index}-{state}-{device}",
                        "role": "fit",
                        "op": kernel.op,
                        "direction": kernel.direction,
                        "dtype": kernel.dtype,
                        "shape": kernel.shape,
                        "state": state,
                        "implementation": "synthetic",
                        "device": device,
                        "host_us": truth.host_us * float(np.exp(rng.normal(0, 0.05))),
                        "clock_mhz": clock,
                        "power_w": power,
                        "temperature_c": 50.0,
                        "throttle": "SwPowerCap" if clock < truth.reference_mhz else None,
                        **_quantiles(time, 0.01),
                    }
                )
            )
    return rows


def collective_rows(truth: Truth, devices: int, rng: np.random.Generator) -> list[CollectiveRow]:
    """collectives.csv: powers of four from 1 KiB to 1 GiB on 2 and on all devices."""
    rows = []
    for kind in COLLECTIVES:
        for ranks in sorted({2, devices}):
            for nbytes in SIZES:
                exact = truth.collective_us(kind, ranks, nbytes)
                time = exact * float(np.exp(rng.normal(0, truth.noise)))
                busbw = nbytes * busbw_factor(kind, ranks) / time / 1e3
                rows.append(
                    CollectiveRow.model_validate(
                        {
                            "case_id": f"{kind}-{ranks}-{nbytes}",
                            "role": "fit",
                            "collective": kind,
                            "backend": "synthetic",
                            "ranks": ranks,
                            "nodes": 1,
                            "bytes": nbytes,
                            "dtype": "bf16",
                            "busbw_gbytes_per_s": busbw,
                            **_quantiles(time, 0.02),
                        }
                    )
                )
    return rows


def interference_rows(truth: Truth, rng: np.random.Generator) -> list[InterferenceRow]:
    """interference.csv: GEMMs beside all-reduces."""
    rows = []
    for index, width in enumerate((2048, 4096, 8192)):
        kernel = Kernel("gemm", "forward", (4096, width, 4096))
        alone = truth.kernel_us(kernel)
        slowed = alone * (1 + truth.interference * float(np.exp(rng.normal(0, 0.1))))
        together = truth.collective_us("all_reduce", 2, 2**26)
        rows.append(
            InterferenceRow.model_validate(
                {
                    "case_id": f"interference-{index}",
                    "role": "fit",
                    "op": kernel.op,
                    "direction": kernel.direction,
                    "dtype": kernel.dtype,
                    "shape": kernel.shape,
                    "collective": "all_reduce",
                    "ranks": 2,
                    "bytes": 2**26,
                    "kernel_alone_us": alone,
                    "collective_alone_us": together,
                    "collective_with_us": together * 1.1,
                    **_quantiles(slowed, 0.01),
                }
            )
        )
    return rows


def manifest(system: str, run: str, devices: int, truth: Truth, started: str) -> Manifest:
    """manifest.json of the made-up system."""
    fakes = [
        Device(
            index=index,
            kind="fake",
            name="Synthetic GPU",
            uuid_hash=f"{index:016x}",
            memory_gib=140,
            max_clock_mhz=truth.reference_mhz,
            power_limit_w=truth.power_limit_w,
        )
        for index in range(devices)
    ]
    host = Host(name_hash="0" * 16, cpu="synthetic", cores=2, memory_gib=8, devices=fakes)
    return Manifest.model_validate(
        {
            "schema": "results/1",
            "system": system,
            "run": run,
            "hosts": [host],
            "software": {},
            "environment": {},
            "command": "tests/synthetic.py (made up, not measured)",
            "suites": ["kernels", "collectives", "interference"],
            "started": started,
            "ended": started,
            "status": "complete",
            "planned": 1,
            "finished": 1,
            "notes": ["synthetic: drawn from known parameters, nothing was measured"],
        }
    )


def write_result_set(
    results: Path,
    system: str = "synthetic",
    run: str = "run-1",
    devices: int = 4,
    seed: int = 0,
    truth: Truth | None = None,
    started: str = "2025-01-01T00:00:00Z",
) -> Path:
    """Write `results/<system>/<run>/` and return it."""
    truth = truth or Truth()
    rng = np.random.default_rng(seed)
    folder = results / system / run
    write_table(folder / "kernels.csv", KernelRow, kernel_rows(truth, devices, rng))
    write_table(folder / "collectives.csv", CollectiveRow, collective_rows(truth, devices, rng))
    write_table(folder / "interference.csv", InterferenceRow, interference_rows(truth, rng))
    about = manifest(system, run, devices, truth, started)
    write_json(folder / "manifest.json", about.model_dump(mode="json", by_alias=True))
    return folder


def with_cell(folder: Path, row: Row, column: str, value: str) -> None:
    """A run whose one row, which reads back as it was written, has another value in a column."""
    name = next(name for name, kind in TABLES.items() if kind is type(row))
    path = folder / f"{name}.csv"
    about = manifest("made-up", "run", 2, Truth(), "2030-01-01T00:00:00Z")
    (folder / "manifest.json").write_text(about.model_dump_json(by_alias=True))
    write_table(path, type(row), [row])
    assert read_result_set(folder).table(type(row)) == [row]
    names, values = (line.split(",") for line in path.read_text().splitlines())
    values[names.index(column)] = value
    path.write_text(",".join(names) + "\n" + ",".join(values) + "\n")
