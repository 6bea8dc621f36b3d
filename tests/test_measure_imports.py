"""Output of nccl-tests and Megatron-LM as result sets; what is missing or wrong is one sentence."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from measure.imports import main
from spec.command import run
from spec.records import CollectiveRow
from spec.training_records import StepRow, TrainingRow
from tests.tool_logs import ALL_REDUCE, ALL_TO_ALL, LINE, LOG, TIMES, imported, log, write


def test_nccl_tests_output_becomes_rows(tmp_path: Path) -> None:
    words = ["nccl-tests", write(tmp_path, ALL_REDUCE), "--env", "NCCL_IB_DISABLE=1"]
    found = imported(tmp_path, *words)
    rows = found.table(CollectiveRow)
    assert [(row.bytes, row.median_us) for row in rows] == [
        (1024, 23.0),
        (1048576, 50.0),
        (67108864, 1000.0),
    ]
    last = rows[-1]
    assert (last.collective, last.backend, last.dtype) == ("all_reduce", "nccl", "fp32")
    assert (last.ranks, last.nodes, last.stride, last.groups, last.repeats) == (4, 2, 1, 1, 20)
    assert last.busbw_gbytes_per_s == pytest.approx(100.66, rel=1e-3)
    manifest = found.manifest
    assert manifest.status == "complete"
    assert manifest.finished == manifest.planned == 3
    assert manifest.environment == {"NCCL_IB_DISABLE": "1"}
    assert manifest.software == {"nccl-tests": "2.17.6", "nccl": "2.28.7"}
    assert [len(one.devices) for one in manifest.hosts] == [2, 2]
    assert manifest.device == "NVIDIA H100 80GB HBM3"
    assert "1 lines failed the tool's own check" in manifest.notes[-1]
    assert "node-a" not in (found.path / "manifest.json").read_text()


def test_processes_that_see_one_gpu_each(tmp_path: Path) -> None:
    """All call theirs device 0; a host was taken to have a single GPU."""
    text = ALL_REDUCE.replace("device  1", "device  0")
    hosts = imported(tmp_path, "nccl-tests", write(tmp_path, text)).manifest.hosts
    assert [[one.index for one in host.devices] for host in hosts] == [[0, 1], [2, 3]]
    assert len({one.uuid_hash for host in hosts for one in host.devices}) == 4


def test_a_bus_is_one_however_it_is_printed(tmp_path: Path) -> None:
    older = re.sub(r"\[0000:(\w\w):00\]", r"[0x\1]", ALL_REDUCE)
    assert older != ALL_REDUCE
    files = [write(tmp_path, ALL_REDUCE), write(tmp_path, older, "older.txt")]
    hosts = imported(tmp_path, "nccl-tests", *files).manifest.hosts
    assert [len(host.devices) for host in hosts] == [2, 2]


def test_files_of_older_versions_and_several_at_once(tmp_path: Path) -> None:
    files = [write(tmp_path, ALL_REDUCE), write(tmp_path, ALL_TO_ALL, "alltoall_perf.log")]
    rows = imported(tmp_path, "nccl-tests", *files).table(CollectiveRow)
    assert [row.collective for row in rows] == ["all_reduce"] * 3 + ["all_to_all"]
    assert (rows[-1].nodes, rows[-1].dtype, rows[-1].repeats) == (1, "bf16", 50)


def test_what_launchers_put_before_lines(tmp_path: Path) -> None:
    """mpirun, srun and Kubernetes; and the name that a build with MPI has."""
    for number, label in enumerate(("[1,0]<stdout>:", "0: ", "2025-05-27T15:23:07.123456789Z ")):
        text = "\n".join(
            label + line.replace("all_reduce_perf", "all_reduce_perf_mpi")
            for line in ALL_REDUCE.splitlines()
        )
        folder = tmp_path / str(number)
        folder.mkdir()
        rows = imported(folder, "nccl-tests", write(folder, text)).table(CollectiveRow)
        assert [row.collective for row in rows] == ["all_reduce"] * 3


def test_rccl_tests_of_two_generations(tmp_path: Path) -> None:
    new = ALL_REDUCE.replace(
        "nccl-tests version 2.17.6 nccl-headers=22807 nccl-library=22807",
        "rccl-tests version 2.17.9-develop:2596ca5f71 rccl-headers=22803 rccl-library=22707",
    )
    old = "rccl-tests: Version develop:a7809b3\n" + ALL_TO_ALL.replace(
        "NVIDIA A100-SXM4-40GB", "AMD"
    )
    files = [write(tmp_path, new), write(tmp_path, old, "alltoall_perf.log")]
    found = imported(tmp_path, "nccl-tests", *files)
    assert {row.backend for row in found.table(CollectiveRow)} == {"rccl"}
    assert found.manifest.software["rccl"] == "2.27.7"
    assert found.manifest.software["rccl-tests"] == "develop:a7809b3"


def test_collectives_that_no_step_uses_are_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their lines look the same, and were once taken for the collective before them."""
    other = ALL_REDUCE.replace("all_reduce_perf", "broadcast_perf").split("# Avg")[0]
    path = write(tmp_path, ALL_REDUCE + other + ALL_REDUCE)
    found = imported(tmp_path, "nccl-tests", path)
    assert len(found.table(CollectiveRow)) == 6
    assert "broadcast_perf passed over" in found.manifest.notes[-1]
    alone = write(tmp_path, other, "broadcast.txt")
    assert run(main, ["nccl-tests", alone, "--system", "x", "--out", str(tmp_path / "no")]) == 2
    assert "no line of results but broadcast_perf's" in capsys.readouterr().err


