"""Mixtures on Transformer Engine: a GPU's experts in one product each way."""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from math import hypot
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.transformer_engine import OWN, Timed, main
from measure.plans.cases import kernel_cases
from measure.plans.file import PlanFile
from measure.timed.operations import Maker
from measure.timed.products import Refused
from measure.training.trace import read_trace
from simulate import project
from simulate.cost.imbalance import IN_STREAMS, unequal_rows
from simulate.hardware.as_run import STREAMED_SD, as_run
from simulate.memory.peak import stage_memory
from spec.calibration import read_calibration
from spec.command import run
from spec.errors import UserError
from spec.files import read_table
from spec.fitted import changed
from spec.kernel import GEMM_DIRECTIONS, PACED, STREAMED, STREAMED_ISSUE, Kernel, parse_kernel
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.step import layer
from spec.step_experts import EXPERTS
from spec.step_parts import Part
from spec.step_transformer_engine import (
    ACCUMULATED_MOST,
    WEIGHTED_FORWARD,
    WEIGHTED_PACED,
    WEIGHTED_SUM,
    accumulated,
    accumulated_in_streams,
)
from spec.training_records import ProfileRow, TrainingRow
from tests.commands import RESULTS
from tests.simulated_steps import CALIBRATION, MODEL, MOE, NODE, simulate
from tests.test_training_profile import host, kernel, trace
from topologies import load_node

LOCAL = Parallelism(global_batch=4)
TE = LOCAL.model_copy(update={"transformer_impl": "transformer_engine"})


def parts(p: Parallelism) -> dict[tuple[str, int], Part]:
    """Of a layer, by name (of two alike the last) and whether backward."""
    return {(one.name, way): one for way in (0, 1) for one in layer(MOE, p)[way]}


def test_routing_and_exchange_are_as_of_local_layers() -> None:
    local, engine = parts(LOCAL), parts(TE)
    for name in ("router", "dispatch", "combine"):
        for way in (0, 1):
            assert engine[name, way] == local[name, way]
    for way in (0, 1):
        assert engine["attention", way].on == engine[EXPERTS, way].on == "te_"


def test_experts_multiply_as_much_as_one_after_another() -> None:
    for way, count in ((0, 2), (1, 4)):
        kernels = {p: parts(p)[EXPERTS, way].kernels for p in (LOCAL, TE)}
        products = [one for one in kernels[TE] if one.op == STREAMED]
        assert len(products) == count
        assert [(one.direction, one.dims) for one in products] == [
            (one.direction, one.dims) for one in kernels[LOCAL] if one.op == "grouped_gemm"
        ]
        apart = {"weigh", "swiglu"}  # told as copies
        assert not apart & {one.op for one in kernels[TE]}


def test_an_expert_takes_the_host_once_each_way() -> None:
    """And routing what it takes anywhere."""
    names = ("te_expert", "te_backward_expert")
    for way, name in enumerate(names):
        local, engine = (
            {one: sum(part.issued.get(one, 0) for part in layer(MOE, p)[way]) for one in names}
            for p in (LOCAL, TE)
        )
        assert local == dict.fromkeys(names, 0)
        assert engine == dict.fromkeys(names, 0) | {name: MOE.experts}
    routing = [sum(part.issued["routing"] for part in layer(MOE, p)[0]) for p in (LOCAL, TE)]
    assert routing[0] == routing[1] == pytest.approx(1)


@pytest.mark.parametrize("name", ["te_expert_us", "te_backward_expert_us"])
def test_a_host_that_takes_longer_for_experts_lengthens_steps_there_alone(name: str) -> None:
    slow = changed(CALIBRATION, host=changed(CALIBRATION.host, **{name: 1e5}))
    for p, longer in ((LOCAL, False), (TE, True)):
        before, after = (
            float(simulate(p, one, model=MOE).step_time_s[0]) for one in (CALIBRATION, slow)
        )
        assert (after > 1.5 * before) == longer


def test_a_calibration_of_before_is_fitted_again() -> None:
    unknown = dict.fromkeys(("te_expert_us", "te_backward_expert_us"), 0.0)
    older = changed(CALIBRATION, host=changed(CALIBRATION.host, **unknown))
    with pytest.raises(UserError, match=r"no host\.te_expert_us, as it is older; run calibrate"):
        as_run(older, TE, NODE, MOE)
    assert as_run(older, TE, NODE, MODEL).host.te_expert_us == 0.0  # a dense model has none


