"""Times of Megatron-LM's log that cannot be: faster than the GPU, or against its own throughput."""

from collections.abc import Sequence

from measure.logs.megatron_lines import Iteration
from spec.chips import PEAK_TFLOPS, chip_of
from spec.errors import UserError
from spec.model import ModelSpec
from spec.parallelism import Parallelism

FP8_TIMES = 2  # as fast as bf16, on all of these
APART = 10  # printed and computed throughput are of other steps where they differ more
LAST_DIGIT = 0.1  # TFLOP/s, of a printed throughput


def peak_tflops(device: str, fp8: bool) -> float | None:
    """What no step on a GPU can exceed, 1e12 FLOP/s; None where its name is of none known."""
    chip = chip_of(device)
    return None if chip is None else PEAK_TFLOPS[chip] * (FP8_TIMES if fp8 else 1)


def refuse_impossible_times(
    path: str, steps: Sequence[Iteration], model: ModelSpec, p: Parallelism, device: str
) -> None:
    """Raise UserError on the first step that cannot have taken the time that its line says."""
    flops = model.step_flops(p.global_batch) / p.gpus
    masked = 3 * model.layers * model.core_flops_per_token / 2  # attention's half need not run
    least = flops - masked * model.seq_len * p.global_batch / p.gpus
    peak = peak_tflops(device, p.fp8)
    for one in steps:
        said = f"{path} line {one.line}: elapsed time per iteration is {one.seconds * 1e3:g} ms"
        if peak is not None and least / one.seconds > peak * 1e12:
            raise UserError(
                f"{said}, in which each GPU would make {least / one.seconds / 1e12:.4g} TFLOP/s; "
                f"{device} has {peak:g} at most, so that it must be {least / peak / 1e9:.4g} ms or "
                "more of the step that the arguments describe"
            )
        told, rate = one.tflops, flops / one.seconds / 1e12
        if told is not None and not (
            (told - LAST_DIGIT) / APART <= rate <= APART * (told + LAST_DIGIT)
        ):
            raise UserError(
                f"{said}, which is {rate:.4g} TFLOP/s per GPU for the step that the arguments "
                f"describe; the throughput per GPU that it says is {told:g}, and must be near that"
            )
