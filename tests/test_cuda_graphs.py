"""Steps whose passes are replayed from one CUDA graph."""

import json
from math import hypot
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.graphs import Timed, saved, shapes, summary
from measure.megatron.build import transformer_config
from measure.training.plan import case_of
from measure.training.profile import run_profile
from measure.training.steps import prepared
from simulate import study, twin
from simulate.hardware.as_run import GRAPHS as ASSUMED
from simulate.hardware.as_run import GRAPHS_ELSEWHERE_SD, GRAPHS_SD, as_run
from simulate.hardware.graphs import (
    ONE_KERNEL_US,
    PRODUCT_US,
    SAVED_US,
    UPDATES,
    replayed_launch_us,
    with_graphs,
)
from simulate.hardware.unmeasured import unmeasured
from simulate.memory.allocator import MIB, uncut_bytes
from simulate.memory.peak import stage_memory
from simulate.plans.find import candidates
from simulate.plans.rough import Rough
from simulate.validation.cases import kind_of
from spec.buckets import owned_pieces
from spec.calibration import Calibration, read_calibration
from spec.errors import UserError
from spec.files import read_table
from spec.fitted import changed
from spec.hardware import Node
from spec.kernel import Kernel
from spec.kernel_fit import launches
from spec.measurable import refuse
from spec.model import ModelSpec
from spec.parallelism import AS_RUN, Parallelism, describe
from spec.step import trained_parameters
from spec.training_records import TrainingConfig
from tests.commands import RESULTS, called, projected
from tests.simulated_steps import CALIBRATION, FABRIC, LORA, MODEL, MOE, NODE, simulate
from topologies import load_node

P = Parallelism(microbatch=2, global_batch=8)
GRAPHS = P.model_copy(update={"cuda_graphs": True})
TE = GRAPHS.model_copy(update={"transformer_impl": "transformer_engine"})
BENCHMARK = RESULTS.parent / "benchmarks" / "graphs.csv"


def slow_host() -> Calibration:
    """One that every pass waits for."""
    host = changed(CALIBRATION.host, part_us=500.0, backward_part_us=500.0)
    return changed(CALIBRATION, host=host)


@pytest.mark.parametrize(
    "more", [{}, {"recompute": "full"}, {"tp": 2}, {"pp": 2, "vpp": 2}, {"dp": 2}]
)
def test_nobody_waits_for_the_host_but_the_update(more: dict[str, Any]) -> None:
    issued = simulate(P.model_copy(update=more), slow_host())
    replayed = simulate(GRAPHS.model_copy(update=more), slow_host())
    assert issued.breakdown_s["other"] > 10 * replayed.breakdown_s["other"] > 0
    assert replayed.step_time_s[0] < issued.step_time_s[0]
    assert sum(replayed.breakdown_s.values()) == pytest.approx(replayed.step_time_s[0])


def test_a_host_that_is_ahead_leaves_kernels_a_little_shorter() -> None:
    """Kernels of 30 us and more save 1.6 us at most, as the benchmark has it."""
    host = changed(CALIBRATION.host, **dict.fromkeys(("part_us", "pass_us", "collective_us"), 0.0))
    quick = changed(CALIBRATION, host=host)
    issued, replayed = simulate(P, quick).step_time_s[0], simulate(GRAPHS, quick).step_time_s[0]
    assert 0.9 * issued < replayed < issued


def test_the_update_is_issued_as_ever() -> None:
    replayed = with_graphs(CALIBRATION)
    for before, after in zip(CALIBRATION.kernels, replayed.kernels, strict=True):
        assert (after == before) == (before.op in UPDATES)
        assert 0 < after.launch_us <= before.launch_us
    assert replayed.host.step_us == CALIBRATION.host.step_us
    assert replayed.host.pass_us == 0


def test_what_a_split_asks_for_is_there_once() -> None:
    once = as_run(CALIBRATION, TE, NODE, MODEL)
    assert as_run(once, TE, NODE, MODEL) is once
    assert [one.name for one in once.parameters].count("kernel.cuda_graphs") == 1


def test_spread_grows_where_nothing_was_measured() -> None:
    """One and two H200 were: neither more, nor an H100, nor many rings."""
    before = CALIBRATION.composition_sd
    h100 = load_node("hgx-h100")
    for p, node, sd in (
        (GRAPHS, NODE, GRAPHS_SD),
        (GRAPHS.model_copy(update={"dp": 2}), NODE, GRAPHS_SD),
        (GRAPHS.model_copy(update={"dp": 4, "global_batch": 8}), NODE, GRAPHS_ELSEWHERE_SD),
        (GRAPHS, h100, GRAPHS_ELSEWHERE_SD),
        (GRAPHS.model_copy(update={"cp": 2}), NODE, GRAPHS_ELSEWHERE_SD),
    ):
        found = as_run(CALIBRATION, p, node, MODEL)
        assert found.composition_sd == pytest.approx(hypot(before, sd))
        (assumed,) = (one for one in found.parameters if one.name == ASSUMED)
        assert assumed.source == "assumed"
        assert assumed.low < 1 < assumed.high