def test_what_was_never_timed_takes_what_one_after_another_does() -> None:
    one = Kernel(STREAMED, "wgrad", (8, 8192, 28672, 4096))
    assert one.stand_in == Kernel("grouped_gemm", "wgrad", one.dims)
    assert one.stand_in.flops == one.flops
    assert one.stand_in.bytes == one.bytes


def test_kernel_suites_time_it_where_transformer_engine_is() -> None:
    without, there = (
        {case.kernel.op for case in kernel_cases("nvidia", 1, False, (), PlanFile(), engine=engine)}
        for engine in (False, True)
    )
    assert there - without == {STREAMED}
    with pytest.raises(Refused, match="it is Transformer Engine's, which is not here"):
        Maker(torch.device("cpu")).build(Kernel(STREAMED, "forward", (2, 32, 16, 16)))


def timed() -> dict[tuple[str, str, str, str], float]:
    """What the benchmark has of experts on an H200, us."""
    rows = read_table(OWN, Timed)
    return {
        (one.what, one.shape, one.way, one.by): one.time_us
        for one in rows
        if one.what in ("weighted", "grouped")
    }


def test_an_activation_that_weighs_its_rows_takes_what_the_benchmark_has() -> None:
    times, found = timed(), defaultdict(list)
    for (what, shape, way, by), time_us in times.items():
        if what == "weighted" and by == "engine":
            found[way].append(time_us / times[what, shape, way, "copy"])
    told = {"forward": WEIGHTED_FORWARD, "backward": WEIGHTED_PACED + WEIGHTED_SUM}
    for way, copies in told.items():
        assert found[way] == pytest.approx([copies] * 4, rel=0.06)


