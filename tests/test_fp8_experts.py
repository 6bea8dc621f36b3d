"""Mixtures in FP8 on Transformer Engine: what is padded, cast and multiplied there, and when."""

import re
from statistics import median

import pytest

from benchmarks.transformer_engine import OWN, Timed
from calibrate.host.equations import equations
from measure.suites import host_time
from simulate.hardware.as_run import as_run
from spec.buckets import gradient_buckets
from spec.calibration import read_calibration
from spec.errors import UserError
from spec.files import read_table
from spec.fitted import changed
from spec.kernel import GEMM_DIRECTIONS, STREAMED, Kernel
from spec.parallelism import Parallelism
from spec.step import layer, product_tensors, product_weights, weight_casts
from spec.step_experts import EXPERTS
from spec.step_parts import Part
from spec.step_transformer_engine import PADDED, SPLIT_CAST, WRITTEN, adding_share
from spec.training_records import ProfileRow, TrainingRow
from tests.commands import RESULTS
from tests.simulated_steps import CALIBRATION, MOE, NODE, simulate
from tests.test_memory import measured
from tests.test_nil_steps import nil_row

TE = Parallelism(global_batch=4, transformer_impl="transformer_engine")
FP8 = TE.model_copy(update={"fp8": True})
PLAN_76 = RESULTS / "2x-h200" / "20261129-185759" / "training.csv"


def experts(p: Parallelism, way: int) -> Part:
    (found,) = (one for one in layer(MOE, p)[way] if one.name == EXPERTS)
    return found


def elements(kernels: tuple[Kernel, ...]) -> int:
    return sum(one.dims[0] for one in kernels if one.op == "copy")


@pytest.mark.parametrize("way", [0, 1])
def test_experts_in_fp8_are_padded_and_cast_around_the_same_products(way: int) -> None:
    wide, narrow = experts(TE, way).kernels, experts(FP8, way).kernels
    products = [[one for one in some if one.op == STREAMED] for some in (wide, narrow)]
    assert [one.dims for one in products[0]] == [one.dims for one in products[1]]
    assert {one.dtype for one in products[1]} == {"fp8"}
    rows = MOE.seq_len * MOE.top_k
    # a product's input forward, its output's gradient backward; rows in and out of where they are
    # padded each way
    cast = MOE.hidden + MOE.ffn_hidden * (1, 2)[way]
    more = rows * (SPLIT_CAST * cast + 2 * PADDED * MOE.hidden)
    assert elements(narrow) - elements(wide) == pytest.approx(more, rel=1e-6)


def test_an_expert_in_fp8_takes_its_host_what_its_own_numbers_say() -> None:
    for way, name in enumerate(("expert", "backward_expert")):
        assert experts(FP8, way).issued[f"fp8_{name}"] == MOE.experts
        assert experts(TE, way).issued[f"te_{name}"] == MOE.experts
        for p, here, there in ((TE, "te_", "fp8_"), (FP8, "fp8_", "te_")):
            slow = {f"{one}{name}_us": 1e5 for one in (here, there)}
            times = [
                float(simulate(p, changed(CALIBRATION, host=host), model=MOE).step_time_s[0])
                for host in (
                    CALIBRATION.host,
                    changed(CALIBRATION.host, **{f"{there}{name}_us": 1e5}),
                    changed(CALIBRATION.host, **slow),
                )
            ]
            assert times[0] == times[1] < times[2]


def test_a_steps_first_microbatch_in_fp8_writes_its_gradients() -> None:
    assert adding_share(TE) == 1
    assert adding_share(FP8.model_copy(update={"global_batch": 1})) == pytest.approx(WRITTEN)
    assert adding_share(FP8.model_copy(update={"global_batch": 4})) == 1 - (1 - WRITTEN) / 4
    again = {"global_batch": 1, "recompute": "full"}  # the layer ran before
    assert adding_share(FP8.model_copy(update=again)) == 1
    sums = {
        p: sum(one.dims[0] for one in experts(p, 1).kernels if one.op == "grad_accumulate")
        for p in (TE, FP8)
    }
    assert sums[FP8] == pytest.approx(adding_share(FP8) * sums[TE], rel=1e-6)


def test_casts_and_padding_take_what_the_benchmark_has() -> None:
    """Of all experts' rows in one kernel, up to 16 of them; padding of up to 64."""
    times = {(one.what, one.way, one.shape, one.by): one.time_us for one in read_table(OWN, Timed)}
    copies = {
        key[:3]: time_us / times[*key[:3], "copy"]
        for key, time_us in times.items()
        if key[0] in ("split", "padding", "weights") and key[3] == "engine_fp8"
    }
    few = {key: found for key, found in copies.items() if "groups=128" not in key[2]}
    cast = [found for key, found in few.items() if key[0] == "split" and "=32 " not in key[2]]
    assert cast == pytest.approx([SPLIT_CAST] * 3, rel=0.1)
    padded = [found for key, found in few.items() if key[0] == "padding"]
    assert padded == pytest.approx([PADDED] * 10, rel=0.07)
    assert all(found < 1.5 for key, found in few.items() if key[0] == "weights")


