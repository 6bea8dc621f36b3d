"""What to measure, as data: cases of kernels, collectives, interference and behind.

Cases are plain values that travel to workers as JSON. A case's id depends only on what it measures,
so a resumed or repeated run gives the same work the same id, and the same role.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

from measure.hosts import emulation
from measure.plans import cluster as cluster_plan
from measure.plans import grid
from measure.plans.file import PlanFile, State
from measure.plans.shapes import model_kernels, ordered
from measure.plans.wire import kernel_message
from spec.collective import COLLECTIVES
from spec.kernel import OF_TOKENS, STREAMED, Kernel, parse_kernel
from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism

SUITES = (
    "kernels",
    "host",
    "collectives",
    "interference",
    "behind",
    "queued",
    "late",
    "awake",
    "training",
    "telemetry",
)
# minutes that only a thermal model, a model of power, or a placement needs; training steps again,
# under a profiler
ON_REQUEST = ("heat", "turns", "pulses", "clocks", "placement", "profile")
JUDGE_SHARE = 0.2


def role_of(key: str) -> Literal["fit", "judge"]:
    """A stable split: the same case has the same role in every run, on every system."""
    digest = hashlib.sha256(key.encode()).digest()
    return "judge" if int.from_bytes(digest[:4]) < JUDGE_SHARE * 2**32 else "fit"


@dataclass(frozen=True)
class KernelCase:
    """One kernel in one state; on a given device where `device` is set, else on any."""

    kernel: Kernel
    state: State = "burst"
    device: int | None = None
    prefer: int | None = None  # where to run it, without that being part of what it is
    seconds: float = 0.5  # estimate, set-up included
    planned: bool = False  # a step of the plan given runs it

    @property
    def case_id(self) -> str:
        """Such as `gemm-forward-4096x6144x4096-bf16-burst`."""
        k = self.kernel
        dims = "x".join(str(size) for size in k.dims)
        where = "" if self.device is None else f"-device{self.device}"
        return f"{k.op}-{k.direction}-{dims}-{k.dtype}-{self.state}{where}"

    @property
    def role(self) -> Literal["fit", "judge"]:
        """Shared by both states of a kernel; the device comparison is always fitted on."""
        if self.device is not None:
            return "fit"
        k = self.kernel
        return role_of(f"kernel {k.op} {k.direction} {k.shape} {k.dtype}")

    def message(self) -> dict[str, Any]:
        """The case as JSON."""
        return {
            "suite": "kernels",
            "case_id": self.case_id,
            "role": self.role,
            **kernel_message(self.kernel),
            "state": self.state,
        }


@dataclass(frozen=True)
class CollectiveCase:
    """One collective at one size, by `groups` groups of `ranks` ranks each, `stride` apart."""

    collective: str
    ranks: int
    bytes: int
    stride: int = 1
    groups: int = 1
    nodes: int = 1
    seconds: float = 0.2

    @property
    def case_id(self) -> str:
        """Such as `all_reduce-2r-stride2-2groups-1048576`."""
        across = "" if self.nodes == 1 else f"-{self.nodes}nodes"
        groups = f"{self.groups}groups-{self.bytes}{across}"
        return f"{self.collective}-{self.ranks}r-stride{self.stride}-{groups}"

    @property
    def role(self) -> Literal["fit", "judge"]:
        """By collective, span and size."""
        return role_of(f"collective {self.case_id}")

    @property
    def devices(self) -> int:
        """Devices that it takes."""
        return 1 + max(max(group) for group in self.members())

    def members(self) -> list[list[int]]:
        """Ranks of each group: blocks of ranks * stride, one group per offset within a block."""
        found = []
        for number in range(self.groups):
            block, offset = divmod(number, self.stride)
            first = block * self.ranks * self.stride + offset
            found.append([first + place * self.stride for place in range(self.ranks)])
        return found

    def message(self) -> dict[str, Any]:
        """The case as JSON."""
        more = {"suite": "collectives", "case_id": self.case_id, "members": self.members()}
        return asdict(self) | more


@dataclass(frozen=True)
class InterferenceCase:
    """A kernel under a collective of all ranks."""

    kernel: Kernel
    collective: str
    ranks: int
    bytes: int
    seconds: float = 0.5
    suite: ClassVar[str] = "interference"
    word: ClassVar[str] = "under"

    @property
    def case_id(self) -> str:
        """Such as `gemm-forward-4096x4096x4096-bf16-under-all_reduce-4r-67108864`."""
        k = self.kernel
        dims = "x".join(str(size) for size in k.dims)
        sent = f"{self.collective}-{self.ranks}r-{self.bytes}"
        return f"{k.op}-{k.direction}-{dims}-{k.dtype}-{self.word}-{sent}"

    @property
    def role(self) -> Literal["fit", "judge"]:
        """By kernel and collective."""
        return role_of(f"{self.suite} {self.case_id}")

    def message(self) -> dict[str, Any]:
        """The case as JSON."""
        return {
            "suite": self.suite,
            "case_id": self.case_id,
            "role": self.role,
            **kernel_message(self.kernel),
            "collective": self.collective,
            "ranks": self.ranks,
            "bytes": self.bytes,
        }


@dataclass(frozen=True)
class BehindCase(InterferenceCase):
    """A product launched right behind the start of a collective of all ranks."""

    suite: ClassVar[str] = "behind"
    word: ClassVar[str] = "behind"


def kernel_cases(
    device_kind: str,
    devices: int,
    quick: bool,
    models: Sequence[str],
    plan: PlanFile,
    steps: Iterable[tuple[ModelSpec, Parallelism]] = (),
    engine: bool = False,
) -> list[KernelCase]:
    """The kernel suite: model shapes, a grid to fit on, and the sustained state of some.

    `steps` are the training configurations of the same machine: their kernels are covered too. With
    `engine` also experts' products as Transformer Engine runs them.
    """
    if plan.kernels:
        return [
            KernelCase(parse_kernel(k.op, k.direction, k.shape, k.dtype), k.state, seconds=1.0)
            for k in plan.kernels
        ]
    gpu, defaults = device_kind in ("nvidia", "amd"), grid.defaults(device_kind)
    asked = models or plan.models
    named = [load_model(one) for one in asked or defaults.models]
    degrees, sizes = plan.tp or defaults.tp, plan.microbatch or (1,)
    lengths = plan.seq_len or (() if asked else defaults.seq_len)
    if quick and gpu and not asked:
        named, lengths = named[:1], lengths[:1]
    wanted = dict.fromkeys(model_kernels(named, degrees, lengths, sizes))
    if not plan.tp and not plan.microbatch and not (quick and gpu):
        more = model_kernels(named, degrees, lengths, grid.MORE_MICROBATCHES)
        wanted.update(dict.fromkeys(more))
    of_steps = {kernel: None for one in (() if asked else steps) for kernel in ordered(*one)}
    wanted.update(of_steps)
    wanted.update(dict.fromkeys(grid.kernels(gpu, quick)))
    if gpu and not quick and not asked:
        experts = model_kernels([load_model("mixtral-8x7b")], (1, 2), (4096,), (1,))
        keep = ("grouped_gemm", "router", *OF_TOKENS)
        wanted.update(dict.fromkeys(one for one in experts if one.op in keep))
        grouped = [one for one in experts if one.op == "grouped_gemm"]
        wanted.update(dict.fromkeys(replace(one, op="fused_grouped_gemm") for one in grouped))
        grouped += [one for one in grid.kernels(gpu, quick) if one.op == "grouped_gemm"]
        for dtype in ("bf16", "fp8") if engine else ():
            there = (replace(one, op=STREAMED, dtype=dtype) for one in grouped)
            wanted.update(dict.fromkeys(there))
    wanted = {kernel: None for kernel in wanted if not _of_a_whole_model(kernel)}
    loaded = grid.sustained(gpu, quick)
    wanted.update(dict.fromkeys(loaded))
    # both states of a kernel on one device: their ratio is the clock's doing, not the device's
    place = {kernel: number % devices for number, kernel in enumerate(loaded)}
    long = 2.3 if gpu else 0.6
    cases = []
    for kernel in wanted:
        where, planned = place.get(kernel), bool(plan.training) and kernel in of_steps
        seconds = _seconds(kernel, gpu)
        cases.append(KernelCase(kernel, prefer=where, seconds=seconds, planned=planned))
        if kernel in place:
            cases.append(KernelCase(kernel, "sustained", prefer=where, seconds=long))
    for device in range(devices):  # last, when all devices are warm
        for state in ("burst", "sustained"):
            cases.append(KernelCase(grid.reference(gpu), state, device, seconds=long))
    return cases


def _of_a_whole_model(kernel: Kernel) -> bool:
    """An optimizer's pass over more than any device holds: proportional to smaller ones."""
    return kernel.op in ("adam", "grad_norm", "copy") and kernel.dims[0] > 2**33


