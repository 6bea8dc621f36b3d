"""Profiles of training steps: hand-written traces of GPUs, and real steps on the CPU."""

from typing import Any

import pytest

from measure.training.profile import rows, run_profile
from measure.training.trace import ISSUED, MARK, OPTIMIZER, STEP, overlap, read_trace
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.step import optimizer
from spec.training_records import ProfileRow
from tests.sharded import of_microbatch

Event = dict[str, Any]


def host(name: str, begin: float, time: float, cat: str = "cpu_op", **arguments: Any) -> Event:
    place = {"pid": 1, "tid": 1, "ts": begin, "dur": time}
    return {"ph": "X", "cat": cat, "name": name, **place, "args": arguments}


def kernel(name: str, begin: float, time: float, number: int = 0, **arguments: Any) -> Event:
    """A kernel as Kineto writes it, launched by the operation or call with this number."""
    arguments |= {"External id": number, "correlation": number, "stream": 7}
    place = {"pid": 0, "tid": 7, "ts": begin, "dur": time}
    return {"ph": "X", "cat": "kernel", "name": name, **place, "args": arguments}


def collective(kind: str, group: str, begin: float, time: float, elements: int) -> Event:
    described = {
        "Collective name": kind,
        "Process Group Name": "14",
        "Process Group Description": group,
        "In msg nelems": elements // 2,
        "Out msg nelems": elements,
        "Group size": 2,
        "dtype": "BFloat16",
    }
    return kernel(f"ncclDevKernel_{kind}_RING_LL(ncclDevKernelArgs)", begin, time, **described)


def trace(late: float = 0.0) -> dict[str, Any]:
    """One step of 1000 us; this rank comes `late` to its collectives, which end together."""
    tp, dp = "TENSOR_MODEL_PARALLEL_GROUP", "DATA_PARALLEL_GROUP_WITH_CP"
    batch = f"{MARK}PIPELINE_MODEL_PARALLEL_GROUP|16|batch of send and recv|4096|call"
    return {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
            host(STEP, 0, 1000, "user_annotation"),
            host("aten::mm", 5, 3, **{"External id": 1, "Input Dims": [[4096, 512], [512, 1024]]}),
            host("aten::_scaled_dot_product_cudnn_attention", 10, 3, **{"External id": 2}),
            host("aten::native_layer_norm", 15, 3, **{"External id": 3}),
            host(OPTIMIZER, 700, 100, "user_annotation"),
            host("aten::_fused_adamw_", 710, 5, **{"External id": 4}),
            host("cudaLaunchKernelExC", 505, 1, "cuda_runtime", correlation=9),
            host(batch, 500, 10, "user_annotation"),
            kernel("nvjet_tst_128x256", 100, 100, 1),
            kernel("cudnn_generated_fort_native_sdpa_sm90", 200, 50, 2),
            kernel("void vectorized_layer_norm_kernel", 250, 30, 3),
            collective("_allgather_base", tp, 280 + late, 40 - late, 1000),
            # beside a product for 60 of its 100 us
            kernel("void cutlass::Kernel2<cutlass_80_gemm_bf16>", 340, 60),  # of no operation
            collective("_reduce_scatter_base", dp, 340, 100, 500),
            kernel("ncclDevKernel_SendRecv(ncclDevKernelArgs)", 600, 80, 9),
            kernel("multi_tensor_apply_kernel", 800, 90, 4),
            kernel("ncclDevKernel_AllReduce_Sum", 1200, 80),  # after the step
        ]
    }


def test_a_trace_is_told_apart_by_class_and_communicator() -> None:
    found = {row.part: row for row in rows("case", [read_trace(trace())])}
    us = {part: round(row.time_s * 1e6, 3) for part, row in found.items()}
    assert us == {
        "step": 1000, "gemm": 160, "attention": 50, "memory": 30, "optimizer": 90,
        "tp": 40, "dp": 100, "pp": 80, "idle": 1000 - 330 - 40 - 40 - 80,
    }  # fmt: skip
    assert found["dp"].exposed_s == pytest.approx(40e-6)
    assert found["tp"].exposed_s == pytest.approx(40e-6)
    assert found["tp"].bytes == 2000  # nccl-tests' bytes: of a gather, the gathered buffer
    assert (found["pp"].bytes, found["pp"].calls) == (4096, 1)
    assert found["gemm"].calls == 2
    unknown = "void cutlass::Kernel2<cutlass_80_gemm_bf16> 0.060"
    assert found["gemm"].operations == f"aten::mm 4096x1024x512 0.100; {unknown}"
    assert found["memory"].operations == "aten::native_layer_norm 0.030"
    assert found["tp"].operations is None
    assert found["gemm"].exposed_s is None


