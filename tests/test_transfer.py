"""A calibration moved to a GPU that was not measured: identity, rates, labels."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from calibrate.diff import by_name
from simulate import project
from simulate.hardware.fp8 import FP8_SPEEDUP, with_fp4, with_fp8_products
from simulate.hardware.transfer import ratios, same_gpu, transfer
from simulate.hardware.unmeasured import unmeasured
from simulate.inputs import calibration_for, default_node, find_calibration
from spec.calibration import Calibration, read_calibration
from spec.clock_fit import DeviceFit
from spec.collective import busbw_factor
from spec.command import run
from spec.errors import UserError
from spec.files import write_json, write_text
from spec.fitted import changed
from spec.hardware import same_device
from tests.made_up import write_calibration
from topologies import load_node, node_names

RESULTS = Path(__file__).parent.parent / "results"


@pytest.fixture
def calibration(tmp_path: Path) -> Calibration:
    return write_calibration(tmp_path / "results" / "4x-h200" / "calibration.json")


def test_the_same_gpu_changes_nothing(calibration: Calibration) -> None:
    h200 = load_node("hgx-h200")
    assert transfer(calibration, h200, h200) is calibration
    assert calibration_for(calibration, load_node("4x-h200")) is calibration
    # nor does the arithmetic itself, where only a name differs
    renamed = h200.model_copy(update={"memory_gbytes_per_s": 4800.0001})
    assert not same_gpu(h200, renamed)
    moved = transfer(calibration, h200, renamed)
    gemm, before = moved.kernel_fits["gemm", "forward", "bf16"], calibration.kernels
    dims = (4096, 4096, 4096)
    old = next(one for one in before if (one.op, one.direction) == ("gemm", "forward"))
    assert gemm.time_us(dims)[0] == pytest.approx(old.time_us(dims)[0])
    reduce = moved.collective_fits["all_reduce"]
    assert reduce.time_us(4, 2**28)[0] == pytest.approx(
        calibration.collective_fits["all_reduce"].time_us(4, 2**28)[0]
    )


def test_ceilings_scale_with_the_datasheet(calibration: Calibration) -> None:
    """H100: the H200's chip, 3.35 of its 4.8 TB/s; A100: another chip, NVLink and clocks too."""
    h200 = load_node("hgx-h200")
    h100 = transfer(calibration, h200, load_node("hgx-h100"))
    old, new = calibration.kernel_fits, h100.kernel_fits
    gemm, norm = ("gemm", "forward", "bf16"), ("rmsnorm", "forward", "bf16")
    assert new[gemm].tflops == pytest.approx(old[gemm].tflops)
    # of a byte's time, what the datasheet's bandwidth asks for is longer, the rest is the chip's
    later = 1 / new[norm].gbytes_per_s - 1 / old[norm].gbytes_per_s
    assert later == pytest.approx(1 / 3350 - 1 / 4800)
    back = transfer(h100, load_node("hgx-h100"), h200).kernel_fits
    assert back[norm].gbytes_per_s == pytest.approx(old[norm].gbytes_per_s)
    shape = (4096, 8192)
    launch = old[norm].launch_us
    assert new[norm].time_us(shape)[0] - launch == pytest.approx(
        (old[norm].time_us(shape)[0] - launch) * (old[norm].gbytes_per_s / new[norm].gbytes_per_s)
    )
    a100 = transfer(calibration, h200, load_node("dgx-a100"))
    fits = a100.kernel_fits
    assert fits[norm].gbytes_per_s == pytest.approx(old[norm].gbytes_per_s * 2039 / 4800)
    assert a100.clock.max_mhz == 1410
    assert a100.clock.power_limit_w == 400
    assert a100.device == load_node("dgx-a100").gpu
    # the published sweep: 961 MiB on 8 GPUs at 228.3 GB/s bus bandwidth
    time, _ = a100.collective_fits["all_reduce"].time_us(8, 961 * 2**20)
    assert 961 * 2**20 * 1.75 / time / 1e3 == pytest.approx(228.3, rel=0.02)
    assert a100.composition_sd > calibration.composition_sd


def test_links_wake_for_power_where_they_sleep(calibration: Calibration) -> None:
    """The same chip draws the same, another as its room goes, one of before Hopper nothing."""
    known = changed(calibration, clock=changed(calibration.clock, links_w=31.0))
    h200 = load_node("hgx-h200")
    drawn = {
        name: transfer(known, h200, load_node(name)).clock.links_w
        for name in ("hgx-h100", "hgx-b200", "dgx-a100")
    }
    assert drawn["hgx-h100"] == 31.0
    assert drawn["hgx-b200"] > 31.0
    assert drawn["dgx-a100"] == 0


