"""The host suite: what Python, modules and autograd take around the kernels of a step.

It is seen in Megatron-Core steps of a model so small that its arithmetic is nil. Steps of one
microbatch and of several, in turn, tell what a pass adds from what a step adds.

On GPUs such a step lasts as long as its host needs to issue it, and the steps of a real model are
never faster than that. All GPUs of the host take part, as all of its processors do in a real step:
each with a replica (of few layers and of more: what the optimizer takes for a tensor), all with a
share of every layer (what issuing a collective takes) and of every sequence (ring attention), with
activations computed again (what a checkpoint takes), with adapters on frozen layers, with every
tensor sent beside the passes by itself (what a bucket takes), with a mixture of experts, of few
and of more, and where it is installed with layers on Transformer Engine, in bf16 and FP8, and with
mixtures there. What issuing the kernels alone takes is `host_us` of their rows.

On a CPU the processor that issues a kernel runs it, and what it does in between adds to the step:
its time of a step, less that of the same kernels one by one at the same shapes. That runs in a
process of its own (`python -m measure.suites.host_time`): Megatron-Core's patches for a CPU end
with it.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure.devices import Device
from measure.hosts import namespaces
from measure.hosts.emulation import rank_environment
from measure.timed import cpu_memory
from measure.training.plan import WARM_UP, TrainingCase
from spec.errors import WorkError
from spec.model import ModelSpec
from spec.nil import LAYERS, ON_CPU, ON_GPU, nil_model, one_pass
from spec.parallelism import CpCommType, Parallelism, Recompute, TransformerImpl
from spec.records import MOST_TP, HostRow

MICROBATCHES, EXPERTS, MORE_EXPERTS, MORE_LAYERS = 5, 8, 32, 4 * LAYERS
LORA_RANK = 16
WARM_UP_CPU, REPEATS, LIMIT_S = 5, 40, 300.0
ROUNDS = 4  # in which steps of one microbatch and of several take turns on GPUs
GPU_S = 14.0


@dataclass(frozen=True)
class HostCase:
    """Steps of one microbatch and of several: `gpus` in replicas of tp * cp, experts over ep."""

    seconds: float
    gpus: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    experts: int = 0
    layers: int = LAYERS
    overlap: bool = False
    recompute: Recompute = "none"
    lora_rank: int = 0
    transformer_impl: TransformerImpl = "local"
    fp8: bool = False
    cp_comm_type: CpCommType = "p2p"

    @property
    def case_id(self) -> str:
        """Its name in tables."""
        split = f"-TP{self.tp}-DP{self.replicas}" if self.gpus > 1 else ""
        split += f"-CP{self.cp}" if self.cp > 1 else ""
        split += f"-{self.cp_comm_type}" if self.cp_comm_type != "p2p" else ""
        mixture = f"-{self.experts}experts" if self.experts else ""
        mixture += f"-EP{self.ep}" if self.ep > 1 else ""
        split += mixture + "-overlap" * self.overlap
        split += f"-lora{self.lora_rank}" if self.lora_rank else ""
        split += f"-{self.recompute}" if self.recompute != "none" else ""
        split += "-FP8" * self.fp8 + "-TE" * (self.transformer_impl == "transformer_engine")
        return f"nil-{self.layers}layers-{MICROBATCHES}microbatches{split}"

    @property
    def replicas(self) -> int:
        """Data-parallel ranks."""
        return self.gpus // (self.tp * self.cp)

    @property
    def shows(self) -> set[str]:
        """What its host has to do that others' have not."""
        found = _has(self.split(1), self.experts, self.lora_rank)
        if self.layers > LAYERS:
            found |= {"layers", "scales"} if self.fp8 else {"layers"}
        if self.experts > EXPERTS and self.transformer_impl != "local":
            found.add("fp8_numbers" if self.fp8 else "te_numbers")
        return found

    def split(self, microbatches: int) -> Parallelism:
        """How a step of so many microbatches is split."""
        return Parallelism(
            tp=self.tp,
            cp=self.cp,
            dp=self.replicas,
            ep=self.ep,
            sequence_parallel=self.tp > 1,
            overlap=self.overlap,
            recompute=self.recompute,
            transformer_impl=self.transformer_impl,
            fp8=self.fp8,
            cp_comm_type=self.cp_comm_type,
            global_batch=self.replicas * microbatches,
        )


