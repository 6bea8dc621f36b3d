"""The host suite: what Python, modules and autograd take around the kernels of a step, on a CPU.

There the processor that issues a kernel runs it, and all of that adds to the step. It is seen in
Megatron-Core steps of a model so small that its arithmetic is nil: the processor's time of a step,
less that of the same kernels one by one at the same shapes. Steps of one microbatch and of several,
in turn, tell what a pass adds from what a step adds. On a GPU it hides behind kernels that are
queued, and `host_us` of the kernels' rows is what counts.

They run in a process of their own (`python -m measure.host_time`), which Megatron-Core's patches
for a CPU end with.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import cpu_memory, namespaces
from measure.emulation import rank_environment
from spec.errors import WorkError
from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism
from spec.records import HostRow

# Llama 3's layer at sizes that take no time; as many layers as between the smallest models' two
# and four, so that what the ends of a model cost is shared among about as many parts.
LAYERS, SIZES = 3, {"hidden": 32, "ffn_hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 16}
MORE = {"vocab": 128, "seq_len": 16}
MICROBATCHES = 5
WARM_UP, REPEATS, LIMIT_S = 5, 40, 300.0


@dataclass(frozen=True)
class HostCase:
    """Steps of one microbatch and of several."""

    seconds: float
    case_id: str = f"nil-{LAYERS}layers-{MICROBATCHES}microbatches"


def cases(kind: str, share: float = 1.0) -> list[HostCase]:
    """On a CPU, of which a device has `share` of a core; none on GPUs."""
    return [HostCase(round(15.0 + 2.0 / share, 1))] if kind == "cpu" else []


def model() -> ModelSpec:
    """The model whose arithmetic is nil."""
    own = load_model("small").model_dump()
    return ModelSpec(**own | SIZES | MORE | {"name": "nil", "layers": LAYERS})


def measure(case: HostCase) -> HostRow:
    """Run a case on the first device; raises WorkError where it fails."""
    from measure.timing import quantiles

    path = os.pathsep.join(
        filter(None, [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH")])
    )
    try:
        done = subprocess.run(
            [sys.executable, "-m", "measure.host_time"],
            env=os.environ
            | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
            | rank_environment(0, 1, 1),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise WorkError(f"took more than {LIMIT_S:.0f} s") from None
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if done.returncode:
        raise WorkError(lines[-1] if lines else f"exit status {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    return HostRow(
        case_id=case.case_id,
        role="fit",
        layers=LAYERS,
        microbatches=MICROBATCHES,
        parts=found["parts"],
        kernels_us=found["kernels_us"],
        single_us=statistics.median(found["single_us"]),
        single_kernels_us=found["single_kernels_us"],
        **quantiles(found["times_us"]),
    )


def main() -> None:
    """Time the steps in this process and print what was found as JSON."""
    namespaces.enter_network()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import torch
    import torch.distributed as dist

    from measure import megatron_cpu
    from measure.operations import Maker
    from spec.step import embedding, head, layer, optimizer

    torch.set_num_threads(1)
    cpu_memory.keep()
    maker, nil = Maker(torch.device("cpu")), model()
    splits = [Parallelism(global_batch=batch) for batch in (1, MICROBATCHES)]
    whole = splits[0]
    passes = [(LAYERS, layer(nil, whole)), (1, embedding(nil, whole)), (1, head(nil, whole))]
    parts = [part for count, pair in passes for one in pair for part in one * count]
    megatron_cpu.install()
    store = vars(dist)["HashStore"]()  # of this process alone
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    from measure.megatron import build

    trainer = build(nil, whole, torch.device("cpu"))
    namespaces.enter_share()  # imports would last long under it

    def step(number: int, split: Parallelism) -> float:
        trainer.parallelism = split
        batches = trainer.batches(number)
        begin = time.process_time()
        trainer.step(batches)
        return (time.process_time() - begin) * 1e6

    times = [[step(number, one) for one in splits] for number in range(WARM_UP + REPEATS)]
    single, several = zip(*times[WARM_UP:], strict=True)
    alone: dict[Any, float] = {}
    for kernel in (*(one for part in parts for one in part.kernels), *optimizer(nil, whole, 0)[0]):
        if kernel not in alone:
            alone[kernel] = _alone_us(maker, kernel)
    one_pass = sum(alone[kernel] for part in parts for kernel in part.kernels)
    update = sum(alone[kernel] for kernel in optimizer(nil, whole, 0)[0])
    found = {
        "times_us": several,
        "kernels_us": MICROBATCHES * one_pass + update,
        "single_us": single,
        "single_kernels_us": one_pass + update,
        "parts": len(parts),
    }
    print(json.dumps(found))


def _alone_us(maker: Any, kernel: Any) -> float:
    """Processor time of a kernel by itself, us."""
    call, _ = maker.build(kernel)
    for _ in range(WARM_UP):
        call()
    begin = time.process_time()
    for _ in range(REPEATS):
        call()
    return (time.process_time() - begin) / REPEATS * 1e6


if __name__ == "__main__":
    main()
