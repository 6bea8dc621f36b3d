"""A projection: one request simulated, with intervals, provenance and warnings, as its JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from simulate.cost.groups import network_for
from simulate.cost.uncertainty import OneAtATime, interval
from simulate.hardware.as_run import as_run
from simulate.hardware.nvls import has_nvls
from simulate.hardware.unmeasured import unmeasured
from simulate.memory.overhead import KEPT
from simulate.memory.peak import Memory, memory
from simulate.plans.find import smallest
from simulate.plans.remedies import Remedy, remedies
from simulate.power import energy
from simulate.power.whatif import Changed, widened
from simulate.projection.local_layers import local_layers_notes
from simulate.projection.memory_notes import memory_notes
from simulate.projection.no_effect import without_effect
from simulate.step import stragglers
from simulate.step.estimate import StepEstimate, StepSimulator
from simulate.step.overlap import gather_in_turn
from simulate.step.saturation import messages
from simulate.step.scale import widening
from simulate.step.stragglers import SlowGpus, goodput, published_mtbf
from spec.calibration import Calibration, Parameter
from spec.errors import UserError
from spec.files import sha256
from spec.hardware import Fabric, GroupPath, Node
from spec.model import ModelSpec
from spec.parallelism import Parallelism, describe
from topologies.layout import node_count, node_gbytes_per_s, notes
from topologies.picture import picture
from topologies.tiers import AxisTraffic, TierLoad, tier_utilisation

SCHEMA = "projection/1"
SHOWN = 12  # uncertain factors


@dataclass(frozen=True)
class Request:
    """What to project."""

    model: ModelSpec
    parallelism: Parallelism
    node: Node
    fabric: Fabric
    calibration: Calibration
    calibration_path: Path
    draws: int = 200
    seed: int = 0
    chosen: str = "given"  # how the parallelism came about, a sentence
    slow_gpus: SlowGpus | None = None
    gpu_mtbf_hours: float | None = None  # None: as published
    changed: Changed | None = None  # by a what-if of power or heat, as `calibration` is

    def simulator(
        self, calibration: Calibration | None = None, draws: OneAtATime | None = None
    ) -> StepSimulator:
        """Its step, with its own calibration and draws where no others are given."""
        return StepSimulator(
            self.model,
            self.parallelism,
            self.node,
            self.fabric,
            self.calibration if calibration is None else calibration,
            draws=self.draws if draws is None else draws,
            seed=self.seed,
            slow_gpus=self.slow_gpus,
        )

    def step_s(self, calibration: Calibration) -> float:
        """Its central step time by a calibration."""
        central = replace(self, draws=0, calibration=calibration)
        return float(central.simulator().run().step_time_s[0])


@dataclass(frozen=True)
class Projection:
    """A simulated request; `as_json` is its documented form."""

    request: Request
    estimate: StepEstimate
    memory: Memory
    would_fit: tuple[Remedy, ...] = ()  # where this does not: the nearest plans
    enough: Parallelism | None = None  # where no like plan does: on the fewest GPUs that do

    def as_json(self) -> dict[str, Any]:
        """The `projection/1` object."""
        r, e = self.request, self.estimate
        p = r.parallelism
        step = e.step_time_s
        tokens = p.global_batch * r.model.seq_len
        flops = r.model.step_flops(p.global_batch)
        peak = r.node.peak_bf16_tflops * 1e12 * p.gpus
        joules = step * e.power_w * p.gpus
        return {
            "schema": SCHEMA,
            "inputs": {
                "model": r.model.model_dump(),
                "parallelism": p.model_dump() | {"name": describe(p), "chosen": r.chosen},
                "gpus": p.gpus,
                "node": r.node.model_dump(),
                "fabric": r.fabric.model_dump(),
                "node_gbits_per_s": 8 * node_gbytes_per_s(r.node, r.fabric)
                if r.fabric.ports_per_node or r.node.nics
                else None,
                "calibration": {
                    "path": r.calibration_path.as_posix(),
                    "sha256": sha256(r.calibration_path),
                    "system": r.calibration.system,
                    "device": r.calibration.device,
                },
                "slow_gpus": asdict(r.slow_gpus) if r.slow_gpus else None,
                "engine": "timeline",
                "draws": r.draws,
                "seed": r.seed,
            },
            "step_time_s": interval(step),
            "tokens_per_s": interval(tokens / step),
            "tokens_per_s_per_gpu": interval(tokens / step / p.gpus),
            "mfu": interval(flops / step / peak),
            "step_spread": interval(e.step_spread),
            "goodput": goodput(p.gpus, r.gpu_mtbf_hours),
            "breakdown_s": e.breakdown_s,
            "communication_s": {
                kind: {
                    "total": one.total_s,
                    "exposed": one.exposed_s,
                    "bytes": one.bytes,
                    "calls": one.calls,
                }
                for kind, one in e.traffic.items()
            },
            "power_w_per_gpu": interval(e.power_w),
            "energy_j_per_step": interval(joules),
            "tokens_per_j": interval(tokens / joules),
            "edp_js": interval(joules * step),
            "clock_mhz": interval(e.clock_mhz),
            "throttled_share": e.throttled_share,
            **energy.as_json(e, r),
            "memory_gib": {
                "peak": self.memory.peak_gib,
                "capacity": self.memory.capacity_gib,
                "by_stage": list(self.memory.by_stage_gib),
                "fits": self.memory.fits,
                "needed": self.memory.needed_gib,
                **self.memory.intervals(),
                "would_fit": [one.as_json() for one in self.would_fit],
                "enough_gpus": self.enough.gpus if self.enough else None,
            },
            "fabric": self.fabric(),
            "scale_growth": widening(e.doublings),
            "sensitivity": sensitivity(r, e.priced.costs.draws.names),
            "provenance": [one.model_dump() for one in provenance(self)],
            "warnings": warnings(self),
        }

    def tiers(self) -> list[TierLoad]:
        """Use of each tier of the cluster in a step."""
        e, r = self.estimate, self.request
        paths = e.priced.costs.layout.paths
        network = network_for(r.calibration, r.fabric)

        def measured(path: GroupPath) -> GroupPath:
            """At the rate of all groups on a node, where that was measured between such nodes.

            Of ranks that send to the next one, one of each group sends out of a node.
            """
            if path.nodes == 1 or network is None or network.node_gbytes_per_s is None:
                return path
            groups = path.concurrent ** (1 - network.sharing)
            groups *= path.local_ranks if path.pattern == "send-recv" else 1
            nominal = node_gbytes_per_s(r.node, r.fabric)
            return path.at_rate(groups * network.node_gbytes_per_s / nominal)

        loads = [
            AxisTraffic(kind, one.sent_bytes, one.outside_bytes, measured(paths[kind]), one.total_s)
            for kind, one in e.traffic.items()
            if kind in paths
        ]
        return tier_utilisation(loads, r.node, float(e.step_time_s[0]))

    def fabric(self) -> list[dict[str, Any]]:
        """Each tier's use, and the messages that its links are the busiest for."""
        r = self.request
        tiers = self.tiers()

        def busiest(message: dict[str, Any]) -> str:
            """Of the tiers that the axis crosses, scale-up links too."""
            used = {one.tier: one.by_axis.get(message["axis"], 0.0) for one in tiers}
            return max(used, key=lambda tier: (used[tier], tier == message["tier"]))

        sent = [
            message | {"tier": busiest(message)}
            for message in messages(r.model, r.parallelism, self.estimate.priced.costs)
        ]
        return [
            {
                "tier": one.tier,
                "utilisation": one.utilisation,
                "while_sending": one.while_sending,
                "saturated": one.saturated,
                "by_axis": one.by_axis,
                "messages": [message for message in sent if message["tier"] == one.tier],
            }
            for one in tiers
        ]

    def picture(self) -> str:
        """The topology with the tiers' loads, as SVG."""
        r = self.request
        return picture(r.node, r.fabric, r.parallelism.gpus, self.tiers())