def test_devices_stay_with_their_gpu(calibration: Calibration) -> None:
    own = DeviceFit(uuid_hash="a" * 16, power=1.02)
    known = changed(calibration, clock=changed(calibration.clock, devices=(own,)))
    h200 = load_node("hgx-h200")
    assert transfer(known, h200, h200).clock.devices == (own,)
    assert transfer(known, h200, load_node("hgx-h100")).clock.devices == ()


def test_measured_shapes_keep_their_ratio_to_the_roofline(tmp_path: Path) -> None:
    """A shape measured 20 % above the roofline stays there."""
    calibration = write_calibration(tmp_path / "c.json")
    gemm = calibration.kernel_fits["gemm", "forward", "bf16"]
    dims = (8192, 8192, 8192)
    point = gemm.points[0].model_copy(update={"dims": dims, "time_us": gemm.physics_us(dims) * 1.2})
    fit = type(gemm).model_validate(gemm.model_dump() | {"points": [point]})
    with_one = Calibration.model_validate(
        calibration.model_dump(by_alias=True) | {"kernels": [fit.model_dump()]}
    )
    moved = transfer(with_one, load_node("hgx-h200"), load_node("dgx-a100"))
    new = moved.kernel_fits["gemm", "forward", "bf16"]
    assert new.time_us(dims)[0] / new.physics_us(dims) == pytest.approx(1.2)
    assert new.physics_us(dims) > 2 * fit.physics_us(dims)


def test_every_parameter_says_where_it_comes_from(tmp_path: Path) -> None:
    parameters = [
        {"name": name, "value": 100.0, "low": 90.0, "high": 110.0}
        | {"unit": "x", "source": "measured", "detail": "rows"}
        for name in ("kernel.gemm.forward.bf16.tflops", "clock.idle_w", "host.part_us")
    ]
    parameters.append(parameters[0] | {"name": "network.infiniband.efficiency"})
    parameters[-1]["source"] = "published"
    calibration = write_calibration(tmp_path / "c.json", parameters=parameters)
    moved = by_name(transfer(calibration, load_node("hgx-h200"), load_node("dgx-a100")))
    assert moved["network.infiniband.efficiency"].source == "published"
    for name, one in moved.items():
        assert one.source in ("published", "assumed")
        assert name.startswith("network.") or "transferred" in one.detail
    tflops = moved["kernel.gemm.forward.bf16.tflops"]
    assert tflops.value == pytest.approx(100 * 271.2 / 794.5)  # best matmuls, both published
    assert tflops.high / tflops.low > 1.1 / 0.9
    assert moved["clock.idle_w"].value == 55
    assert "transfer.matrix" in moved


@pytest.mark.parametrize("node", ["dgx-a100", "hgx-b200", "mi300x-node"])
def test_what_is_listed_of_clock_and_heat_is_what_is_simulated(node: str) -> None:
    """Of this repository's H200: at its own limit a GPU is as warm as these at theirs."""
    h200, target = load_node("hgx-h200"), load_node(node)
    measured = read_calibration(RESULTS / "8x-h200" / "calibration.json")
    moved = transfer(measured, h200, target)
    heat, before, listed = moved.thermal, measured.thermal, by_name(moved)
    assert heat is not None
    assert before is not None
    degrees = heat.central.total_c_per_w
    assert degrees * target.power_limit_w == pytest.approx(
        before.central.total_c_per_w * h200.power_limit_w
    )
    assert heat.error_c > before.error_c
    assert listed["thermal.resistance_c_per_w"].value == pytest.approx(degrees, rel=0.01)
    drawn = "communication_w", "waiting_w", "ready_w", "ready_shared_w"
    for name in ("regulated_w", *drawn, "power_limit_w", "idle_w"):
        used = getattr(moved.clock, name)
        assert listed[f"clock.{name}"].value == pytest.approx(used, rel=1e-4), name