def test_what_adding_takes_is_what_the_benchmark_has() -> None:
    """In kernels that only add, by an expert's rows and weights."""
    fit = CALIBRATION.kernel_fits["grad_accumulate", "forward", "bf16"]
    times, off = timed(), {}
    for (what, shape, way, by), time_us in times.items():
        if (what, way, by) == ("grouped", "sum", "engine"):
            groups, m, n, k = parse_kernel("grouped_gemm", "forward", shape, "bf16").dims
            (own_us,) = fit.central_us(((groups * n * k,),))
            added_us = time_us - times[what, shape, "write", by]
            off[shape] = accumulated_in_streams(m // groups, n * k) - added_us / own_us
    assert len(off) == 12
    assert all(abs(one) < 0.18 for one in off.values()), off
    assert fmean(map(abs, off.values())) < 0.07
    assert accumulated_in_streams(128, 2**30) == ACCUMULATED_MOST
    assert accumulated_in_streams(4096, 2**30) == accumulated(4096)


def test_random_shares_of_the_rows_take_longer_than_equal_ones() -> None:
    times, found = timed(), []
    for (what, shape, way, by), time_us in times.items():
        if what == "grouped" and by == "engine_uneven" and way != "sum":
            found.append(time_us / times[what, shape, way, "engine"])
    assert len(found) == 36
    assert fmean(found) == pytest.approx(IN_STREAMS, abs=0.003)
    assert unequal_rows(Kernel(STREAMED, "wgrad", (8, 8192, 4096, 4096)), 132) == IN_STREAMS


def test_products_in_streams_that_no_gpu_was_timed_on_are_less_sure_and_issued_as_elsewhere() -> (
    None
):
    kept = tuple(one for one in CALIBRATION.kernels if one.op != STREAMED)
    without = changed(CALIBRATION, kernels=kept)
    priced = as_run(without, TE, NODE, MOE)
    for way in GEMM_DIRECTIONS:
        own, streamed = (priced.kernel_fits[op, way, "bf16"] for op in ("grouped_gemm", STREAMED))
        assert streamed.host_us == pytest.approx(STREAMED_ISSUE * own.host_us)
        assert streamed.noise >= STREAMED_SD
        for dims in ((8, 2048, 1024, 2048), (32, 16384, 1024, 1536), own.points[0].dims):
            assert streamed.central_us((dims,)) == pytest.approx(own.central_us((dims,)))
        known = own.points[0].dims
        assert streamed.time_us(known)[1] == pytest.approx(
            hypot(own.time_us(known)[1], STREAMED_SD)
        )
    (assumed,) = (one for one in priced.parameters if one.name == "kernel.streamed_grouped_gemm")
    assert assumed.source == "assumed"
    assert as_run(without, LOCAL, NODE, MOE) is without


def test_measured_peaks_are_counted_from_the_sources() -> None:
    """Plans 74 and 75, the first of which was sealed before: 0.2 % off, without a workspace."""
    found = []
    for path in sorted((RESULTS / "2x-h200").glob("20261129-16*/training.csv")):
        for row in read_table(path, TrainingRow):
            if row.on_engine and row.experts and row.peak_allocated_gib:
                real = max(map(float, row.peak_allocated_gib.split(",")))
                told = stage_memory(row.model_spec(), row.parallelism(), 0).allocated / 2**30
                found.append(told / real - 1)
    assert len(found) == 28
    assert fmean(map(abs, found)) < 0.0015
    assert max(map(abs, found)) < 0.006


def test_a_mixture_there_takes_less_than_by_local_layers() -> None:
    model = load_model("mixtral-8x7b").resized(layers=2)
    local, engine = (stage_memory(model, p, 0) for p in (LOCAL, TE))
    assert engine.activations < local.activations
    assert simulate(TE, model=MOE).step_time_s[0] < simulate(LOCAL, model=MOE).step_time_s[0]


def test_what_overlaps_in_a_trace_counts_once_and_experts_are_told_by_their_kernels() -> None:
    """Four streams: a product begins before the last one ended."""
    before = read_trace(trace())
    two = trace()
    two["traceEvents"] += [
        host("_GroupedLinear", 20, 3, **{"External id": 8}),
        kernel("nvjet_tst_64x64", 150, 100, 8),  # beside a product, attention and a norm
    ]
    found = read_trace(two)
    assert sum(time for time, _ in found["compute"].values()) == pytest.approx(
        sum(time for time, _ in before["compute"].values())
    )
    assert found["idle_us"] == before["idle_us"]
    assert found["operations"]["gemm"]["_GroupedLinear"] == pytest.approx(50)
    assert "_GroupedLinear" not in found["operations"]["memory"]


def test_a_projection_says_how_its_experts_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And names what has them in one product, where that is asked for and on no AMD GPU."""
    monkeypatch.chdir(tmp_path)
    words = ["--gpus", "8", "--results", str(RESULTS), "--draws", "20", "--tp", "1", "--pp", "1"]
    engine = ["--transformer-impl", "transformer_engine"]
    for model, more, said in (
        ("phi-3.5-moe", [], True),
        ("phi-3.5-moe", engine, False),
        ("phi-3.5-moe", ["--node", "mi300x-node"], False),
        ("llama3.2-1b", [], False),
    ):
        asked = ["--model", model, "--system", "8x-h200", *words, *more, "--json"]
        assert run(project.main, asked) == 0
        warnings = json.loads(capsys.readouterr().out)["warnings"]
        assert any("one after another" in one for one in warnings) is said, more


def grouped_as_the_library_has_it(
    a: Sequence[Any],
    b: Sequence[Any],
    outs: list[Any],
    quantizers: Sequence[None],
    out_dtype: torch.dtype,
    layout: str,
    *,
    m_splits: Sequence[int],
    grad: bool,
    use_split_accumulator: bool,
    single_output: bool = False,
    accumulate: bool = False,
) -> list[Any]:
    """A stand-in for Transformer Engine's `general_grouped_gemm`, by its documentation."""
    assert len(a) == len(b) == len(quantizers) == len(m_splits)
    assert grad is (layout != "TN")
    assert not use_split_accumulator or grad  # in FP8 the recipes' forward products sum fast
    multiply = {
        "TN": lambda weight, x: x @ weight.t(),
        "NN": lambda weight, gradient: gradient @ weight,
        "NT": lambda x, gradient: gradient.t() @ x,
    }[layout]
    each = [multiply(one, other) for one, other in zip(a, b, strict=True)]
    if single_output:
        outs[0].copy_(torch.cat(each))
    else:
        for out, one in zip(outs, each, strict=True):
            out.add_(one) if accumulate else out.copy_(one)
    return outs


class CastsAsTheLibraryDoes:
    """A stand-in for Transformer Engine's `Float8Quantizer`, whose scale is one."""

    def __init__(
        self, scale: Tensor, most: Tensor, kind: torch.dtype, *, rowwise: bool, columnwise: bool
    ) -> None:
        assert scale == 1
        assert not most
        assert rowwise
        assert columnwise
        self.kind = kind

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.kind).to(tensor.dtype)