def test_casts_take_what_profiles_of_plan_76_have() -> None:
    fit = read_calibration(RESULTS / "2x-h200" / "calibration.json").kernel_fits[
        "copy", "forward", "bf16"
    ]
    steps = {one.case_id: one for one in read_table(PLAN_76, TrainingRow)}
    found = []
    profiles = RESULTS / "2x-h200" / "20261129-190201" / "profile.csv"
    for row in (one for one in read_table(profiles, ProfileRow) if one.part == "memory"):
        step = steps[row.case_id]
        model, p = step.model_spec(), step.parallelism()
        rows, often = p.microbatch * model.seq_len * model.top_k, p.microbatches * model.layers
        for kind, widths in (
            ("e4m3", (model.hidden, model.ffn_hidden)),
            ("e5m2", (model.hidden, 2 * model.ffn_hidden)),
        ):
            (took_ms,) = re.findall(
                rf"multi_cast_transpose_kernel<4, 8, false, float, __nv_bfloat16, __nv_fp8_{kind}>"
                r"[^;]* ([\d.]+)(?:;|$)",
                row.operations,
            )
            copies_us = sum(fit.central_us((((rows * width),),))[0] for width in widths)
            found.append(1e3 * float(took_ms) / often / copies_us)
    assert len(found) == 12
    assert median(found) == pytest.approx(SPLIT_CAST, rel=0.05)
    assert all(2.2 < one < 2.7 for one in found)


def test_experts_have_their_gradients_together() -> None:
    """A bucket is reduced when its last gradient is there: of one product, all experts' at once."""
    split = {"dp": 2, "overlap": True, "global_batch": 8}
    both = local, engine = [
        gradient_buckets(MOE, Parallelism(**split, **more), 0)
        for more in ({}, {"transformer_impl": "transformer_engine"})
    ]
    assert len({one.ready for one in local}) > 2 * MOE.experts * MOE.layers
    moments = {one.ready for one in engine}
    assert len(moments) <= 4 * MOE.layers + 2  # second products, first ones, attention, the rest
    assert sum(one.parameters for one in engine) == sum(one.parameters for one in local)
    for share in (0.02, 0.05, 0.3, 0.6, 0.9):
        there = [sum(one.parameters for one in some if one.ready <= share) for some in both]
        assert there[1] <= there[0]


def test_weights_are_cast_once_a_step_by_a_host_that_takes_each_its_time() -> None:
    assert product_tensors(MOE, FP8, 0) == MOE.layers * (2 + 2 * MOE.experts)
    assert weight_casts(MOE, FP8, 0).bytes == pytest.approx(4 * product_weights(MOE, FP8, 0))
    host = CALIBRATION.host
    for p, longer in ((TE, False), (FP8, True)):
        before, after = (
            float(
                simulate(
                    p,
                    changed(CALIBRATION, host=changed(host, fp8_weight_us=each)),
                    model=MOE,
                ).step_time_s[0]
            )
            for each in (1.0, 1e4)
        )
        assert (after > before) == longer


@pytest.mark.parametrize("vpp", [1, 2])
def test_stages_cast_their_weights_one_after_another(vpp: int) -> None:
    """As each one's first pass follows another's: all casts are waited for, however it is cut."""
    more = []
    for pp in (1, 2, 4):
        p = FP8.model_copy(update={"pp": pp, "vpp": vpp if pp > 1 else 1, "global_batch": 8})
        before, after = (
            float(simulate(p, changed(CALIBRATION, host=host), model=MOE).step_time_s[0])
            for host in (changed(CALIBRATION.host, fp8_weight_us=each) for each in (1e3, 2e3))
        )
        more.append(after - before)
    alone = 1e-3 * product_tensors(MOE, FP8, 0)
    assert more == pytest.approx([alone, *[alone / vpp] * 2], rel=0.02)


def test_a_product_in_fp8_that_was_not_timed_takes_its_host_what_one_in_bf16_does() -> None:
    """In nil steps as where steps are priced, so that nothing of it counts twice."""
    kept = [one for one in CALIBRATION.kernels if (one.op, one.dtype) != (STREAMED, "fp8")]
    case = host_time.HostCase(1.0, 1, experts=8, transformer_impl="transformer_engine", fp8=True)
    row = nil_row(case, slower=1.0)
    counted = [one.kernels_us for one in equations(row, kept, 1.0)][:2]
    priced = as_run(changed(CALIBRATION, kernels=tuple(kept)), FP8, NODE, MOE)
    assert [one.kernels_us for one in equations(row, priced.kernels, 1.0)][:2] == counted


def test_products_in_fp8_streams_are_told_by_bf16_where_none_were_timed() -> None:
    kept = tuple(one for one in CALIBRATION.kernels if one.op != STREAMED)
    priced = as_run(changed(CALIBRATION, kernels=kept), FP8, NODE, MOE)
    for way in GEMM_DIRECTIONS:
        wide, narrow = (priced.kernel_fits[STREAMED, way, dtype] for dtype in ("bf16", "fp8"))
        assert narrow.tflops is not None
        assert wide.tflops is not None
        assert 1.5 < narrow.tflops / wide.tflops < 2.1


def test_a_calibration_without_experts_in_fp8_is_fitted_again() -> None:
    older = changed(
        CALIBRATION,
        host=changed(CALIBRATION.host, fp8_expert_us=0.0, fp8_backward_expert_us=0.0),
    )
    with pytest.raises(UserError, match=r"no host\.fp8_expert_us, as it is older; run calibrate"):
        as_run(older, FP8, NODE, MOE)
    as_run(older, TE, NODE, MOE)


def test_peaks_of_plan_76_are_what_was_counted_before_they_ran() -> None:
    """What PyTorch allocated at most on GPUs of thirteen steps in FP8."""
    mine = [one for one in measured("2x-h200", engine=True) if one[3] == PLAN_76.parent.name]
    assert len({row.case_id for row, *_ in mine}) == 13
    for row, _, peaks, _ in mine:
        took_gib, told = peaks["allocated"]
        assert told["median"] == pytest.approx(took_gib, rel=0.02), row.case_id