def sensitivity(request: Request, names: Sequence[str]) -> list[dict[str, Any]]:
    """Step time with one uncertain factor at either end of its interval, the largest effects."""
    times = request.simulator(draws=OneAtATime(names)).run().step_time_s
    rows: list[dict[str, Any]] = [
        {"factor": name, "low_s": float(times[1 + 2 * i]), "high_s": float(times[2 + 2 * i])}
        for i, name in enumerate(names)
    ]
    rows.sort(key=lambda row: -abs(row["high_s"] - row["low_s"]))
    return rows[:SHOWN]


def project(request: Request) -> Projection:
    """Simulate a request; raises UserError where it cannot run or does not make sense."""
    priced = as_run(request.calibration, request.parallelism, request.node, request.model)
    r = replace(request, calibration=priced)
    estimate = r.simulator().run()
    if r.changed is not None and r.changed.what.asked:
        estimate = widened(estimate, r.changed, r.model, r.parallelism, r.node, r.fabric)
    if not (np.isfinite(estimate.step_time_s).all() and np.isfinite(estimate.power_w).all()):
        raise UserError(
            f"{r.calibration_path}: its numbers, with this node and fabric, give no finite step "
            "time; look for a rate, duration or spread that cannot be"
        )
    used = memory(r.model, r.parallelism, r.node, r.fabric)
    if used.fits:
        return Projection(r, estimate, used)
    p = r.parallelism
    nearest = tuple(remedies(r.model, p, r.node, r.fabric, r.calibration))
    enough = None if nearest else smallest(r.model, p, r.node, r.fabric)
    return Projection(r, estimate, used, nearest, enough)