def test_a_test_that_is_not_named_is_not_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Older versions print no name; of two such tests each may be another one."""
    words = ["nccl-tests", write(tmp_path, ALL_REDUCE + ALL_TO_ALL), "--system", "x"]
    assert run(main, [*words, "--out", str(tmp_path / "out")]) == 2
    assert "begins another test and does not say which" in capsys.readouterr().err
    twice = write(tmp_path, ALL_TO_ALL + ALL_TO_ALL, "two.txt")
    assert len(imported(tmp_path, "nccl-tests", twice, "--collective", "all_to_all").manifest.hosts)


def test_the_same_size_twice_stays_two_rows(tmp_path: Path) -> None:
    labelled = "\n".join(f"[1,0]<stdout>:{line}" for line in ALL_REDUCE.splitlines())
    files = [write(tmp_path, ALL_REDUCE), write(tmp_path, labelled, "again.txt")]
    rows = imported(tmp_path, "nccl-tests", *files).table(CollectiveRow)
    assert len(rows) == len({row.case_id for row in rows}) == 6
    assert rows[3].case_id == rows[0].case_id + "-again2"


SOCKETS = "node-a:6899:6899 [0] NCCL INFO Using network Socket\n"


@pytest.mark.parametrize(
    ("said", "words", "complaint"),
    [
        (SOCKETS, [], "not over InfiniBand, as they would count; add --env NCCL_IB_DISABLE=1"),
        (SOCKETS.replace("Socket", "IB"), ["--env", "NCCL_IB_DISABLE=1"], "'Using network IB'"),
        (SOCKETS + SOCKETS.replace("Socket", "IB"), [], "networks IB, Socket were used"),
        (SOCKETS, ["--env", "NCCL_IB_DISABLE=1"], None),
        (SOCKETS.replace("Socket", "IB"), [], None),
    ],
)
def test_the_network_that_nccl_names_is_the_one_that_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: str, words: list[str], complaint: str
) -> None:
    path = write(tmp_path, ALL_REDUCE.replace("#       size", said + "#       size"))
    words = ["nccl-tests", path, "--system", "x", "--out", str(tmp_path / "out"), *words]
    assert run(main, words) == (2 if complaint else 0)
    assert (complaint or "") in capsys.readouterr().err


def test_a_megatron_log_becomes_a_configuration_and_its_steps(tmp_path: Path) -> None:
    path = write(tmp_path, log() + LINE.format(7, 9000.0, 128, 1) + LINE.format(8, 10.0, 64, 0))
    words = ["megatron-log", path, "--model-name", "llama3-8b", "--nodes", "2"]
    found = imported(tmp_path, *words, "--base-system", "8x-h100", "--device", "NVIDIA H100")
    (row,) = found.table(TrainingRow)
    assert row.case_id == ("llama3-8b-L32-s2048-TP2-PP2-DP4-mb1-gb128-SP-z1-overlap-TE-2nodes")
    model, split = row.model_spec(), row.parallelism()
    assert model.parameters() == pytest.approx(8.03e9, rel=0.01)
    assert (split.tp, split.pp, split.dp, split.zero, split.overlap) == (2, 2, 4, 1, True)
    # the first two lines are warm-up; a skipped iteration and another batch size do not count
    assert row.steps == 4
    assert row.step_time_median_s == pytest.approx(2.505)
    assert row.energy_per_step_j == pytest.approx(1500 * 16)
    assert row.power_mean_w == pytest.approx(600)
    assert row.peak_allocated_gib == "40.000"
    assert "transformer_impl=transformer_engine" in row.framework
    steps = found.table(StepRow)
    assert [one.step_time_s for one in steps] == [2.5, 2.52, 2.48, 2.51]
    assert steps[0].loss == 11.0
    assert found.manifest.base_system == "8x-h100"
    assert [len(one.devices) for one in found.manifest.hosts] == [8, 8]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("elapsed time per iteration (ms): {:.1f}", "elapsed time per iteration (s): {:.4f}"),
        ("elapsed time per iteration (ms): {:.1f}", "elapsed time per iteration (ms): {:.1f}/99.9"),
        (" [2025-05-27 15:24:07] iteration", "\x1b[32m[default7]:\x1b[0m iteration"),
        ("lm loss: ", "lm loss "),
    ],
)
def test_lines_of_other_versions(tmp_path: Path, old: str, new: str) -> None:
    """BigScience's and DeepSpeed's seconds, Primus' means, coloured labels, 2020's losses."""
    assert old in LINE
    scale = 1e-3 if "(s)" in new else 1.0
    line = LINE.replace(old, new)
    text = LOG + "".join(line.format(n + 2, time * scale, 128, 0) for n, time in enumerate(TIMES))
    found = imported(tmp_path, "megatron-log", write(tmp_path, text), "--nodes", "2")
    assert found.table(TrainingRow)[0].step_time_median_s == pytest.approx(2.505)
    assert found.table(StepRow)[0].loss == 11.0


INTERLEAVED = {"virtual_pipeline_model_parallel_size": "4"}
SAYS_MORE = {
    "multi_latent_attention": "False",
    "fp8": "None",
    "decoder_first_pipeline_num_layers": "None",
    "moe_layer_freq": "1",
    "moe_shared_expert_intermediate_size": "None",
    "expert_tensor_parallel_size": "2",
    "recompute_method": "None",
    "recompute_num_layers": "None",
    "recompute_modules": "['core_attn']",
    "enable_cuda_graph": "False",
    "cuda_graph_impl": "none",
    "cuda_graph_scope": "[]",
}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"multi_latent_attention": "True"}, "the log does not say qk_head_dim; add it with --set"),
        ({"fp8": "hybrid", "transformer_impl": "local"}, "fp8 is hybrid"),
        ({"fp8": "hybrid", "num_experts": "8"}, "fp8 is hybrid"),
        ({"fp8": "hybrid"}, None),
        ({"decoder_first_pipeline_num_layers": "14"}, "first_pipeline_num_layers is 14"),
        ({"moe_layer_freq": "[0, 1]", "num_experts": "8"}, "moe_layer_freq is [0, 1]"),
        ({"expert_tensor_parallel_size": "1", "num_experts": "8"}, "parallel_size is 1"),
        ({"recompute_method": "block", "recompute_num_layers": "2"}, "num_layers is 2"),
        ({"recompute_granularity": "selective", "recompute_modules": "['mlp']"}, "['mlp']"),
        ({"recompute_granularity": "selective"}, None),
        ({"recompute_granularity": "full", "recompute_method": "uniform"}, None),
        ({"recompute_method": "block", "recompute_num_layers": "16"}, None),
        ({"num_experts": "8"}, None),
        ({"cuda_graph_impl": "local"}, "cuda_graph_impl is local"),
        ({"cuda_graph_impl": "transformer_engine"}, "cuda_graph_impl is transformer_engine"),
        ({"enable_cuda_graph": "True"}, "enable_cuda_graph is True"),
        (
            {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration_inference"},
            "cuda_graph_impl is local",
        ),
        (
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "full_iteration"},
            "cuda_graph_impl is transformer_engine",
        ),
        ({"cuda_graph_impl": "full_iteration"} | INTERLEAVED, None),
        ({"cuda_graph_impl": "full_iteration"}, "stages that are not interleaved"),
        (
            {"enable_cuda_graph": "True", "cuda_graph_scope": "full_iteration"} | INTERLEAVED,
            None,
        ),
    ],
)
def test_what_no_column_tells_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], complaint: str
) -> None:
    """It was left out: a row then said one thing, and another had run."""
    said = "".join(
        f"  {name} .... {changes.get(name, usual)}\n" for name, usual in SAYS_MORE.items()
    )
    path = write(tmp_path, log(**changes).replace("  bf16 ", f"{said}  bf16 "))
    words = ["megatron-log", path, "--system", "x", "--nodes", "2", "--set", "moe_router_topk=2"]
    assert run(main, [*words, "--out", str(tmp_path / "out")]) == (2 if complaint else 0)
    assert (complaint or "") in capsys.readouterr().err


def test_each_run_of_a_restarted_job_warms_up(tmp_path: Path) -> None:
    found = imported(tmp_path, "megatron-log", write(tmp_path, log() + log()), "--nodes", "2")
    assert [one.step_time_s for one in found.table(StepRow)] == 2 * [2.5, 2.52, 2.48, 2.51]


def test_a_run_that_died_before_its_first_step_tells_nothing(tmp_path: Path) -> None:
    """Neither its split, where it tried another one, nor that it printed no vocabulary."""
    died = log(tensor_model_parallel_size="4").split(" > padded")[0]
    text = died + log() + died + log()
    found = imported(tmp_path, "megatron-log", write(tmp_path, text), "--nodes", "2")
    (row,) = found.table(TrainingRow)
    assert row.tp == 2
    assert len(found.table(StepRow)) == 8


def test_experts_interleaving_and_recomputation_are_read(tmp_path: Path) -> None:
    text = log(
        num_experts="8",
        recompute_granularity="full",
        virtual_pipeline_model_parallel_size="4",
        use_distributed_optimizer="False",
    )
    words = ["--set", "moe_router_topk=2", "--set", "expert_model_parallel_size=4"]
    path = write(tmp_path, text)
    found = imported(tmp_path, "megatron-log", path, "--nodes", "2", *words)
    (row,) = found.table(TrainingRow)
    assert (row.experts, row.top_k, row.ep, row.vpp) == (8, 2, 4, 4)
    assert (row.recompute, row.zero, row.sequence_parallel) == ("full", 0, True)
    assert not row.on_engine  # which is only simulated with experts in one product
    assert any("with experts one after another they" in one for one in found.manifest.notes)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_log_of_experts_in_one_product_is_a_row_of_transformer_engine(
    tmp_path: Path, fp8: bool
) -> None:
    words = ["--set", "moe_router_topk=2", "--set", "expert_model_parallel_size=4"]
    path = write(tmp_path, log(num_experts="8", **INTERLEAVED))
    words += ["--set", "moe_grouped_gemm=True", *(["--set", "fp8=hybrid"] if fp8 else [])]
    found = imported(tmp_path, "megatron-log", path, "--nodes", "2", *words)
    (row,) = found.table(TrainingRow)
    assert row.on_engine
    assert not any("Transformer Engine's" in one for one in found.manifest.notes)
    assert row.fp8 is fp8


def test_a_log_of_transformer_engine_in_fp8_is_a_row_of_it(tmp_path: Path) -> None:
    words = ["--nodes", "2", "--set", "fp8=hybrid"]
    (row,) = imported(tmp_path, "megatron-log", write(tmp_path, log()), *words).table(TrainingRow)
    assert row.fp8
    assert row.on_engine


@pytest.mark.parametrize("scope", ["[<CudaGraphScope.full_iteration: 1>]", "full_iteration"])
def test_a_log_of_a_captured_iteration_is_a_row_of_it(tmp_path: Path, scope: str) -> None:
    words = ["--nodes", "2", "--set", "cuda_graph_impl=local", "--set", f"cuda_graph_scope={scope}"]
    path = write(tmp_path, log(**INTERLEAVED))
    (row,) = imported(tmp_path, "megatron-log", path, *words).table(TrainingRow)
    assert row.cuda_graphs


@pytest.mark.parametrize(
    ("tool", "text", "words", "complaint"),
    [
        ("nccl-tests", "nothing of the kind\n", [], "no line of results"),
        ("nccl-tests", ALL_TO_ALL, [], "nothing says which collective this is"),
        ("nccl-tests", ALL_TO_ALL, ["--collective", "send_recv"], "is not that of send_recv"),
        ("nccl-tests", ALL_REDUCE.replace("Rank  1", "Rank  0"), [], "built without MPI"),
        (
            "nccl-tests",
            ALL_REDUCE.replace("#  Rank  0", "#  Rnk  0"),
            [],
            "rank 0 of 4 is not listed",
        ),
        (
            "nccl-tests",
            ALL_REDUCE.replace("#  Rank  1", "#  Rnk  1"),
            [],
            "rank 1 of 4 is not listed",
        ),
        (
            "nccl-tests",
            ALL_REDUCE.replace("node-b", "node-a"),
            [],
            "device 0 of node-a is listed twice: its ranks share a GPU, or hosts a name",
        ),
        ("nccl-tests", ALL_REDUCE.replace("50.00 ", "fast! "), [], "is not a line of results"),
        ("nccl-tests", ALL_REDUCE.replace("#  Rank", "#  Hank"), [], "0 ranks are listed"),
        ("nccl-tests", ALL_REDUCE.replace("# nThread", "# Thread"), [], "without the line"),
        (
            "nccl-tests",
            ALL_REDUCE.replace("agg iters: 1", "agg iters: 8"),
            [],
            "out.txt line 3: agg iters is 8: so many collectives were launched as one",
        ),
        ("nccl-tests", ALL_REDUCE, ["--env", "NCCL"], "must be NAME=VALUE"),
        ("megatron-log", "epoch 1\n", [], "no line with 'elapsed time per iteration'"),
        ("megatron-log", log(), [], "16 GPUs; say on how many nodes"),
        ("megatron-log", log(), ["--nodes", "3"], "must divide the 16 GPUs"),
        ("megatron-log", log(), ["--nodes", "2", "--skip", "9"], "none of them after the first 9"),
        (
            "megatron-log",
            log() + log(tensor_model_parallel_size="4", pipeline_model_parallel_size="1"),
            ["--nodes", "2"],
            "TP2-PP2-DP4-mb1-gb128-SP-z1-overlap-TE and imported-L32-s2048-TP4-PP1-DP4-mb1",
        ),
        ("megatron-log", log(hidden_size="None"), [], "add it with --set hidden_size=VALUE"),
        ("megatron-log", log(num_layers="many"), [], "num_layers is 'many'"),
        ("megatron-log", log(swiglu="yes"), [], "swiglu is 'yes'; it must be True or False"),
        ("megatron-log", log(normalization="BatchNorm"), [], "norm is 'batchnorm'"),
        ("megatron-log", log(position_embedding_type="yarn"), [], "'yarn' is not simulated"),
        ("megatron-log", log(num_layers="33"), ["--nodes", "2"], "out.txt: pp 2"),
        ("megatron-log", log(), ["--nodes", "2", "--run", "a b"], "'a b' is not a name"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    tool: str,
    text: str,
    words: list[Any],
    complaint: str,
) -> None:
    path = write(tmp_path, text)
    out = tmp_path / "results"
    assert run(main, [tool, path, "--system", "cluster", "--out", str(out), *words]) == 2
    printed = capsys.readouterr().err
    assert complaint in printed
    assert printed.count("\n") == 1
    assert not out.exists()


def test_json_says_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = imported(tmp_path, "nccl-tests", write(tmp_path, ALL_REDUCE), "--run", "one", "--json")
    value = json.loads(capsys.readouterr().out)
    assert value["rows"] == {"collectives": 3}
    assert value["path"] == str(found.path)
    assert found.manifest.run == "one"