@pytest.mark.parametrize("adds_up", [False, True])
@pytest.mark.parametrize("way", GEMM_DIRECTIONS)
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_product_in_streams_is_each_experts_own(
    monkeypatch: pytest.MonkeyPatch, dtype: str, way: str, adds_up: bool
) -> None:
    extensions = SimpleNamespace(general_grouped_gemm=grouped_as_the_library_has_it)
    wide, narrow = torch.float8_e5m2, torch.float8_e4m3fn
    kinds = SimpleNamespace(kFloat8E4M3=narrow, kFloat8E5M2=wide)
    for name, module in (
        ("transformer_engine", SimpleNamespace(__version__="0")),
        ("transformer_engine_torch", SimpleNamespace(DType=kinds)),
        ("transformer_engine.pytorch", SimpleNamespace()),
        ("transformer_engine.pytorch.cpp_extensions", extensions),
        ("transformer_engine.pytorch.tensor", SimpleNamespace()),
        (
            "transformer_engine.pytorch.tensor.float8_tensor",
            SimpleNamespace(Float8Quantizer=CastsAsTheLibraryDoes),
        ),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    splits, (m, n, k) = [16, 0, 32], (48, 32, 16)
    asked = Kernel(STREAMED, way, (3, m, n, k), dtype)
    call, name = Maker(torch.device("cpu")).streamed(asked, torch.float32, splits, adds_up)
    outs = call()
    assert name == "transformer-engine-0/grouped"
    maker = Maker(torch.device("cpu"))  # draws the same numbers in the same order

    def drawn(kind: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
        value = maker._normal(*shape, dtype=torch.float32, scale=scale)
        return value.to(kind).to(value.dtype) if dtype == "fp8" else value

    g = drawn(wide, m, n) if way != "forward" else None
    x = drawn(narrow, m, k) if way != "dgrad" else None
    if way == "wgrad":
        assert g is not None
        assert x is not None
        own = [one.t() @ other for one, other in zip(g.split(splits), x.split(splits), strict=True)]
        for out, one in zip(outs, own, strict=True):
            torch.testing.assert_close(out, one * (2 if adds_up else 1))  # it ran once before
        return
    w = [drawn(narrow, n, k, scale=0.02) for _ in splits]
    rows = (g if x is None else x).split(splits)
    products = [
        one @ (weight if way == "dgrad" else weight.t())
        for one, weight in zip(rows, w, strict=True)
    ]
    torch.testing.assert_close(outs[0], torch.cat(products))


def test_experts_gradients_go_with_the_clock_as_profiles_have_it() -> None:
    """Plan 75's three profiled steps: the kernel beside which another sums over a row."""
    folder = RESULTS / "2x-h200"
    rows = read_table(folder / "20261129-162618" / "training.csv", TrainingRow)
    steps = {one.case_id: one for one in rows}
    priced = as_run(read_calibration(folder / "calibration.json"), TE, load_node("hgx-h200"), MOE)
    fit = priced.kernel_fits[PACED, "forward", "bf16"]
    off = []
    for one in read_table(folder / "20261129-163208" / "profile.csv", ProfileRow):
        if one.part == "memory":
            step = steps[one.case_id]
            model, p = step.model_spec(), step.parallelism()
            took_ms = re.search(r"triton_poi_fused_add\w+silu_split_0 ([\d.]+)", one.operations)
            (experts,) = (part for part in layer(model, p)[1] if part.name == EXPERTS)
            (paced,) = (kernel for kernel in experts.kernels if kernel.op == PACED)
            slower = priced.clock.reference_mhz / (step.clock_mean_mhz or 0)
            told_ms = fit.central_us((paced.dims,))[0] * model.layers * p.microbatches / 1e3
            assert took_ms
            off.append(slower * told_ms / float(took_ms[1]))
    assert len(off) == 3
    assert off == pytest.approx([1.0] * 3, abs=0.07)


def test_what_the_benchmark_leaves_out_is_for_what_it_measures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(main, ["--only", "experts"]) == 2
    assert "--only says what --measure times; add --measure" in capsys.readouterr().err
