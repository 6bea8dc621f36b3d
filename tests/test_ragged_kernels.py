"""Shapes that tiles do not divide, and shapes beyond all measured ones."""

from pathlib import Path

import numpy as np
import pytest

from calibrate.fit import systems
from calibrate.kernels.correction import LEARN_FROM
from calibrate.kernels.shapes import by_model
from measure.store.write import Store
from spec.calibration import Calibration, read_calibration
from spec.errors import UserError
from spec.files import read_json, read_table, write_json, write_table
from spec.kernel import PLAIN, SUM_BYTES, Kernel
from spec.kernel_fit import (
    BEYOND_SD,
    BY_ROW,
    UNLIKE_SD,
    WIDE_BACKWARD,
    KernelFit,
    Physics,
    Reach,
    features,
    quantisation,
)
from spec.records import KernelRow
from spec.results import read_result_set
from tests.made_up import calibration_json
from tests.test_calibrate_fit import run_folder, write_small
from tests.test_calibrate_products import TRUTH, row


def attention(head_dim: int, heads: int = 32, direction: str = "forward") -> Kernel:
    return Kernel("attention", direction, (1, 4096, heads, heads, head_dim))


@pytest.mark.parametrize(
    ("kernel", "model"),
    [
        (Kernel("gemm", "forward", (2048, 6144, 4096)), "gemm"),
        (Kernel("gemm", "wgrad", (2000, 6144, 4096)), "gemm"),  # tokens may be any number
        (Kernel("gemm", "forward", (2048, 6144, 4256)), "ragged_gemm"),
        (Kernel("gemm", "dgrad", (2048, 1600, 4096)), "ragged_gemm"),
        (Kernel("gemm", "forward", (2048, 32, 4256)), "narrow_gemm"),
        (attention(128), "attention"),
        (attention(192), "attention"),
        (attention(152), "ragged_attention"),
        (Kernel("attention_block", "forward", (1, 4096, 4096, 8, 8, 80)), "attention_block"),
    ],
)
def test_shapes_that_tiles_do_not_divide_have_models_of_their_own(
    kernel: Kernel, model: str
) -> None:
    assert kernel.modelled == model
    same = Kernel(model, kernel.direction, kernel.dims)
    assert (same.flops, same.bytes) == (kernel.flops, kernel.bytes)


def test_heads_last_as_long_as_padded_ones() -> None:
    """On an H200: 457 us of 72 values, 459 of 96, 470 of 112 and 128; 652 of 144, 662 of 192."""
    physics = Physics(3.0, 4000.0, 600.0)
    times = {size: physics.time_us(attention(size)) for size in (64, 65, 72, 96, 128, 144, 192)}
    assert times[65] == times[72] == times[96] == times[128]
    assert times[144] == times[192]
    assert times[64] < times[128] < times[192]
    assert quantisation(attention(32), 132) == 1.0  # a CPU's heads are as they are
    assert features("attention", [attention(96).dims])[0, -1] == np.log(128)


def test_what_divides_a_ragged_shape_is_a_feature() -> None:
    even, odd = features("ragged_gemm", [(2048, 6400, 4256), (2048, 6392, 4255)])
    assert even[-2:] == pytest.approx(np.log([256, 32]))
    assert odd[-2:] == pytest.approx(np.log([8, 1]))


def test_rows_that_begin_between_lines_of_a_cache_are_told_apart() -> None:
    """On H200 and H100 norms and biases' gradients of such widths last 5 to 8 % longer."""
    shapes = [(8192, 1600), (8192, 1664), (8192, 6400)]
    for op in BY_ROW:
        assert features(op, shapes)[:, -1] == pytest.approx(np.log([64, 128, 128]))
    assert features("residual", shapes).shape == (3, 2)


