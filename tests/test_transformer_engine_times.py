"""What Transformer Engine's kernels take: as its benchmark and profiled steps have it."""

import re
from collections import defaultdict
from statistics import fmean, median

import pytest

from benchmarks.transformer_engine import OWN, Timed, summary
from simulate.hardware.as_run import as_run
from spec.calibration import read_calibration
from spec.files import read_table
from spec.step import layer, optimizer
from spec.step_transformer_engine import GENERAL, JOINED, accumulated
from spec.training_records import ProfileRow, TrainingRow
from tests.commands import RESULTS
from tests.simulated_steps import CALIBRATION, MODEL
from tests.test_transformer_engine import TE
from topologies import load_node


def test_general_norms_and_joined_gradients_take_what_the_benchmark_has() -> None:
    """Beside its copies; from 14 us of a copy on, which its host issues in time."""
    rows = {
        (one.what, one.way, one.shape, one.by): one.time_us
        for one in read_table(OWN, Timed)
        if one.gpu == "NVIDIA H200"
    }
    off = defaultdict(list)
    for (what, way, shape, by), time_us in rows.items():
        copy_us = rows.get((what, way, shape, "copy"), 0.0)
        if by != "engine" or copy_us < 14 or what not in (*GENERAL, "joined"):
            continue
        width = int(shape.split()[1].partition("=")[2])
        if what == "joined":
            off[what, way].append(JOINED * copy_us / time_us)
        elif width in GENERAL[what]:
            forward, back, beside = GENERAL[what][width]
            told_us = forward * copy_us if way == "forward" else back * copy_us + beside / 4.1e6
            off[what, way].append(told_us / time_us)
    assert {key: len(found) for key, found in off.items()} == {
        ("layernorm", "forward"): 16,
        ("layernorm", "backward"): 21,
        ("rmsnorm", "forward"): 13,
        ("rmsnorm", "backward"): 20,
        ("joined", "backward"): 3,
    }
    for key, found in off.items():
        assert median(found) == pytest.approx(1, abs=0.04), key
        assert all(0.85 < one < 1.15 for one in found), (key, found)


def test_what_adding_takes_is_what_the_benchmark_has() -> None:
    """Beside the kernel that does only that, by rows; medians of ten widths."""
    rows = {
        (one.shape, one.way, one.by): one.time_us
        for one in read_table(OWN, Timed)
        if one.what == "wgrad"
    }
    fit = CALIBRATION.kernel_fits["grad_accumulate", "forward", "bf16"]
    found = defaultdict(list)
    for (shape, way, by), time_us in rows.items():
        if way == "sum" and by != "copy":
            m, n, k = (int(one.partition("=")[2]) for one in shape.split())
            (own_us,) = fit.central_us(((n * k,),))
            found[m, by].append((time_us - rows[shape, "write", by]) / own_us)
    assert len(found) == 2 * 5
    for (m, by), ratios in found.items():
        assert len(ratios) == 10
        assert median(ratios) == pytest.approx(accumulated(m), abs=0.065), (m, by)


def test_kernels_of_its_update_take_what_profiles_say() -> None:
    """Fourteen profiled steps of one H200 and eight of others, by the kernels' own names."""
    folder = RESULTS / "2x-h200"
    steps = {
        one.case_id: one
        for path in folder.glob("*/training.csv")
        for one in read_table(path, TrainingRow)
    }
    fits = read_calibration(folder / "calibration.json").kernel_fits
    names = {
        "grad_norm": ("multi_tensor_l2norm::L2NormFunctor",),
        "copy": ("multi_tensor_scale::ScaleFunctor",),
        "adam": ("multi_tensor_adam::adamMode_t", "aten::copy_"),  # which writes bf16 weights
    }
    off = defaultdict(list)
    for run in ("20261129-043541", "20261129-043645", "20261129-045026", "20261129-163208"):
        for one in read_table(folder / run / "profile.csv", ProfileRow):
            if one.part != "optimizer":
                continue
            step = steps[one.case_id]
            if not step.on_engine:
                continue
            for kernel in optimizer(step.model_spec(), step.parallelism(), 0)[0][-3:]:
                took = [
                    re.findall(rf"{name}[^;]* ([\d.]+)(?:;|$)", one.operations)
                    for name in names[kernel.op]
                ]
                took_us = sum(1e3 * float(ms) for (ms,) in took)
                (told_us,) = fits[kernel.op, "forward", "bf16"].central_us((kernel.dims,))
                off[kernel.op].append(took_us / told_us)
    for found in off.values():
        assert len(found) == 22
        assert median(found) == pytest.approx(1.0, abs=0.03)
        assert all(0.95 < one < 1.1 for one in found)