def _seconds(kernel: Kernel, gpu: bool) -> float:
    """Set-up and about 30 timings, at what an H100 usually reaches or half of what a CPU does."""
    flops, gbytes = (7e14, 3e12) if gpu else (1e11, 4e9)
    if kernel.dtype == "fp8":
        flops *= 2
    if kernel.bytes > 1e12:
        return 0.1  # refused at once: no device holds it
    return (0.1 if gpu else 0.05) + 30 * max(kernel.flops / flops, kernel.bytes / gbytes)


def collective_cases(
    device_kind: str,
    world: int,
    quick: bool,
    plan: PlanFile,
    nodes: int = 1,
    hosts: int = 1,
    link_mbit: int | None = None,
) -> list[CollectiveCase]:
    """The collective suite over every power-of-two group that `world` ranks allow.

    With `nodes` emulated on one host (joined by links of `link_mbit`, if shaped), or on several
    `hosts`, each case says how many of them its groups span. Across emulated nodes all groups of a
    parallel axis send at once, so groups that fill the world are measured, the largest first; one
    of them alone, at few sizes, shows what the others cost it.
    """
    gpu = device_kind in ("nvidia", "amd")
    rate = emulation.gbytes_per_s(link_mbit) if hosts == 1 else cluster_plan.GBYTES_PER_S[gpu]
    place = partial(_placed, world=world, nodes=max(nodes, hosts), gbytes_per_s=rate)
    if plan.collectives:
        asked = [CollectiveCase(**wish.model_dump()) for wish in plan.collectives]
        return [place(case) for case in asked]
    across_top, reduced_top = emulation.largest(link_mbit)
    top = across_top if nodes > 1 else 30 if gpu else (24 if quick else 26)
    step = 2 if quick else 1
    cases: list[CollectiveCase] = []
    for ranks, stride, groups in spans(world)[:: -1 if nodes > 1 else 1]:
        across = (
            place(CollectiveCase("send_recv", ranks, 2, stride, groups)).nodes if nodes > 1 else 1
        )
        fills = ranks * groups == world
        dense = stride == 1 and groups == 1 and (nodes == 1 or ranks == world)
        spacing = step if dense else 4 if across > 1 and not fills else 2
        for exponent in range(10, top + 1, spacing):
            for kind in COLLECTIVES:
                seconds = (0.1 if gpu else 0.03) + 30 * 2**exponent / (2e11 if gpu else 1e9)
                case = CollectiveCase(kind, ranks, 2**exponent, stride, groups, seconds=seconds)
                cases.append(place(case))
        if groups > 1 and nodes == 1 and gpu and not quick:
            cases += [place(case) for case in _pipelines(ranks, stride, groups)]
        largest = 2**reduced_top
        known = {(case.ranks, case.nodes, case.bytes) for case in cases}
        if across > 1 and fills and (ranks, across, largest) not in known:
            cases += [
                place(CollectiveCase(kind, ranks, largest, stride, groups))
                for kind in emulation.REDUCED
            ]
    return cases