def test_a_norm_that_was_read_back_counts_on_a_cpu_alone(tmp_path: Path) -> None:
    write_small(tmp_path / "results", ("gemm", "copy"))
    run = run_folder(tmp_path / "results")
    rows = read_table(run / "kernels.csv", KernelRow)
    norms = {"op": "grad_norm", "implementation": "torch/eager"}
    held = [one.model_copy(update=norms) if one.op == "copy" else one for one in rows]
    write_table(run / "kernels.csv", KernelRow, held)
    found = read_result_set(run)
    assert found.table(KernelRow) == [one for one in rows if one.op == "gemm"]
    every = {one.case_id for one in rows}
    assert found.cases(KernelRow) == every
    assert Store.reopen(run).done("kernels") == every  # a resumed run does none of them again
    read = [one.model_copy(update={"implementation": "torch/norm"}) for one in held]
    write_table(run / "kernels.csv", KernelRow, read)
    assert read_result_set(run).table(KernelRow) == read
    write_table(run / "kernels.csv", KernelRow, held)
    manifest = read_json(run / "manifest.json", "a manifest")
    for device in manifest["hosts"][0]["devices"]:
        device |= {"kind": "cpu", "max_clock_mhz": None, "power_limit_w": None}
    write_json(run / "manifest.json", manifest)
    assert read_result_set(run).table(KernelRow) == held


def test_a_spread_grows_beyond_what_was_measured_and_not_within(tmp_path: Path) -> None:
    value = calibration_json()
    kernels = {(one["op"], one["direction"]): one for one in value["kernels"]}
    fields = kernels["gemm", "forward"] | {
        "points": [
            {"dims": [size] * 3, "time_us": 100.0, "sd": 0.01} for size in (1024, 2048, 4096)
        ]
    }
    fit = KernelFit.model_validate(fields)
    spreads = [fit.model_us((size, 2048, 2048))[1] for size in (1536, 4096, 8192, 65536, 1048576)]
    assert spreads == sorted(spreads)
    farthest, far = (np.log(size / 4096) for size in (1048576, 65536))
    grown = BEYOND_SD**2 * (farthest**2 - far**2)  # both are far from all points
    assert spreads[-1] ** 2 - spreads[-2] ** 2 == pytest.approx(grown, rel=1e-3)
    inside = KernelFit.model_validate(fields | {"points": kernels["gemm", "forward"]["points"]})
    assert inside.model_us((2048, 2048, 2048))[1] == pytest.approx(np.hypot(0.05, 0.02))


def test_ragged_ones_need_enough_shapes_and_disturbed_rows_do_not_count(tmp_path: Path) -> None:
    write_small(tmp_path / "results", ("gemm", "attention", "copy", "adam"))
    path = run_folder(tmp_path / "results") / "kernels.csv"
    rows = [one for one in read_table(path, KernelRow) if one.kernel.modelled not in PLAIN]
    plain = next(one for one in rows if one.op == "gemm" and one.state == "burst")
    kernels = [Kernel("gemm", "forward", (2048, 1600 + 64 * n, 4256)) for n in range(LEARN_FROM)]
    more = [row(one, TRUTH.kernel_us(one), plain) for one in kernels]

    def models(extra: list[KernelRow]) -> set[str]:
        write_table(path, KernelRow, [*rows, *extra])
        return {op for op, _, _ in by_model(systems(tmp_path / "results")[0])}

    assert "ragged_gemm" in models(more)
    assert not models(more[:-1]) & PLAIN.keys()
    slow = 2 * more[-1].p90_us
    late = more[-1].model_copy(update={"median_us": slow, "p90_us": slow})
    assert (late.disturbed, more[-1].disturbed) == (True, False)
    assert not models([*more[:-1], late]) & PLAIN.keys()


def test_where_an_operation_has_no_other_rows_disturbed_ones_count(tmp_path: Path) -> None:
    write_small(tmp_path / "results", ("gemm", "attention", "copy", "adam"))
    path = run_folder(tmp_path / "results") / "kernels.csv"

    def late(one: KernelRow) -> KernelRow:
        slow = 2 * one.p90_us
        change = {"median_us": slow, "p90_us": slow, "state": "burst"}
        return one.model_copy(update=change) if one.op == "adam" else one

    write_table(path, KernelRow, [late(one) for one in read_table(path, KernelRow)])
    assert ("adam", "forward", "bf16") in by_model(systems(tmp_path / "results")[0])


def test_a_cpu_has_other_tiles(tmp_path: Path) -> None:
    write_small(tmp_path / "results", ("gemm", "attention", "copy", "adam"))
    path = run_folder(tmp_path / "results") / "kernels.csv"
    rows = read_table(path, KernelRow)
    plain = next(one for one in rows if one.op == "gemm" and one.state == "burst")
    kernels = [Kernel("gemm", "forward", (2048, 1600 + 64 * n, 4256)) for n in range(LEARN_FROM)]
    write_table(path, KernelRow, [*rows, *(row(one, 50.0, plain) for one in kernels)])
    (evidence,) = systems(tmp_path / "results")
    assert "ragged_gemm" in {op for op, _, _ in by_model(evidence)}
    for run in evidence.runs:
        for host in run.manifest.hosts:
            for device in host.devices:
                object.__setattr__(device, "kind", "cpu")
    found = by_model(evidence)
    assert "ragged_gemm" not in {op for op, _, _ in found}
    assert {one.dims for one in found["gemm", "forward", "bf16"]} >= {one.dims for one in kernels}