def test_swiglus_gradient_and_rotary_embedding_go_with_the_clock_as_profiles_have_it() -> None:
    """Steps on Transformer Engine of H200, each at the clock that it ran at when it was timed."""
    folder = RESULTS / "2x-h200"
    steps = {
        one.case_id: one
        for path in sorted(folder.glob("*/training.csv"))
        for one in read_table(path, TrainingRow)
        if one.status == "done"
    }
    calibration = read_calibration(folder / "calibration.json")
    priced = as_run(calibration, TE, load_node("hgx-h200"), MODEL)
    fit, reference = priced.kernel_fits["paced_copy", "forward", "bf16"], priced.clock.reference_mhz
    off: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for path in sorted(folder.glob("*/profile.csv")):
        for one in read_table(path, ProfileRow):
            step = steps.get(one.case_id)
            if one.part != "memory" or one.rank or not step or not step.on_engine or step.experts:
                continue
            model, p, clock = step.model_spec(), step.parallelism(), step.clock_mean_mhz
            slower = (reference / clock) ** fit.clock_exponent
            for part, way, name in (
                ("swiglu", 1, "triton_poi_fused_add_cat_mul_rsub_sigmoid_silu_split_0"),
                ("rope", 0, "FusedRoPEFunc"),
                ("rope", 1, "FusedRoPEFuncBackward"),
            ):
                took = re.search(rf"(?:^|; ){name} ([\d.]+)", one.operations)
                if took:
                    (kernel,) = next(x for x in layer(model, p)[way] if x.name == part).kernels
                    told = fit.central_us((kernel.dims,))[0] * model.layers * p.microbatches
                    took_us = 1e3 * float(took[1])
                    off[part].append((clock, told / took_us, slower * told / took_us))
    assert {part: len(found) for part, found in off.items()} == {"swiglu": 24, "rope": 18}
    for part, mean in (("swiglu", 1.03), ("rope", 1.05)):
        under_cap = [one for one in off[part] if one[0] < 1650]
        assert fmean(by_clock for *_, by_clock in under_cap) == pytest.approx(mean, abs=0.03)
        assert fmean(copied for _, copied, _ in under_cap) < 0.87  # told a sixth too short before
        assert all(0.7 < by_clock < 1.2 for *_, by_clock in off[part])


def test_the_benchmark_sets_each_time_beside_a_copys_or_local_layers() -> None:
    one = Timed(gpu="a GPU", what="rope", way="forward", shape="1", by="engine", time_us=20.0)
    copies = one.model_copy(update={"by": "copy", "time_us": 10.0})
    nil = one.model_copy(update={"what": "nil", "by": "engine_fp8", "time_us": 30.0})
    local = nil.model_copy(update={"by": "local", "time_us": 15.0})
    back, local_back = (
        each.model_copy(update={"way": "backward", "time_us": time_us})
        for each, time_us in ((nil, 60.0), (local, 15.0))
    )
    lines = summary([one, copies, nil, local, back, local_back]).splitlines()
    assert [line.split()[-4:] for line in lines] == [
        ["engine", "/", "copy", "2.00"],
        ["engine_fp8", "/", "local", "2.00"],
        ["engine_fp8", "/", "local", "4.00"],
        ["engine_fp8", "/", "local", "3.00"],  # both passes
    ]