def test_kernels_of_transformer_engines_operations_go_by_their_names() -> None:
    """One operation of its holds a norm, a cast and a product; local ones go by the operation."""
    operations = (
        *("_LayerNormLinear", "_LayerNormLinear", "FusedAttnFuncBackward", "aten::add_"),
        *("_CheckpointFunction", "_CheckpointFunction"),  # its own, which FP8 has
        "AttnFuncWithCPAndKVP2P",
    )
    names = (
        "void transformer_engine::rmsnorm_fwd_tuned_kernel",
        "nvjet_qqtst_128x256",
        "cudnn::fusion::compute_dot_do_o_specialized",
        "void cutlass::Kernel2",
        "nvjet_qqtst_192x128",
        "cast_transpose",
        "cudnn_generated_fort_native_sdpa",
    )
    events = [host(STEP, 0, 100, "user_annotation")]
    for number, (operation, name) in enumerate(zip(operations, names, strict=True), start=1):
        events.append(host(operation, number, 1, **{"External id": number}))
        events.append(kernel(name, 10 * number, number, number))
    found = {row.part: row for row in rows("case", [read_trace({"traceEvents": events})])}
    assert found["gemm"].operations == "_CheckpointFunction 0.005; _LayerNormLinear 0.002"
    ring = "AttnFuncWithCPAndKVP2P 0.007"
    assert found["attention"].operations == f"{ring}; FusedAttnFuncBackward 0.003"
    # named by the kernel: the operation holds products, too
    assert found["memory"].operations == f"{names[5]} 0.006; aten::add_ 0.004; {names[0]} 0.001"


def test_an_update_that_no_operation_of_torch_launched_is_told_by_when_it_was() -> None:
    """Transformer Engine's Adam is a call of its own, which the trace links to nothing."""
    events = [
        host(STEP, 0, 100, "user_annotation"),
        host(OPTIMIZER, 30, 10, "user_annotation"),
        host("cudaLaunchKernel", 20, 1, "cuda_runtime", correlation=70),
        host("cudaLaunchKernel", 35, 1, "cuda_runtime", correlation=71),
        kernel("multi_tensor_l2norm", 32, 5, 70),  # launched ahead of the optimizer
        kernel("multi_tensor_adam", 60, 7, 71),
    ]
    found = {row.part: row.time_s for row in rows("case", [read_trace({"traceEvents": events})])}
    assert found["memory"] == pytest.approx(5e-6)
    assert found["optimizer"] == pytest.approx(7e-6)


def test_replayed_kernels_are_of_what_launched_them_where_they_were_issued() -> None:
    """The n-th of a name of the n-th; in a replay itself nothing but the graph is launched."""
    operations = ("aten::mm", "aten::mul", "aten::_scaled_dot_product_cudnn_attention")
    names = ("nvjet_tst", "elementwise", "elementwise")
    events = [
        # zeroed gradients, launched ahead of the passes and run beside them: not in the graph
        host("aten::fill_", 1, 1, **{"External id": 7}),
        kernel("elementwise", 12, 5, 7),
        host(ISSUED, 10, 30, "user_annotation"),
        host(OPTIMIZER, 80, 20, "user_annotation"),
        host("aten::_fused_adamw_", 85, 1, **{"External id": 4}),
        kernel("elementwise", 90, 2, 4),
        host("aten::add", 105, 1, **{"External id": 8}),  # no replay's, though numbered as one
    ]
    for number, (operation, name) in enumerate(zip(operations, names, strict=True), start=1):
        events.append(host(operation, 10 + number, 1, **{"External id": number}))
        events.append(kernel(name, 10 + 10 * number, 9, number))
    for replay, begin in ((8, 200.0), (9, 300.0)):
        events.append(host(STEP, begin, 100, "user_annotation"))
        events.append(host("cudaGraphLaunch", begin, 1, "cuda_runtime", correlation=replay))
        for number, name in enumerate((*names, "unheard-of nvjet", "elementwise"), start=1):
            events.append(kernel(name, begin + 10 * number, number, replay))
    found = {row.part: row for row in rows("case", [read_trace({"traceEvents": events})])}
    assert found["gemm"].operations == "unheard-of nvjet 0.004; aten::mm 0.001"
    assert found["attention"].operations == "aten::_scaled_dot_product_cudnn_attention 0.003"
    # a third was not issued: by its own name
    assert found["memory"].operations == "elementwise 0.005; aten::mul 0.002"
    assert found["optimizer"].time_s == 0