def test_a_board_without_a_switch_is_listed_as_it_is_simulated() -> None:
    """Of this repository's H200, whose structure must not draw AMD's 64 GB/s a pair back."""
    measured = read_calibration(RESULTS / "8x-h200" / "calibration.json")
    moved = calibration_for(measured, load_node("mi300x-node"))
    listed = by_name(moved)
    for name, fit in moved.collective_fits.items():
        for ranks in (2, 4, 8):
            nbytes = fit.curves[0].points[-1].bytes
            rate = nbytes * busbw_factor(name, ranks) / fit.time_us(ranks, nbytes)[0] / 1e3
            assert rate < 64 * (1 if name == "send_recv" else ranks - 1)
            assert listed[f"collective.{name}.{ranks}.busbw"].value == pytest.approx(rate)
    board = load_node("hgx-h200").model_copy(update={"gpus": 4, "mesh": True, "name": "mine"})
    assert unmeasured(measured, load_node("hgx-h200")) == []
    assert "as node mine has it" in unmeasured(calibration_for(measured, board), board)[0]


def test_figures_of_a_file_count_whatever_its_gpu_is_called() -> None:
    """A measured GPU's name with a lower limit: the same chip, whose watts and cooler stay."""
    measured = read_calibration(RESULTS / "8x-h200" / "calibration.json")
    mine = load_node("hgx-h200").model_copy(update={"power_limit_w": 500.0, "calibration": None})
    moved = calibration_for(measured, mine)
    assert moved.clock.cap_w == pytest.approx(500 / 700 * (measured.clock.cap_w or 0))
    assert moved.thermal is not None
    assert measured.thermal is not None
    assert moved.thermal.central == measured.thermal.central
    assert [fit.active_power_w for fit in moved.kernels] == [
        fit.active_power_w for fit in measured.kernels
    ]
    assert calibration_for(measured, load_node("hgx-h200")) is measured


def test_products_keep_their_share_of_a_files_peak_whatever_its_gpu_is_called() -> None:
    """No published matmul of an H200 says what one with half its peak reaches."""
    own = load_node("hgx-h200")
    for name, factor in (("NVIDIA H200", 0.5), ("NVIDIA H200", 2.0), ("mine", 0.5)):
        peak = own.peak_bf16_tflops * factor
        node = own.model_copy(update={"gpu": name, "peak_bf16_tflops": peak})
        assert ratios(own, node).matrix == pytest.approx(factor)


def test_every_named_node_can_be_transferred_to(calibration: Calibration) -> None:
    for name in node_names():
        if name == "cpu-host":
            continue
        moved = calibration_for(calibration, load_node(name))
        assert moved.kernel_fits["gemm", "forward", "bf16"].time_us((512, 512, 512))[0] > 0


def test_a_cpu_is_no_source(calibration: Calibration, tmp_path: Path) -> None:
    cpu = write_calibration(tmp_path / "c.json", kind="cpu", device="CPU core", system="cpu")
    assert calibration_for(cpu, load_node("cpu-host")) is cpu
    with pytest.raises(UserError, match="is of a CPU, node hgx-h100 has GPUs"):
        calibration_for(cpu, load_node("hgx-h100"))
    with pytest.raises(UserError, match="is of GPUs, node cpu-host has a CPU"):
        calibration_for(calibration, load_node("cpu-host"))
    unknown = write_calibration(tmp_path / "u.json", device="Unheard-of", system="elsewhere")
    assert calibration_for(unknown, load_node("hgx-h100")) is unknown


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("NVIDIA H200", "NVIDIA H200", True),
        ("NVIDIA H100", "NVIDIA H100 80GB HBM3", True),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H200", False),
        ("H", "NVIDIA H200", False),
        ("", "NVIDIA H200", False),
    ],
)
def test_names_of_one_gpu(one: str, other: str, same: bool) -> None:
    assert same_device(one, other) is same
    assert same_device(other, one) is same


def test_fp8_speeds_up_products_only(calibration: Calibration) -> None:
    fast = with_fp8_products(calibration, load_node("hgx-h200")).kernel_fits
    dims = (16384, 16384, 16384)
    wide, narrow = (fast["gemm", "forward", dtype] for dtype in ("bf16", "fp8"))
    assert wide.time_us(dims)[0] / narrow.time_us(dims)[0] == pytest.approx(FP8_SPEEDUP, rel=0.01)
    for kind, fit in calibration.kernel_fits.items():
        assert fast[kind] == fit


@pytest.mark.parametrize(("gpu", "ratio"), [("NVIDIA GB200", 2.0), ("B300", 3.0)])
def test_fp4_products_by_the_datasheet(calibration: Calibration, gpu: str, ratio: float) -> None:
    node = load_node("gb200-nvl72").model_copy(update={"gpu": gpu})
    eight = with_fp8_products(calibration, node)
    four = with_fp4(eight, node).kernel_fits
    dims = (16384, 16384, 16384)
    before, after = (one["gemm", "dgrad", "fp8"] for one in (eight.kernel_fits, four))
    assert before.time_us(dims)[0] / after.time_us(dims)[0] == pytest.approx(ratio, rel=0.01)
    assert four["gemm", "dgrad", "bf16"] == eight.kernel_fits["gemm", "dgrad", "bf16"]