def _pipelines(ranks: int, stride: int, groups: int) -> list[CollectiveCase]:
    """Two stages each of several pipelines, all at once, in the sizes that models send.

    A group of two both sends and receives, as the steady state of 1F1B does: activations one way,
    gradients the other.
    """
    if ranks != 2:
        return []
    swept = {2**exponent for exponent in range(10, 31, 2)}
    return [
        CollectiveCase("send_recv", ranks, size, stride, groups, seconds=0.15)
        for size in sorted(grid.stage_bytes() - swept)
    ]


def _placed(case: CollectiveCase, world: int, nodes: int, gbytes_per_s: float) -> CollectiveCase:
    """The case with the nodes that its groups span, and the time this takes."""
    if nodes == 1:
        return case
    across = emulation.nodes_of(case.members(), world, nodes)
    if across == 1:
        return case
    rate = gbytes_per_s * 1e9 / case.groups
    return replace(case, nodes=across, seconds=0.1 + 30 * case.bytes / rate)


def spans(world: int) -> list[tuple[int, int, int]]:
    """(ranks, stride, groups at once) to measure on `world` ranks of one node."""
    found = []
    ranks = 2
    while ranks <= world:
        found.append((ranks, 1, 1))
        if world // ranks > 1:
            found.append((ranks, 1, world // ranks))
            found.append((ranks, world // ranks, 1))
            found.append((ranks, world // ranks, world // ranks))
        ranks *= 2
    if world > 2 and world & (world - 1):
        found.append((world, 1, 1))
    return found


def interference_cases(device_kind: str, world: int, quick: bool) -> list[InterferenceCase]:
    """GEMM and attention under every collective of all ranks; quick: under two of them."""
    if world < 2:
        return []
    gpu = device_kind in ("nvidia", "amd")
    sizes = (2**24, 2**26, 2**28) if gpu else (2**18, 2**22)
    return [
        InterferenceCase(kernel, kind, world, size, 0.4 if gpu else 0.5)
        for kernel in grid.interference(gpu)
        for kind in COLLECTIVES[: 2 if quick else None]
        for size in (sizes[-1:] if quick else sizes)
    ]


MOST_IN_A_NODE = 8  # ranks of tensor parallelism, which wider groups are not measured for


def behind_cases(device_kind: str, world: int, quick: bool) -> list[BehindCase]:
    """Products behind what a tensor-parallel layer sends in its backward pass; not on a CPU."""
    if not 2 <= world <= MOST_IN_A_NODE or device_kind not in ("nvidia", "amd"):
        return []
    found = [
        BehindCase(kernel, kind, world, nbytes)
        for kernel, kinds, nbytes in grid.behind(world)
        for kind in kinds
    ]
    return found[::12] if quick else found  # a few of every size