@pytest.mark.parametrize("node", [NODE, load_node("mi300x-node")])
def test_neither_a_cpu_nor_amds_gpus_replay_graphs(node: Node) -> None:
    kind = "cpu" if node is NODE else "nvidia"
    with pytest.raises(UserError, match=r"cuda_graphs: its kernels .* has .*; leave it out"):
        as_run(CALIBRATION.model_copy(update={"kind": kind}), GRAPHS, node, MODEL)


def test_what_is_saved_is_the_benchmarks() -> None:
    product, one_kernel, several = saved(read_table(BENCHMARK, Timed))
    assert product == pytest.approx(PRODUCT_US, abs=0.01)
    assert one_kernel == pytest.approx(ONE_KERNEL_US, abs=0.01)
    passes = {which: us for which, us in several.items() if which[0] not in UPDATES}
    assert pytest.approx(passes, abs=0.06) == SAVED_US


def test_short_kernels_are_told_as_the_benchmark_has_them() -> None:
    """Both ways from one calibration: what is told to be saved of every shape that was timed."""
    fits = read_calibration(RESULTS / "2x-h200" / "calibration.json").kernel_fits
    off = []
    for one in read_table(BENCHMARK, Timed):
        fit = fits[one.op, one.direction, one.dtype]
        if one.op in ("copy", *UPDATES):
            continue
        told_us = fit.launch_us - replayed_launch_us(fit)
        told_us *= launches(Kernel(one.op, one.direction, parse_dims(one.shape), one.dtype))
        off.append(abs(told_us - (one.queued_us - one.replayed_us)) / one.queued_us)
    assert len(off) > 110
    assert median(off) < 0.02
    assert sorted(off)[int(0.9 * len(off))] < 0.2


def parse_dims(shape: str) -> tuple[int, ...]:
    return tuple(int(part.partition("=")[2]) for part in shape.split())


def test_the_benchmark_takes_a_quick_and_a_middle_shape_and_prints_what_is_saved() -> None:
    fits = read_calibration(RESULTS / "2x-h200" / "calibration.json").kernel_fits
    quick, middle = shapes(fits["gemm", "forward", "bf16"])
    assert quick == (256, 256, 256) != middle
    one = Timed(
        gpu="a GPU", op="copy", direction="forward", dtype="bf16", shape="1",
        kernels=2, queued_us=5.0, replayed_us=3.0,
    )  # fmt: skip
    lines = summary([one, one.model_copy(update={"queued_us": 7.0})]).splitlines()
    said = [line.split() for line in lines]
    assert said[0][-5:] == ["1.50", "us", "0.75", "to", "2.25"]  # a kernel
    assert said[3] == ["a", "call", "of", "copy", "forward", "4.0", "us"]  # the second shape's
    assert [line[-4:-2] for line in said[4:]] == [["2.00", "us"], ["4.00", "us"]]
    with pytest.raises(UserError, match="1 shapes were timed"):
        summary([one])


def test_a_plan_and_its_names_say_so() -> None:
    row = TrainingConfig.of("one", MODEL, TE)
    assert row.parallelism() == TE
    assert TrainingConfig.name_of(MODEL, TE).endswith("-TE-graphs")
    assert describe(GRAPHS).endswith(" graphs")
    assert kind_of(row) == "1 GPU, TE graphs"
    assert kind_of(TrainingConfig.of("one", MODEL, P)) == "1 GPU"
    assert set(AS_RUN) <= set(TrainingConfig.model_fields)


@pytest.mark.parametrize(
    ("model", "more", "noun"),
    [
        (MOE, {}, "a mixture of experts is not supported: its host reads"),
        (MODEL, {"dp": 2, "zero": 3, "overlap": True}, "zero 3 is not supported"),
        (MODEL, {"pp": 2}, "stages that are not interleaved is not supported"),
    ],
)
def test_what_cannot_be_captured_is_refused(
    model: ModelSpec, more: dict[str, Any], noun: str
) -> None:
    with pytest.raises(UserError, match=f"cuda_graphs with {noun}"):
        GRAPHS.model_copy(update=more).check(model)


