"""Which training steps to measure, as data: configurations in order of what they teach."""

from dataclasses import dataclass, replace
from typing import Any

from spec.measurable import refuse
from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism
from spec.training_records import TrainingConfig

GPU_STEPS, CPU_STEPS = 10, 8
QUICK_STEPS = 5
WARM_UP = 2
# for the estimate of a case's duration only: start of its processes, achieved FLOP/s of a device,
# bytes per parameter that the optimizer moves and their rate
_GPU = (6.0, 3.5e14, 80.0, 3e12)
_CPU = (2.0, 2e10, 120.0, 4e9)


@dataclass(frozen=True)
class TrainingCase:
    """One configuration; `seconds` estimates all of it, start of the processes included."""

    model: ModelSpec
    parallelism: Parallelism
    steps: int
    warmup: int
    seconds: float
    case_id: str
    nodes: int = 1  # emulated on one host, see measure.hosts.emulation
    bucket_parameters: int | None = None  # that fill a bucket; None: as Megatron-Core fills them

    @property
    def gpus(self) -> int:
        """Devices it runs on."""
        return self.parallelism.gpus

    @property
    def config(self) -> TrainingConfig:
        """Its columns in tables and plans."""
        return TrainingConfig.of(self.case_id, self.model, self.parallelism, self.nodes)


def case_of(
    model: ModelSpec, p: Parallelism, device_kind: str, quick: bool = False
) -> TrainingCase:
    """A case with its estimate; raises UserError where these steps cannot be measured."""
    refuse(model, p)
    gpu = device_kind in ("nvidia", "amd")
    start, rate, touched, moved = _GPU if gpu else _CPU
    steps = QUICK_STEPS if quick and not gpu else GPU_STEPS if gpu else CPU_STEPS
    flops = model.step_flops(p.global_batch) * (4 / 3 if p.recompute == "full" else 1.0)
    bubble = 1 + (p.pp - 1) / (p.vpp * p.microbatches)
    step = flops / (rate * p.gpus) * bubble
    step += model.parameters() / (p.tp * p.pp) * touched / moved
    seconds = start + step * (WARM_UP + 2) + max(step * steps, 4.0 if gpu else 0.0)
    name = TrainingConfig.name_of(model, p)
    return TrainingCase(model, p, steps, WARM_UP, round(seconds, 1), name)


def case_of_config(config: TrainingConfig, device_kind: str, quick: bool = False) -> TrainingCase:
    """The case of a plan's row, which keeps the row's own id."""
    case = case_of(config.model_spec(), config.parallelism(), device_kind, quick)
    return replace(case, case_id=config.case_id)