def provenance(projection: Projection) -> list[Parameter]:
    """Every parameter that the numbers rest on, with its source."""
    r = projection.request
    asked = has_nvls(r.calibration)
    listed = [one for one in r.calibration.parameters if asked or not one.name.startswith("nvls.")]

    def add(record: Node | Fabric, prefix: str, field: str, unit: str) -> None:
        value = getattr(record, field)
        assumed = field in record.assumed
        listed.append(
            Parameter(
                name=f"{prefix}.{field}",
                value=value,
                unit=unit,
                low=value,
                high=value,
                source="assumed" if assumed else "published",
                detail=f"{record.name}: {record.source}",
            )
        )

    for field, unit in (
        ("gpus", "GPUs"),
        ("memory_gib", "GiB"),
        ("peak_bf16_tflops", "TFLOP/s"),
        ("scale_up_gbytes_per_s", "GB/s"),
        ("power_limit_w", "W"),
        ("nics", "ports"),
    ):
        add(r.node, "node", field, unit)
    for field, unit in (
        ("nic_gbits_per_s", "Gbit/s"),
        ("latency_us", "us"),
        ("levels", "switch levels"),
        ("radix", "ports"),
        ("ports_per_node", "ports"),
    ):
        if getattr(r.fabric, field) is not None:
            add(r.fabric, "fabric", field, unit)
    context = projection.memory.context_gib
    for name, value, unit, detail in (
        ("memory.context_gib", context, "GiB", "CUDA's as on 4x H200, and NCCL's communicators"),
        ("memory.kept", KEPT, "share", "of what it hands out, the allocator cannot give back"),
    ):
        listed.append(
            Parameter(
                name=name,
                value=value,
                unit=unit,
                low=value,
                high=value,
                source="assumed",
                detail=f"{detail}; decides what fits a device",
            )
        )
    listed += energy.parameters(r.node)
    listed += projection.estimate.assumptions
    listed += stragglers.assumptions(r.parallelism)
    listed += [] if r.gpu_mtbf_hours is not None else [published_mtbf()]
    return listed


def _gathered_in_turn(request: Request) -> list[str]:
    """Where sending parameters beside passes makes a step longer, as stages gather in turn."""
    p = request.parallelism
    if not gather_in_turn(p):
        return []
    beside, after = (
        replace(request, draws=0, parallelism=p.model_copy(update={"overlap": overlap}))
        for overlap in (True, False)
    )
    longer, shorter = (float(one.simulator().run().step_time_s[0]) for one in (beside, after))
    if shorter > longer * 0.995:
        return []
    return [
        f"Without overlap the step would be {1 - shorter / longer:.0%} shorter (--no-overlap): "
        "stages that are not interleaved gather their parameters one after another."
    ]


def warnings(projection: Projection) -> list[str]:
    """What a reader must know before trusting the numbers, one sentence each."""
    r, e = projection.request, projection.estimate
    p, said = r.parallelism, []
    said += memory_notes(p, projection.memory, projection.would_fit, projection.enough)
    if p.ep > 1 and not r.model.expert_imbalance:
        said.append(
            "Experts get even loads, which trained routers do not give them: see "
            "--expert-imbalance and --capacity-factor."
        )
    if r.calibration.kind != "cpu" and "AMD" not in r.node.gpu.upper():
        said += local_layers_notes(r.model, p)
    if r.slow_gpus:
        same = replace(r, draws=0, slow_gpus=None).simulator().run().step_time_s[0]
        said.append(
            f"What if: {100 * r.slow_gpus.share:g}% of the GPUs take {r.slow_gpus.factor:g} times "
            "as long (--slow-gpus)"
            + ("; the slowest are as slow without." if np.isclose(same, e.step_time_s[0]) else ".")
        )
    if e.modelled_share >= 0.005:  # what is written as 1 % and more
        said.append(
            f"{e.modelled_share:.0%} of a layer's compute time is in shapes that were not "
            "measured; it comes from the kernel models between the measured ones."
        )
    for axis, path in e.priced.costs.layout.paths.items():
        if path.nodes > 1:
            continue
        fit = r.calibration.collective_fits.get("all_reduce")
        if fit and path.ranks > max(curve.ranks for curve in fit.curves):
            said.append(
                f"{axis.upper()} collectives on {path.ranks} GPUs of a node are carried over by "
                f"structure from at most {max(curve.ranks for curve in fit.curves)} measured GPUs."
            )
    network = e.priced.costs.network
    nodes = max((path.nodes for path in e.priced.costs.layout.paths.values()), default=1)
    if network is not None and nodes > network.max_nodes:
        told = network.source != "assumed"
        fitted_on = f"at most {network.max_nodes}" if told else "nothing that was measured"
        said.append(
            f"Groups span up to {nodes} nodes; the {network.protocol} model ({network.source}) "
            f"was fitted on {fitted_on}."
        )
    if r.node.gpu not in r.calibration.device and r.calibration.device not in r.node.gpu:
        said.append(
            f"The node's GPU is {r.node.gpu}, the calibration was measured on "
            f"{r.calibration.device}: the times are the calibration's, unscaled."
        )
    idle = without_effect(r.model, p, r.calibration, r.step_s)
    said += idle
    said += _gathered_in_turn(r)
    asked = {"on_engine": p.on_engine, "cuda_graphs": p.cuda_graphs}
    said += unmeasured(r.calibration, r.node, **asked, model=r.model, idle=idle)
    said += notes(r.node, r.fabric, node_count(r.node, p.gpus))
    said += energy.warnings(e, r)
    said.append(
        "The tail of GPU-to-GPU speed at this scale is assumed, not measured: see "
        "step.worst_gpu_deviation."
    )
    return said