def test_what_is_not_measured_is_said_before_a_step_runs() -> None:
    with pytest.raises(UserError, match="cuda_graphs with stages that are not interleaved"):
        refuse(MODEL, GRAPHS.model_copy(update={"pp": 2}))
    case = case_of(MODEL, GRAPHS, "nvidia")
    with pytest.raises(UserError, match="a CPU has no cuda_graphs, leave it off"):
        prepared(case, "cpu")
    with pytest.raises(UserError, match=r"is not profiled: .*; leave cuda_graphs off"):
        run_profile(
            case_of(MODEL, GRAPHS.model_copy(update={"dp": 2}), "nvidia"), device_kind="nvidia"
        )


def test_megatron_core_is_told_to_capture_an_iteration() -> None:
    config = transformer_config(MODEL, GRAPHS, False)
    assert config.cuda_graph_impl == "local"
    assert [one.name for one in config.cuda_graph_scope] == ["full_iteration"]
    assert transformer_config(MODEL, P, False).cuda_graph_impl == "none"


def test_a_search_keeps_them_and_ranks_by_them() -> None:
    found = list(candidates(MODEL, 8, 64, NODE, {"cuda_graphs": True}))
    assert found
    assert all(one.cuda_graphs for one in found)
    rough = Rough(MODEL, NODE, FABRIC, slow_host())
    assert rough.step_us(GRAPHS) < rough.step_us(P)
    assert rough.step_us(P) == Rough(MODEL, NODE, FABRIC, slow_host()).step_us(P)


def test_adapters_tensors_are_too_small_to_leave_anything() -> None:
    assert owned_pieces(LORA, P, 0) == ()


def test_a_tensor_has_what_is_left_of_its_segment_up_to_a_mebibyte() -> None:
    """GPT-2 XL's weights, and Llama 3 8B's, in fp32."""
    assert uncut_bytes(4 * 1600 * 6400) == 40 * MIB - 4 * 1600 * 6400
    assert uncut_bytes(4 * 1600 * 1600) == (20 * MIB - 2 * 4 * 1600 * 1600) / 2
    assert uncut_bytes(4 * 4096 * 14336) == 0
    assert uncut_bytes(10.5 * MIB) == 0  # what is left is larger, and is cut off
    for nbytes in (1, MIB, 3 * MIB, 10 * MIB, 11 * MIB, 123_456_789):
        assert 0 <= uncut_bytes(nbytes) <= MIB


@pytest.mark.parametrize("more", [{}, {"zero": 0}, {"dp": 2}, {"dp": 2, "overlap": True}])
def test_pieces_of_tensors_are_what_the_optimizer_owns(more: dict[str, Any]) -> None:
    p = P.model_copy(update=more)
    pieces = owned_pieces(MODEL, p, 0)
    owned = sum(trained_parameters(MODEL, p, 0)) / (p.dp if p.zero else 1)
    assert sum(pieces) == pytest.approx(owned)
    assert stage_memory(MODEL, p, 0).optimizer == pytest.approx(12 * owned, rel=1e-3)
    assert stage_memory(MODEL, p, 0).optimizer >= 12 * owned


def test_a_projection_says_what_was_replayed(tmp_path: Path) -> None:
    words = "--model llama3-8b --gpus 8 --tp 2 --pp 1 --global-batch 16 --cuda-graphs"
    value = projected(tmp_path, words)
    assert value["inputs"]["parallelism"]["cuda_graphs"] is True
    assert any("CUDA graph ran on one and two H200" in one for one in value["warnings"])
    assert not any("CUDA graph" in one for one in unmeasured(CALIBRATION, NODE))
    names = {one["name"]: one["source"] for one in value["provenance"]}
    assert names["kernel.cuda_graphs"] == "assumed"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (twin, "--gpus 8 --on 1 --tp 1 --pp 1 --global-batch 8"),
        (study, "scaling --draws 20 --report s.html"),
    ],
)
def test_other_reports_say_so_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, command: Any, words: str
) -> None:
    monkeypatch.setattr(study, "COUNTS", (8,))
    monkeypatch.chdir(tmp_path)
    own = ["--model", "llama3-8b", "--results", str(RESULTS), "--cuda-graphs", "--json"]
    code, out, said = called(command.main, [*words.split(), *own], capsys)
    assert code == 0, said
    assert any("CUDA graph ran on one and two H200" in one for one in json.loads(out)["warnings"])


def test_chunks_are_searched_where_the_stages_are_given(tmp_path: Path) -> None:
    """Stages that are not interleaved have none of them in a graph; nobody asked for such."""
    value = projected(tmp_path, "--gpus 64 --model yi-34b --tp 4 --pp 2 --cuda-graphs")
    chosen = value["inputs"]["parallelism"]
    assert (chosen["cuda_graphs"], chosen["vpp"] > 1) == (True, True)
