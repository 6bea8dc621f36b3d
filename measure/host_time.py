"""The host suite: what Python, modules and autograd take around the kernels of a step, on a CPU.

There the processor that issues a kernel runs it, and all of that adds to the step. It is seen in
Megatron-Core steps of a model so small that its arithmetic is nil: the processor's time of a step,
less that of the same kernels one by one at the same shapes. Steps of one microbatch and of several
tell what a pass adds from what a step adds. On a GPU it hides behind kernels that are queued, and
`host_us` of the kernels' rows is what counts.

Each case is a process of its own (`python -m measure.host_time`), which Megatron-Core's patches for
a CPU end with.
"""

import json
import os
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
MICROBATCHES = (1, 5)
WARM_UP, REPEATS, LIMIT_S = 5, 40, 300.0


@dataclass(frozen=True)
class HostCase:
    """Steps of so many microbatches."""

    microbatches: int
    seconds: float

    @property
    def case_id(self) -> str:
        """Such as `nil-3layers-5microbatches`."""
        return f"nil-{LAYERS}layers-{self.microbatches}microbatches"


def cases(kind: str, share: float = 1.0) -> list[HostCase]:
    """On a CPU, of which a device has `share` of a core; none on GPUs."""
    if kind != "cpu":
        return []
    return [HostCase(one, round(15.0 + 0.2 * one / share, 1)) for one in MICROBATCHES]


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
            [sys.executable, "-m", "measure.host_time", str(case.microbatches)],
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
        microbatches=case.microbatches,
        parts=found["parts"],
        kernels_us=found["kernels_us"],
        **quantiles(found["times_us"]),
    )


def main(microbatches: int) -> None:
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
    split = Parallelism(global_batch=microbatches)
    passes = [(LAYERS, layer(nil, split)), (1, embedding(nil, split)), (1, head(nil, split))]
    often: dict[Any, int] = {}
    for count, segments in passes:
        for part in (part for segment in segments for part in segment):
            for kernel in part.kernels:
                often[kernel] = often.get(kernel, 0) + microbatches * count
    for kernel in optimizer(nil, split, 0)[0]:
        often[kernel] = often.get(kernel, 0) + 1
    megatron_cpu.install()
    store = vars(dist)["HashStore"]()  # of this process alone
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    from measure.megatron import build

    trainer = build(nil, split, torch.device("cpu"))
    namespaces.enter_share()  # imports would last long under it

    def step(number: int) -> float:
        batches = trainer.batches(number)
        begin = time.process_time()
        trainer.step(batches)
        return (time.process_time() - begin) * 1e6

    times = [step(number) for number in range(WARM_UP + REPEATS)][WARM_UP:]
    found = {
        "times_us": times,
        "kernels_us": sum(count * _alone_us(maker, one) for one, count in often.items()),
        "parts": sum(count * len(one) for count, segments in passes for one in segments),
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
    main(int(sys.argv[1]))