def _has(p: Parallelism, experts: int, lora_rank: int) -> set[str]:
    found = {name for name in ("tp", "cp", "ep") if getattr(p, name) > 1}
    again = p.recompute != "none"
    told = {"experts": experts, "lora": lora_rank, "overlap": p.overlap, "recompute": again}
    told |= {"transformer_engine": p.on_engine, "fp8": p.fp8}
    # on Transformer Engine their host takes other times for these
    told |= {"te_experts": p.on_engine and experts, "fp8_experts": p.fp8 and experts}
    told |= {"te_lora": p.on_engine and lora_rank, "fp8_lora": p.fp8 and lora_rank}
    told |= {"fp8_tp": p.fp8 and p.tp > 1}
    if p.on_engine and p.cp > 1:
        found = found - {"cp"} | {f"te_{p.cp_comm_type}"}
    return found | {name for name, has in told.items() if has}


def in_order(
    cases: Sequence[HostCase], steps: Iterable[tuple[ModelSpec, Parallelism]]
) -> list[HostCase]:
    """The cases as a plan needs them: one for each thing that its steps have, the others of these.

    Depths, and numbers of experts on Transformer Engine, are such things: of one by itself
    `calibrate.host.equations` can tell nothing.
    Last come those that show what no step of it has.
    """
    wanted = {"layers", "scales", "te_numbers", "fp8_numbers"}.union(
        *(_has(p, model.experts, model.lora_rank) for model, p in steps)
    )
    needed: list[HostCase] = []
    again: list[HostCase] = []
    others: list[HostCase] = []
    for case in sorted(cases, key=lambda one: (len(one.shows), one.seconds)):
        shown = set[str]().union(*(one.shows for one in needed))
        if not case.shows <= wanted:
            others.append(case)
        else:
            (again if needed and case.shows <= shown else needed).append(case)
    return [*needed, *again, *others]


def cases(
    kind: str, devices: int = 1, share: float = 1.0, quick: bool = False, engine: bool = False
) -> list[HostCase]:
    """Those of a host of so many devices; on a CPU one of them has `share` of a core.

    None in a quick run of GPUs: they only tell something together, in three minutes. With `engine`
    also by layers on Transformer Engine.
    """
    if kind == "cpu":
        return [HostCase(round(15.0 + 2.0 / share, 1))]
    if quick or kind not in ("nvidia", "amd"):
        return []
    several = max((n for n in (2, 4, MOST_TP) if devices % n == 0), default=1)
    adapted: dict[str, Any] = {"lora_rank": LORA_RANK}
    dense = [{}, {"recompute": "selective"}, {"recompute": "full"}, adapted]
    deep: list[dict[str, Any]] = [{}]
    on: dict[str, Any] = {"transformer_impl": "transformer_engine"}
    eight = on | {"fp8": True}
    if engine:
        dense += [on, eight, on | {"recompute": "full"}, eight | {"recompute": "full"}]
        dense += [on | adapted]
        deep += [eight]
    mixed: list[dict[str, Any]] = [{}, on, eight] if engine else [{}]
    many = list(mixed)
    if several > 1:
        for split in ("tp", "cp"):
            dense += [{split: several}, {split: several, "recompute": "selective"}]
        dense += [{"tp": several} | adapted]
        dense += [{"tp": several} | on, {"cp": several} | on] if engine else []
        dense += [{"tp": several} | eight, {"tp": several} | eight | adapted] if engine else []
        dense += [{"cp": several, "cp_comm_type": "a2a"} | on] if engine else []
        deep += [{"overlap": True}]
        mixed += [{"tp": several}, {"ep": several}]
    return [
        *(HostCase(GPU_S, devices, **one) for one in dense),
        *(HostCase(2 * GPU_S, devices, layers=MORE_LAYERS, **one) for one in deep),
        *(HostCase(GPU_S, devices, experts=EXPERTS, **one) for one in mixed),
        *(HostCase(2 * GPU_S, devices, experts=MORE_EXPERTS, **one) for one in many),
    ]