def test_what_lies_between_steps_is_in_none() -> None:
    """Two steps of 100 us, 80 of each a product; tokens copied and a barrier 60 us apart."""
    events = [host("aten::mm", 5, 3, **{"External id": 1})]
    for begin in (0.0, 160.0):
        events.append(host(STEP, begin, 100, "user_annotation"))
        events.append(kernel("nvjet_tst_128x256", begin + 10, 80, 1))
    events.append(kernel("Memcpy HtoD", 110, 10))
    events.append(kernel("ncclDevKernel_AllReduce_Sum", 130, 20))
    found = {row.part: row.time_s for row in rows("case", [read_trace({"traceEvents": events})])}
    us = {part: round(1e6 * time, 3) for part, time in found.items() if time}
    assert us == {"step": 100, "gemm": 80, "idle": 20}


def test_waiting_is_what_a_rank_takes_beyond_the_last_to_come() -> None:
    both = rows("case", [read_trace(trace()), read_trace(trace(late=30))])
    waiting = {(row.rank, row.part): row.waiting_s for row in both if row.waiting_s is not None}
    assert waiting[0, "tp"] == pytest.approx(30e-6)
    assert waiting[1, "tp"] == 0
    assert waiting[0, "dp"] == waiting[1, "dp"] == 0


def test_communication_without_a_name_is_not_guessed_at() -> None:
    value = trace()
    value["traceEvents"] = [one for one in value["traceEvents"] if MARK not in one["name"]]
    found = {row.part: row for row in rows("case", [read_trace(value)])}
    assert found["other"].time_s == pytest.approx(80e-6)
    assert "pp" not in found


def test_overlap_of_intervals() -> None:
    union = [(0.0, 2.0), (5.0, 6.0), (8.0, 9.0)]
    assert overlap(union, 1.0, 8.5) == 1 + 1 + 0.5
    assert overlap(union, 2.0, 5.0) == 0


def profile_of(**split: Any) -> list[ProfileRow]:
    pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    from tests.test_training_steps import case

    return run_profile(case(global_batch=4, **split), device_kind="cpu")


def test_real_steps_are_profiled_on_every_rank() -> None:
    found = profile_of(tp=2, pp=2)
    assert {row.rank for row in found} == {0, 1, 2, 3}
    for rank in range(4):
        mine = {row.part: row for row in found if row.rank == rank}
        assert {"step", "gemm", "attention", "memory", "optimizer", "tp", "pp", "idle"} == set(mine)
        parts = sum(
            row.time_s if row.exposed_s is None else row.exposed_s
            for row in mine.values()
            if row.part != "step"
        )
        assert parts == pytest.approx(mine["step"].time_s, rel=1e-3)
        assert mine["gemm"].calls == 4 * (4 * 3) + (0 if rank < 2 else 4 * 3)  # and the logits
        assert mine["pp"].calls == 2 * 4
        named = [float(one.split()[-1]) for one in (mine["memory"].operations or "").split("; ")]
        assert 0.5 * mine["memory"].time_s < sum(named) / 1e3 < 1.001 * mine["memory"].time_s
        assert all(row.waiting_s <= row.time_s for row in mine.values() if row.waiting_s)


@pytest.mark.parametrize("split", [{}, {"zero": 3, "overlap": True}], ids=str)
def test_bytes_of_a_communicator_are_those_of_the_list_of_operations(split: Any) -> None:
    from tests.test_training_steps import SMALL

    p = Parallelism(dp=2, global_batch=4, **split)
    _, reduction, gather = optimizer(SMALL, p, 0)
    each = of_microbatch(SMALL, p) * p.microbatches
    (dp,) = (row for row in profile_of(dp=2, **split) if row.part == "dp" and row.rank == 0)
    expected = sum(one.bytes for one in (*reduction, *gather, *each))
    assert dp.bytes == pytest.approx(expected, rel=0.02)


def test_the_suite_writes_a_table(tmp_path: Any) -> None:
    pytest.importorskip("megatron.core")
    from measure.run import main
    from spec.files import write_table
    from spec.results import find_result_sets
    from spec.training_records import TrainingConfig

    model = load_model("tiny").resized(layers=1, seq_len=32)
    config = TrainingConfig.of("alone", model, Parallelism(global_batch=1))
    write_table(tmp_path / "plan.csv", TrainingConfig, [config])
    words = ["--suite", "profile", "--plan", str(tmp_path / "plan.csv"), "--kind", "cpu"]
    assert main([*words, "--out", str(tmp_path / "results")]) == 0
    (result,) = find_result_sets(tmp_path / "results")
    found = result.table(ProfileRow)
    assert {row.part for row in found} == {
        "step",
        "gemm",
        "attention",
        "memory",
        "optimizer",
        "idle",
    }
    assert result.manifest.status == "complete"