def test_projection_on_another_gpu_says_so(
    calibration: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    common = ("--gpus", "16", "--model", "llama3-8b", "--tp", "8", "--pp", "1", "--engine")
    common += ("timeline", "--draws", "20", "--recompute", "full", "--microbatch", "1", "--json")

    def step(node: str) -> tuple[float, dict[str, Any]]:
        assert run(project.main, (*common, "--node", node)) == 0
        value = json.loads(capsys.readouterr().out)
        return value["step_time_s"]["median"], value

    h200, plain = step("hgx-h200")
    a100, value = step("dgx-a100")
    assert a100 > 2 * h200
    assert any("transferred" in sentence for sentence in value["warnings"])
    assert not any("transferred" in sentence for sentence in plain["warnings"])
    names = [one["parameter" if "parameter" in one else "name"] for one in value["provenance"]]
    assert "transfer.matrix" in names
    assert default_node(calibration).gpu == "NVIDIA H200"


def test_without_a_switch_a_pair_has_its_own_links_only(calibration: Calibration) -> None:
    """Four GPUs wired in pairs: all of them have all links, two a third, a message a third."""
    board = load_node("4x-h200").model_copy(update={"mesh": True, "calibration": None})
    moved = calibration_for(calibration, board)
    big = 2.0**28
    for kind, ranks, share in (
        ("all_reduce", 4, 1.0),
        ("all_reduce", 2, 1 / 3),
        ("all_gather", 3, 2 / 3),
        ("send_recv", 2, 1 / 3),
    ):
        before = calibration.collective_fits[kind].time_us(ranks, big)[0]
        after = moved.collective_fits[kind].time_us(ranks, big)[0]
        assert after == pytest.approx(before / share, rel=0.03), kind
    assert moved.kernels == calibration.kernels


def test_a_pair_that_does_not_fill_a_switchs_links_fills_its_own(calibration: Calibration) -> None:
    """All-gathers of two get half of the rate of four's: on the board two thirds, not a third."""
    fit = calibration.collective_fits["all_gather"]
    curves = {curve.ranks: curve for curve in fit.curves}
    big = 2.0**34  # where latency is nothing
    whole = fit.time_us(4, big)[0] / busbw_factor("all_gather", 4) * busbw_factor("all_gather", 2)
    points = tuple(
        one.model_copy(update={"bytes": big, "time_us": 2 * whole}) for one in curves[2].points[-1:]
    )
    slow = curves[2].model_copy(update={"points": (*curves[2].points, *points)})
    held = changed(fit, curves=(slow, *(curves[n] for n in curves if n != 2)), structure=None)
    others = tuple(one for one in calibration.collectives if one.collective != "all_gather")
    board = load_node("4x-h200").model_copy(update={"mesh": True, "calibration": None})
    moved = calibration_for(changed(calibration, collectives=(*others, held)), board)
    after = moved.collective_fits["all_gather"].time_us(2, big)[0]
    assert after == pytest.approx(3 * whole, rel=0.03)


def test_the_default_is_the_system_with_the_most_gpus(tmp_path: Path) -> None:
    """Not the first by name: `2x-h100` has groups of two only."""
    whole = write_calibration(tmp_path / "4x-h200" / "calibration.json")
    pairs = tuple(
        fit.model_copy(update={"curves": tuple(c for c in fit.curves if c.ranks == 2)})
        for fit in whole.collectives
    )
    smaller = whole.model_copy(update={"system": "2x-h100", "collectives": pairs})
    write_json(
        tmp_path / "2x-h100" / "calibration.json", smaller.model_dump(mode="json", by_alias=True)
    )
    found = find_calibration(Namespace(calibration=None, system=None, results=tmp_path))
    assert found.parent.name == "4x-h200"


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "calibration/0"}'])
def test_a_calibration_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    write_calibration(tmp_path / "4x-h200" / "calibration.json")
    write_text(tmp_path / "other" / "calibration.json", text)
    with pytest.raises(UserError, match=r"other/calibration\.json: (not valid JSON|schema is)"):
        find_calibration(Namespace(calibration=None, system=None, results=tmp_path))