def measure(case: HostCase, kind: str, devices: Sequence[Device] = ()) -> HostRow:
    """Run a case on its devices; raises WorkError where it fails, UserError where it cannot run."""
    from measure.timed.timing import quantiles

    found = _on_cpu() if kind == "cpu" else _on_gpus(case, kind, devices)
    return HostRow(
        case_id=case.case_id,
        role="fit",
        gpus=case.gpus,
        tp=case.tp,
        cp=case.cp,
        ep=case.ep,
        experts=case.experts,
        overlap=case.overlap,
        recompute=case.recompute,
        lora_rank=case.lora_rank,
        transformer_impl=case.transformer_impl,
        fp8=case.fp8,
        cp_comm_type=case.cp_comm_type,
        layers=case.layers,
        microbatches=MICROBATCHES,
        single_us=statistics.median(found.pop("single_us")),
        **quantiles(found.pop("times_us")),
        **found,
    )


def _on_gpus(case: HostCase, kind: str, devices: Sequence[Device]) -> dict[str, Any]:
    from measure.training.steps import step_times

    model = nil_model(ON_GPU, case.experts, case.lora_rank).resized(layers=case.layers)
    several = case.split(MICROBATCHES)
    steps = TrainingCase(
        model,
        several,
        REPEATS // ROUNDS,
        WARM_UP,
        case.seconds,
        case.case_id,
        bucket_parameters=1 if case.overlap else None,
    )
    batches = (case.split(1).global_batch, several.global_batch)
    found = step_times(steps, batches, ROUNDS, device_kind=kind, devices=devices)
    single, more = found

    def layer_us(way: str) -> float:
        layers = case.layers * MICROBATCHES
        return 1e6 * statistics.median(one[f"layers_{way}_s"] for one in more.passes) / layers

    return {
        "times_us": [1e6 * one for one in more.times_s],
        "single_us": [1e6 * one for one in single.times_s],
        "update_us": 1e6 * statistics.median(single.updates_s + more.updates_s) or None,
        "forward_us": layer_us("forward"),
        "backward_us": layer_us("backward"),
        "parts": len(one_pass(model, several)),
    }


def _on_cpu() -> dict[str, Any]:
    path = os.pathsep.join(
        filter(None, [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")])
    )
    try:
        done = subprocess.run(
            [sys.executable, "-m", "measure.suites.host_time"],
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
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Time the steps in this process and print what was found as JSON."""
    namespaces.enter_network()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import torch
    import torch.distributed as dist

    from measure.megatron import cpu as megatron_cpu
    from measure.timed.operations import Maker
    from spec.step import optimizer

    torch.set_num_threads(1)
    cpu_memory.keep()
    maker, nil = Maker(torch.device("cpu")), nil_model(ON_CPU)
    splits = [Parallelism(global_batch=batch) for batch in (1, MICROBATCHES)]
    whole = splits[0]
    parts = one_pass(nil, whole)
    megatron_cpu.install()
    store = vars(dist)["HashStore"]()  # of this process alone
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    from measure.megatron.build import build

    trainer = build(nil, whole, torch.device("cpu"))
    namespaces.enter_share()  # imports would last long under it

    def step(number: int, split: Parallelism) -> float:
        trainer.parallelism = split
        batches = trainer.batches(number)
        begin = time.process_time()
        trainer.step(batches)
        return (time.process_time() - begin) * 1e6

    times = [[step(number, one) for one in splits] for number in range(WARM_UP_CPU + REPEATS)]
    single, several = zip(*times[WARM_UP_CPU:], strict=True)
    alone: dict[Any, float] = {}
    for kernel in (*(one for part in parts for one in part.kernels), *optimizer(nil, whole, 0)[0]):
        if kernel not in alone:
            alone[kernel] = _alone_us(maker, kernel)
    kernels_us = sum(alone[kernel] for part in parts for kernel in part.kernels)
    update = sum(alone[kernel] for kernel in optimizer(nil, whole, 0)[0])
    found = {
        "times_us": several,
        "kernels_us": MICROBATCHES * kernels_us + update,
        "single_us": single,
        "single_kernels_us": kernels_us + update,
        "parts": len(parts),
    }
    print(json.dumps(found))


def _alone_us(maker: Any, kernel: Any) -> float:
    """Processor time of a kernel by itself, us."""
    call, _ = maker.build(kernel)
    for _ in range(WARM_UP_CPU):
        call()
    begin = time.process_time()
    for _ in range(REPEATS):
        call()
    return (time.process_time() - begin) / REPEATS * 1e6


if __name__ == "__main__":
    main()