# (model, layers, seq_len, parallelism and lora_rank): of four devices the first twelve come first
_Wish = tuple[str, int, int, dict[str, Any]]
_SP = {"sequence_parallel": True}
_UNEVEN = {"layers_per_stage": (3, 5)}
_MB2 = {"microbatch": 2, "global_batch": 8}
_GPU_PLAN: tuple[_Wish, ...] = (
    # four devices, one axis at a time, then two
    ("llama3-8b", 8, 4096, {"tp": 4, "sequence_parallel": True, "global_batch": 8}),
    ("llama3-8b", 8, 4096, {"dp": 4, "global_batch": 8, "overlap": True}),
    ("llama3-8b", 8, 4096, {"pp": 4, "global_batch": 8}),
    ("llama3-8b", 8, 4096, {"global_batch": 2}),
    ("llama3-8b", 8, 4096, {"tp": 2, "pp": 2, "sequence_parallel": True, "global_batch": 8}),
    (
        "llama3-8b",
        8,
        4096,
        {
            "tp": 2,
            "dp": 2,
            "sequence_parallel": True,
            "global_batch": 8,
            "microbatch": 2,
            "overlap": True,
        },
    ),
    ("llama3-8b", 8, 4096, {"pp": 2, "dp": 2, "global_batch": 8}),
    ("llama3-8b", 8, 4096, {"pp": 2, "vpp": 2, "dp": 2, "global_batch": 8}),
    ("llama3-8b", 8, 4096, {"dp": 4, "global_batch": 8, "zero": 0}),
    ("llama3-70b", 4, 4096, {"tp": 4, "sequence_parallel": True, "global_batch": 4}),
    (
        "llama3-8b",
        16,
        4096,
        {
            "tp": 2,
            "dp": 2,
            "sequence_parallel": True,
            "microbatch": 2,
            "global_batch": 8,
            "recompute": "full",
        },
    ),
    (
        "llama3-8b",
        16,
        8192,
        {"tp": 4, "sequence_parallel": True, "global_batch": 4, "recompute": "selective"},
    ),
    # adapters, split sequences, sharded weights, uneven stages
    ("llama3-8b", 32, 4096, {"lora_rank": 32, "tp": 2, "dp": 2, **_SP, "global_batch": 4}),
    ("llama3-8b", 8, 8192, {"cp": 2, "tp": 2, **_SP, "global_batch": 4}),
    ("llama3-8b", 16, 4096, {"dp": 4, "zero": 3, "overlap": True, "global_batch": 8}),
    ("llama3-70b", 8, 4096, {"tp": 2, "pp": 2, **_SP, **_UNEVEN, "global_batch": 4}),
    ("llama3-70b", 16, 4096, {"lora_rank": 32, "tp": 4, **_SP, "global_batch": 4}),
    ("llama3-8b", 8, 8192, {"cp": 2, "dp": 2, "global_batch": 4}),
    ("llama3-70b", 4, 4096, {"dp": 4, "zero": 3, "overlap": True, "global_batch": 4}),
    ("llama3-8b", 32, 4096, {"lora_rank": 16, "pp": 2, "dp": 2, "global_batch": 8}),
    ("llama3-8b", 8, 16384, {"cp": 4, "global_batch": 2}),
    ("llama3-8b", 16, 4096, {"tp": 2, "dp": 2, **_SP, "zero": 3, "overlap": True, **_MB2}),
    ("llama3-8b", 16, 8192, {"lora_rank": 32, "dp": 4, "recompute": "full", "global_batch": 4}),
    ("llama3-8b", 8, 8192, {"cp": 2, "pp": 2, "recompute": "selective", "global_batch": 4}),
    # more of each
    ("llama3-8b", 8, 4096, {"dp": 4, "global_batch": 8}),
    ("llama3-70b", 8, 4096, {"tp": 2, "pp": 2, "sequence_parallel": True, "global_batch": 8}),
    ("llama3-8b", 8, 4096, {"tp": 4, "microbatch": 4, "global_batch": 8}),
    ("gpt3-30b", 4, 2048, {"tp": 2, "dp": 2, "sequence_parallel": True, "global_batch": 16}),
    ("mixtral-8x7b", 4, 4096, {"dp": 4, "ep": 4, "global_batch": 8}),
    ("llama3-8b", 16, 4096, {"pp": 4, "vpp": 2, "global_batch": 16}),
    (
        "llama3-8b",
        8,
        8192,
        {"tp": 2, "dp": 2, "sequence_parallel": True, "global_batch": 4, "overlap": True},
    ),
    ("llama3-8b", 8, 4096, {"tp": 2, "sequence_parallel": True, "global_batch": 4}),
    ("llama3-8b", 8, 4096, {"dp": 2, "global_batch": 4, "overlap": True}),
    ("llama3-8b", 8, 4096, {"pp": 2, "global_batch": 8}),
    ("llama3-8b", 4, 4096, {"microbatch": 4, "global_batch": 4}),
    ("llama3-70b", 4, 4096, {"pp": 4, "microbatch": 2, "global_batch": 16}),
    # every family split in at least five ways; whole models; long steps
    ("llama3-8b", 32, 4096, {"tp": 4, "sequence_parallel": True, "global_batch": 8}),
    ("llama3-8b", 32, 4096, {"tp": 2, "pp": 2, "sequence_parallel": True, "global_batch": 8}),
    ("mixtral-8x7b", 4, 4096, {"tp": 2, "dp": 2, "ep": 2, **_SP, "global_batch": 8}),
    ("mixtral-8x7b", 4, 4096, {"pp": 2, "dp": 2, "ep": 2, "global_batch": 8}),
    ("mixtral-8x7b", 4, 4096, {"tp": 4, **_SP, "global_batch": 8}),
    ("mixtral-8x7b", 4, 4096, {"pp": 4, "global_batch": 8}),
    ("mixtral-8x7b", 4, 4096, {"dp": 4, "ep": 2, "microbatch": 2, "global_batch": 8}),
    ("gpt3-30b", 4, 2048, {"tp": 4, **_SP, "global_batch": 16}),
    ("gpt3-30b", 4, 2048, {"dp": 4, "microbatch": 2, "global_batch": 16, "overlap": True}),
    ("gpt3-30b", 4, 2048, {"pp": 4, "global_batch": 16}),
    ("gpt3-30b", 4, 2048, {"tp": 2, "pp": 2, "microbatch": 2, "global_batch": 16}),
    ("gpt3-30b", 4, 2048, {"pp": 2, "dp": 2, "global_batch": 16, "zero": 0}),
    ("llama3-70b", 4, 4096, {"tp": 2, "dp": 2, **_SP, "global_batch": 4, "overlap": True}),
    ("llama3-70b", 4, 4096, {"pp": 2, "dp": 2, "global_batch": 8}),
    ("llama3-70b", 4, 8192, {"tp": 4, **_SP, "global_batch": 4, "recompute": "full"}),
    ("llama3-8b", 16, 4096, {"dp": 4, "global_batch": 8, "overlap": True}),
    ("llama3-8b", 16, 4096, {"pp": 2, "dp": 2, "recompute": "selective", "global_batch": 16}),
    ("llama3-8b", 10, 4096, {"pp": 4, "layers_per_stage": (2, 3, 3, 2), "global_batch": 16}),
    # more for one device and for two
    ("llama3-70b", 2, 4096, {"global_batch": 2}),
    ("gpt3-30b", 3, 2048, {"global_batch": 4}),
    ("mixtral-8x7b", 1, 4096, {"global_batch": 2}),
    ("llama3-8b", 4, 8192, {"global_batch": 2, "recompute": "selective"}),
    ("llama3-70b", 4, 4096, {"tp": 2, **_SP, "global_batch": 2}),
    ("mixtral-8x7b", 2, 4096, {"dp": 2, "ep": 2, "global_batch": 4}),
    ("llama3-8b", 16, 4096, {"tp": 2, **_SP, "global_batch": 2, "recompute": "full"}),
    ("gpt3-30b", 4, 2048, {"pp": 2, "microbatch": 2, "global_batch": 8}),
)
# the effect of the microbatch: at a fixed global batch (which lengthens the bubble), and at a fixed
# number of microbatches
_GPU_PLAN += tuple(
    ("llama3-8b", 8, 4096, {"pp": 4, "microbatch": microbatch, "global_batch": batch})
    for microbatch in (1, 2, 4, 8)
    for batch in sorted({16, 8 * microbatch} - {8})  # 8 of one are above
)
_CPU_PLAN: tuple[_Wish, ...] = (
    ("tiny", 4, 128, {"global_batch": 4}),
    ("tiny", 4, 128, {"tp": 2, "sequence_parallel": True, "global_batch": 4}),
    ("tiny", 4, 128, {"pp": 2, "global_batch": 4}),
    ("tiny", 4, 128, {"dp": 2, "global_batch": 4}),
    # the full plan goes on
    ("tiny", 4, 128, {"tp": 2, "global_batch": 4}),
    ("tiny", 4, 128, {"pp": 2, "vpp": 2, "global_batch": 8}),
    ("tiny", 4, 128, {"pp": 2, "global_batch": 16}),
    ("tiny", 4, 128, {"dp": 2, "global_batch": 8}),
    ("tiny", 4, 128, {"dp": 2, "global_batch": 8, "zero": 0}),
    ("tiny", 4, 128, {"microbatch": 4, "global_batch": 8}),
    ("tiny", 4, 128, {"global_batch": 4, "recompute": "full"}),
    ("tiny", 4, 128, {"tp": 2, "pp": 2, "sequence_parallel": True, "global_batch": 8}),
    ("tiny", 4, 128, {"dp": 4, "global_batch": 8}),
    ("tiny", 4, 128, {"pp": 2, "vpp": 2, "dp": 2, "global_batch": 8, "overlap": True}),
    ("tiny", 4, 128, {"lora_rank": 8, "dp": 2, "global_batch": 8}),
    ("tiny", 4, 128, {"cp": 2, "global_batch": 4}),
    ("tiny", 4, 128, {"dp": 2, "zero": 3, "overlap": True, "global_batch": 8}),
    ("tiny", 4, 128, {"pp": 2, "layers_per_stage": (1, 3), "global_batch": 8}),
)
QUICK_CASES = 4  # of any default plan, on a machine that is only tried
# Megatron-Core pads vocabularies to a multiple of 128 per tensor-parallel rank
_PADDED = {"gpt3-30b": {"vocab": 50432}}


def cases(world: int, device_kind: str, quick: bool) -> list[TrainingCase]:
    """The plan for up to `world` devices, most instructive first; quick: the first four."""
    gpu = device_kind in ("nvidia", "amd")
    found = []
    for name, layers, seq_len, split in _GPU_PLAN if gpu else _CPU_PLAN:
        own = {"layers": layers, "seq_len": seq_len, "lora_rank": split.get("lora_rank", 0)}
        model = load_model(name).resized(**own, **_PADDED.get(name, {}))
        parallelism = Parallelism(**{key: split[key] for key in split if key != "lora_rank"})
        if parallelism.gpus <= world:
            found.append(case_of(model, parallelism, device_kind, quick))
    return found[:QUICK_CASES] if quick else found
