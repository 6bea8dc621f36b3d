"""The calibration that a split's step is priced with: its kernels, and what issues them."""

from functools import lru_cache
from math import hypot

from simulate.cost.uncertainty import assumed_factor
from simulate.cost.works import Same
from simulate.hardware.fp8 import with_fp8_products
from simulate.hardware.graphs import with_graphs
from spec.calibration import Calibration
from spec.errors import UserError
from spec.fitted import changed
from spec.hardware import Node
from spec.kernel import GEMM_DIRECTIONS, PACED, STREAMED, STREAMED_ISSUE, STREAMS
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step_transformer_engine import engine_times

# Names of what is assumed of such steps, and the sd of what they are made of beside other steps'
# `composition_sd`. Chosen: with 0.01 of either 105 of 107 steps with graphs that were sealed from
# the forty-eighth visit to the fiftieth were inside, and with none as many. With graphs there are
# none of more than two GPUs, or of others than H200; of those over a ring three were 3 to 4 %
# faster than told at first and one 2.4 %; seven with tokens exchanged for heads were 1.2 % off.
ENGINE, GRAPHS = "kernel.transformer_engine", "kernel.cuda_graphs"
ENGINE_SD, GRAPHS_SD, GRAPHS_ELSEWHERE_SD = 0.005, 0.005, 0.02
# Of products in streams by those one after another: an H200's device takes 0.57 to 1.1 times as
# long for them (an expert's rows 128 to 2,048).
STREAMED_SD = 0.15
GRAPHS_MEASURED_ON, GRAPHS_MOST_GPUS = "NVIDIA H200", 2


def has(calibration: Calibration, name: str) -> bool:
    """Whether it is of such steps: `ENGINE` or `GRAPHS`."""
    return any(one.name == name for one in calibration.parameters)


def as_run(calibration: Calibration, p: Parallelism, node: Node, model: ModelSpec) -> Calibration:
    """The calibration with what the split asks for; itself where that is nothing, or there.

    Raises UserError where it asks for products in FP8, for Transformer Engine or for CUDA graphs,
    and the calibration's devices have none.
    """
    if (
        p.on_engine
        and model.experts
        and (STREAMED, "forward", "bf16") not in calibration.kernel_fits
    ):
        calibration = _in_streams(Same(calibration))
    if p.fp8:
        calibration = with_fp8_products(calibration, node)
    asked = {"transformer_impl transformer_engine": p.on_engine, "cuda_graphs": p.cuda_graphs}
    for noun, so in asked.items():
        if so and (calibration.kind == "cpu" or "AMD" in node.gpu.upper()):
            raise UserError(
                f"{noun}: its kernels were timed on NVIDIA's GPUs, and node {node.name} has "
                f"{node.gpu}; leave it out"
            )
    if p.on_engine and not has(calibration, ENGINE):
        host = calibration.host
        on = engine_times(p)
        needed = [f"{on}part_us", *(["fp8_weight_us"] if p.fp8 else [])]
        needed += [f"{on}expert_us", f"{on}backward_expert_us"] if model.experts else []
        needed += ["te_adapter_us"] if model.lora_rank else []
        if p.cp > 1:
            needed.append("te_exchange_us" if p.exchanges_heads else "te_ring_us")
        lacking = [name for name in needed if not getattr(host, name)]
        if lacking:
            exchanged = lacking == ["te_exchange_us"]
            asks = "cp_comm_type a2a" if exchanged else "transformer_impl transformer_engine"
            raise UserError(
                f"{asks}: the calibration has no host.{lacking[0]}, as it is older; run "
                "calibrate.fit again"
            )
        calibration = _on_engine(Same(calibration), p.fp8)
    if p.cuda_graphs and not has(calibration, GRAPHS):
        known = p.gpus <= GRAPHS_MOST_GPUS and node.gpu == GRAPHS_MEASURED_ON
        known = known and (p.cp == 1 or p.exchanges_heads)
        calibration = _replayed(Same(calibration), GRAPHS_SD if known else GRAPHS_ELSEWHERE_SD)
    return calibration


@lru_cache(maxsize=8)
def _on_engine(same: Same[Calibration], fp8: bool) -> Calibration:
    """What the clock paces there has a model. Its host is less sure, where nothing was timed."""
    host = same.held.host
    sd = hypot(host.sd, host.fp8_sd if fp8 else host.te_sd)
    copy = same.held.kernel_fits["copy", "forward", "bf16"]
    paced = changed(copy, op=PACED, clock_exponent=1.0)
    return _less_sure(
        changed(same.held, host=changed(host, sd=sd), kernels=(*same.held.kernels, paced)),
        ENGINE,
        ENGINE_SD,
        "of a step whose norms, activations and rotary embeddings are told by copies",
    )


@lru_cache(maxsize=8)
def _in_streams(same: Same[Calibration]) -> Calibration:
    """Experts' products where none in streams was timed: those of one after another, less sure.

    Itself where no experts' products were timed at all.
    """
    fits = (same.held.kernel_fits.get(("grouped_gemm", way, "bf16")) for way in GEMM_DIRECTIONS)
    streamed = [
        changed(
            fit,
            op=STREAMED,
            host_us=STREAMED_ISSUE * fit.host_us,
            launch_us=STREAMS * fit.launch_us,  # of so many products, as many at a time
            noise=hypot(fit.noise, STREAMED_SD),
            points=tuple(changed(one, sd=hypot(one.sd, STREAMED_SD)) for one in fit.points),
        )
        for fit in fits
        if fit
    ]
    if not streamed:
        return same.held
    why = "of experts' products in streams, timed on no GPU of this system: of one after another"
    return changed(
        same.held,
        kernels=(*same.held.kernels, *streamed),
        parameters=(
            *same.held.parameters,
            assumed_factor("kernel.streamed_grouped_gemm", 1.0, STREAMED_SD, why),
        ),
    )


@lru_cache(maxsize=16)
def _replayed(same: Same[Calibration], sd: float) -> Calibration:
    return _less_sure(
        with_graphs(same.held),
        GRAPHS,
        sd,
        "of a step whose kernels follow each other as in graphs of an H200 (benchmarks/graphs.csv)",
    )


def _less_sure(calibration: Calibration, name: str, sd: float, detail: str) -> Calibration:
    """With more spread for what a step is made of."""
    return changed(
        calibration,
        composition_sd=hypot(calibration.composition_sd, sd),
        parameters=(*calibration.parameters, assumed_factor(name, 1.0, sd, detail)),
    )