def test_a_measured_shape_is_looked_up_whichever_model_has_it() -> None:
    value = calibration_json()
    odd, even = (
        Kernel("gemm", "forward", (2048, 9728, 896)),
        Kernel("gemm", "forward", (8, 512, 512)),
    )
    for one in value["kernels"]:
        if (one["op"], one["direction"]) == ("gemm", "forward"):
            one["points"].append({"dims": odd.dims, "time_us": 60.2, "sd": 0.01})
    both = Calibration.model_validate(value)
    assert both.kernel(odd).time_us(odd.dims)[0] == 60.2  # too few of its own kind to be fitted
    other = Kernel("gemm", "forward", (2048, 9728, 1000))
    assert both.kernel(other).op == "ragged_gemm"
    # a system that has but ragged ones has a model for all
    kernels = [one for one in value["kernels"] if one["op"] != "gemm"]
    alone = Calibration.model_validate(value | {"kernels": kernels})
    assert alone.kernel(even).op == "ragged_gemm"


def test_a_calibration_with_too_few_length_scales_is_refused(tmp_path: Path) -> None:
    value = calibration_json()
    ragged = next(one for one in value["kernels"] if one["op"] == "ragged_gemm")
    assert len(ragged["length_scales"]) == 5
    ragged["length_scales"].pop()
    write_json(tmp_path / "calibration.json", value)
    with pytest.raises(UserError, match="ragged_gemm forward: length_scales are not 5 numbers"):
        read_calibration(tmp_path / "calibration.json")


def test_heads_of_other_tiles_are_another_kernel_going_back() -> None:
    """By tiles that none of a model's points has; a ragged head where all of them fill theirs."""
    seen = [attention(size).dims for size in (64, 128)]
    for direction, least in (("forward", 0.0), ("backward", UNLIKE_SD**2)):
        reach = Reach("attention", direction, seen)
        more = reach.variance([attention(192).dims]) - reach.variance([attention(128).dims])
        assert more[0] == pytest.approx(least + (BEYOND_SD * np.log(1.5)) ** 2)
        assert reach.variance([attention(96).dims])[0] == pytest.approx(UNLIKE_SD**2)
        smaller = reach.variance([attention(48).dims])[0]  # unlike in both ways, once
        assert smaller == pytest.approx(UNLIKE_SD**2 + (BEYOND_SD * np.log(64 / 48)) ** 2)
        known = Reach("attention", direction, [*seen, attention(80).dims])
        assert known.variance([attention(96).dims])[0] == 0
    physics = Physics(0.0, 4000.0, 600.0)
    short, back, wide, wide_back = (
        physics.time_us(attention(size, direction=way))
        for size in (128, 256)
        for way in ("forward", "backward")
    )
    assert wide / short == pytest.approx(2)
    assert wide_back / back == pytest.approx(2 * WIDE_BACKWARD[256])


def test_a_tables_gradient_is_as_large_as_the_table() -> None:
    """Each word's rows are summed in fp32 where there are many tokens (Embedding.cu)."""

    def columns(rows: int, vocab: int, direction: str = "backward") -> float:
        return Kernel("embedding", direction, (rows, 1, vocab)).bytes

    assert columns(1024, 32000) == 2 * (1024 + 32000)
    assert columns(1024, 32000, "forward") == 4 * 1024
    assert columns(8192, 64) == pytest.approx(2 * (8192 + 64) + SUM_BYTES * 64)  # all words occur
    assert columns(8192, 10**9) == pytest.approx(2 * (8192 + 10**9) + SUM_BYTES * 8192)  # each once
    split = Kernel("vocab_parallel_embedding", "backward", (8192, 1, 10**9, 2)).bytes
    found = columns(8192, 10**9) + 4 * 8192 - SUM_BYTES * 4096  # half of them are other ranks'
    assert split == pytest.approx(found, abs=1)
