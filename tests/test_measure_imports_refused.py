"""Numbers, units and arguments of other tools: read whole, refused, or said to be left out."""

import json
import re
from pathlib import Path

import pytest

from measure.imports import main
from measure.logs import megatron, megatron_model
from measure.logs.megatron_arguments import READ
from measure.logs.megatron_times import peak_tflops
from measure.logs.megatron_untold import OF_EXPERTS, OF_FP8, SIMULATED_AS, UNTOLD
from spec.command import run
from spec.records import CollectiveRow
from spec.training_records import StepRow, TrainingRow
from tests.tool_logs import ALL_REDUCE, ALL_TO_ALL, LINE, imported, log, refused, write
from topologies import load_node, node_names

ITERATION = LINE.format(7, 2510.0, 128, 0)


def with_last(old: str, new: str) -> str:
    """A log whose last iteration says something else."""
    assert old in ITERATION
    return log() + ITERATION.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(ms): 2510.0", "(ms): 2.5100e+03"),
        ("(ms): 2510.0", "(ms): 2.51E3"),
        ("(ms): 2510.0", "(ms): 251.e1/99.9"),
        ("(ms): 2510.0", "(s): 2510e-3"),
        ("GPU): 1500.0", "GPU): 1.5e+03"),
        ("GPU): 600.0", "GPU): 6e2"),
        ("size:   128", "size: 1.28e2"),
        ("lm loss: 1.1E+01", "lm loss: 1.1e+01"),
        ("lm loss: 1.1E+01", "lm loss: 11"),
    ],
)
def test_a_number_is_read_in_any_notation(tmp_path: Path, old: str, new: str) -> None:
    """What stood before an `e` was taken for the number: 5.0107e+03 ms for 5.0107 ms."""
    path = write(tmp_path, with_last(old, new))
    found = imported(tmp_path, "megatron-log", path, "--nodes", "2", "--skip", "6")
    (row,) = found.table(TrainingRow)
    (step,) = found.table(StepRow)
    assert step.step_time_s == pytest.approx(2.51)
    assert step.loss == 11.0
    assert row.energy_per_step_j == pytest.approx(1500 * 16)
    assert row.power_mean_w == pytest.approx(600)


def test_memory_in_another_notation(tmp_path: Path) -> None:
    text = log().replace("max allocated: 40960.0", "max allocated: 4.096e+04")
    found = imported(tmp_path, "megatron-log", write(tmp_path, text), "--nodes", "2")
    assert found.table(TrainingRow)[0].peak_allocated_gib == "40.000"


def test_what_is_left_out_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On screen, in the JSON and in the manifest; it was not."""
    died = log().split(" > padded")[0]
    text = died + log() + LINE.format(7, 9.0, 128, 1) + LINE.format(8, 10.0, 64, 0)
    text += ITERATION.replace("1.1E+01", "nan")
    text += ITERATION.replace("(ms): 2510.0", "(ms): nan").replace(
        "nan iterations:   0", "nan iterations: 1"
    )
    words = ("megatron-log", write(tmp_path, text), "--nodes", "2")
    sentence = (
        "out.txt: left out 1 runs without a step that counts, 2 lines of skipped or NaN "
        "iterations, 2 lines of warm-up (--skip), 1 lines of another global batch size, 1 losses "
        "that are no finite number"
    )
    found = imported(tmp_path, *words)
    assert sentence in capsys.readouterr().out
    assert sentence in found.manifest.notes
    (tmp_path / "again").mkdir()
    imported(tmp_path / "again", *words, "--json")
    assert json.loads(capsys.readouterr().out)["left_out"] == [sentence]


def test_lines_of_nccl_tests_that_are_left_out_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = imported(tmp_path, "nccl-tests", write(tmp_path, ALL_REDUCE))
    printed = capsys.readouterr().out
    for sentence in (
        "1 lines of no bytes (fewer elements than ranks) were left out",
        "1 lines failed the tool's own check and were left out",
    ):
        assert sentence in printed
        assert sentence in found.manifest.notes


def test_an_error_that_is_no_number_failed_the_check(tmp_path: Path) -> None:
    """NaN is above no bound, and passed."""
    text = ALL_TO_ALL + ALL_TO_ALL.splitlines()[-1].replace("0e+00", "  nan")
    path = write(tmp_path, text, "alltoall_perf.log")
    found = imported(tmp_path, "nccl-tests", path)
    assert len(found.table(CollectiveRow)) == 1
    assert "1 lines failed the tool's own check" in found.manifest.notes[-1]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("(ms): 2510.0", "(ms): 0.0", "time per iteration is '0.0'; it must be a number from"),
        ("(ms): 2510.0", "(ms): -5.0", "is '-5.0'; it must be a number from 0.001 to 1e+09 ms"),
        ("(ms): 2510.0", "(ms): nan", "elapsed time per iteration is 'nan'"),
        ("(ms): 2510.0", "(ms): inf", "elapsed time per iteration is 'inf'"),
        ("(ms): 2510.0", "(ms): 1e400", "elapsed time per iteration is '1e400'"),
        ("(ms): 2510.0", "(ms): 1.1e9", "elapsed time per iteration is '1.1e9'"),
        ("(ms): 2510.0", "(s): 1.1e6", "is '1.1e6'; it must be a number from 1e-06 to 1e+06 s"),
        ("(ms): 2510.0", "(ms): 2,510.0", "elapsed time per iteration is '2,510.0'"),
        ("(ms): 2510.0", "(ms): fast", "elapsed time per iteration is 'fast'"),
        ("(ms): 2510.0", "(us): 2510.0", "has the unit 'us'; it must be ms or s"),
        ("(ms): 2510.0", ": 2510.0", "has the unit ''; it must be ms or s"),
        ("GPU): 1500.0", "GPU): -1500.0", "energy per GPU is '-1500.0'"),
        ("GPU): 600.0", "GPU): nan", "power per GPU is 'nan'"),
        ("size:   128", "size: 128.5", "global batch size is 128.5; it must be a whole number"),
        ("size:   128", "size: all", "global batch size is 'all'"),
    ],
)
def test_a_number_that_cannot_be_is_refused_by_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, complaint: str
) -> None:
    text = with_last(old, new)
    printed = refused(tmp_path, capsys, "megatron-log", text, "--nodes", "2")
    assert f"out.txt line {len(text.splitlines())}: " in printed
    assert complaint in printed


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (" 50.00 ", "-50.00 ", "line 16: time is '-50.00'; it must be a number from 0.001"),
        (" 50.00 ", "  0.00 ", "line 16: time is '0.00'"),
        (" 50.00 ", "   nan ", "line 16: time is 'nan'"),
        (" 50.00 ", " 1e400 ", "line 16: time is '1e400'"),
        ("  31.46 ", "   nan ", "line 16: busbw is 'nan'"),
        ("(us)", "(ms)", "line 13: time is in (ms); it must be in (us)"),
        ("(GB/s)", "(Gb/s)", "line 13: busbw is in (Gb/s); it must be in (GB/s)"),
        ("(B)", "(KB)", "line 13: size is in (KB); it must be in (B)"),
        (
            "1048576        262144",
            "  1e6        262144",
            "line 16: size is '1e6'; it must be a whole",
        ),
        ("float ", "floot ", "line 15: type is 'floot'; it must be one of float, bfloat16, half"),
        ("50.00   20.97   31.46      0", "50.00   20.97   31.46   none", "line of results"),
    ],
)
def test_what_nccl_tests_cannot_have_printed_is_refused_by_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, complaint: str
) -> None:
    assert old in ALL_REDUCE
    printed = refused(tmp_path, capsys, "nccl-tests", ALL_REDUCE.replace(old, new))
    assert "out.txt line " in printed
    assert complaint in printed


def test_a_passed_over_test_may_print_other_units(tmp_path: Path) -> None:
    other = ALL_REDUCE.replace("all_reduce_perf", "broadcast_perf").replace("(us)", "(ms)")
    path = write(tmp_path, ALL_REDUCE + other.split("# Avg")[0])
    assert len(imported(tmp_path, "nccl-tests", path).table(CollectiveRow)) == 3


@pytest.mark.parametrize(
    ("changes", "words", "complaint"),
    [
        ({}, ["nope=1"], "--set names 'nope', which is not read from a log; these are: account"),
        ({}, ["micro_batchsize=1"], "'micro_batchsize', which is not read from a log; micro_batch"),
        ({}, ["micro_batch_size=2"], "micro_batch_size is 1, and --set micro_batch_size=2 says"),
        ({}, ["padded_vocab_size=999"], "padded_vocab_size is 128256, and --set"),
        ({}, ["num_experts=8"], "num_experts is None, and --set num_experts=8 says otherwise"),
        ({}, ["kv_channels=64", "kv_channels=128"], "--set gives kv_channels as 64 and as 128"),
        ({}, ["micro_batch_size=1", "micro_batch_size=1"], None),
        ({}, ["context_parallel_size=1", "padded_vocab_size=128256"], None),
        ({"micro_batch_size": "None"}, ["micro_batch_size=2"], None),
    ],
)
def test_set_is_for_what_the_log_lacks(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str],
    words: list[str],
    complaint: str | None,
) -> None:
    """Another name was without effect, and another value counted before the log's."""
    path = write(tmp_path, log(**changes))
    given = [one for word in words for one in ("--set", word)]
    words = ["megatron-log", path, "--system", "x", "--nodes", "2", *given]
    assert run(main, [*words, "--out", str(tmp_path / "out")]) == (2 if complaint else 0)
    assert (complaint or "") in capsys.readouterr().err


def test_set_contradicts_no_run_of_a_restarted_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first lacks it, the second says another value."""
    path = write(tmp_path, log(micro_batch_size="None") + log(micro_batch_size="2"))
    words = ["megatron-log", path, "--system", "x", "--nodes", "2", "--set", "micro_batch_size=1"]
    assert run(main, [*words, "--out", str(tmp_path / "out")]) == 2
    assert "micro_batch_size is 2, and --set micro_batch_size=1" in capsys.readouterr().err


def test_the_list_of_what_is_read_is_that_of_what_is_read() -> None:
    text = "".join(Path(one.__file__).read_text() for one in (megatron, megatron_model))
    asked = set(re.findall(r"\ba\.(?:text|whole|flag)\(\s*\"(\w+)\"", text))
    asked |= set(re.findall(r"\buntold\[\"(\w+)\"\]", text))
    asked |= set(re.findall(r"\b_refuse_other\(\s*log, \"(\w+)\"", text))
    asked |= {*UNTOLD, *OF_EXPERTS, *OF_FP8, *SIMULATED_AS, *megatron._FSDP, *megatron._MODULES}
    asked |= {"expert_tensor_parallel_size"}
    assert asked == set(READ)


@pytest.mark.parametrize(
    ("changes", "words", "complaint"),
    [
        ({"bf16": "False"}, ["--set", "fp16=False"], "bf16 and fp16 are False; training.csv has"),
        ({}, ["--set", "fp16=True"], "bf16 and fp16 are True; a run is in one of them"),
        ({"bf16": "None"}, [], "the log does not say bf16; add it with --set bf16=VALUE"),
        ({"bf16": "False"}, [], "the log does not say fp16; add it with --set fp16=VALUE"),
        ({"bf16": "None"}, ["--set", "bf16=True"], None),
        ({"bf16": "False"}, ["--set", "fp16=True"], None),
    ],
)
def test_fp32_is_not_taken_for_bf16(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str],
    words: list[str],
    complaint: str | None,
) -> None:
    path, out = write(tmp_path, log(**changes)), str(tmp_path / "out")
    words = ["megatron-log", path, "--system", "x", "--nodes", "2", "--out", out, *words]
    assert run(main, words) == (2 if complaint else 0)
    assert (complaint or "") in capsys.readouterr().err


def test_a_log_of_skipped_iterations_alone_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That it had no line of an iteration was said."""
    text = log().replace("nan iterations:   0", "nan iterations:   1")
    words = ["megatron-log", write(tmp_path, text), "--system", "x", "--out", str(tmp_path / "out")]
    assert run(main, words) == 2
    assert "of 6 lines with 'elapsed time per iteration' all are" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "device", "complaint"),
    [
        (
            "2510.0",
            "700.0",
            "NVIDIA H100 80GB HBM3",
            "is 700 ms, in which each GPU would make 1092",
        ),
        ("2510.0", "2400.0", "NVIDIA A100-SXM4-80GB", "312 at most, so that it must be 2449 ms"),
        ("2510.0", "1.0", "NVIDIA H200", "is 1 ms, in which each GPU would make"),
        ("2510.0", "100.0", "unknown", "is 100 ms, which is 7905 TFLOP/s per GPU"),
        ("2510.0", "60000.0", "unknown", "the throughput per GPU that it says is 400.4, and must"),
        ("400.4", "12.1", "unknown", "the throughput per GPU that it says is 12.1, and must be"),
        ("400.4", "nan", "unknown", "throughput per GPU is 'nan'; it must be a number from 0 to"),
        ("2510.0", "900.0", "NVIDIA H100 80GB HBM3", None),
        ("2510.0", "700.0", "unknown", None),
        ("2510.0", "700.0", "NVIDIA B200", None),
        ("400.4", "40.1", "NVIDIA H100 80GB HBM3", None),
        ("throughput per GPU (TFLOP/s/GPU): 400.4 | ", "", "unknown", None),
    ],
)
def test_a_time_that_cannot_be_is_refused_by_its_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    old: str,
    new: str,
    device: str,
    complaint: str | None,
) -> None:
    text, words = with_last(old, new), ["--nodes", "2", "--device", device]
    if complaint is None:
        imported(tmp_path, "megatron-log", write(tmp_path, text), *words)
        return
    printed = refused(tmp_path, capsys, "megatron-log", text, *words)
    assert f"out.txt line {len(text.splitlines())}: " in printed
    assert complaint in printed


def test_fp8_has_twice_the_peak_and_what_is_left_out_no_bound(tmp_path: Path) -> None:
    text = with_last("2510.0", "700.0") + LINE.format(8, 1.0, 64, 0)
    words = ["--nodes", "2", "--device", "NVIDIA H100 80GB HBM3", "--set", "fp8=hybrid"]
    found = imported(tmp_path, "megatron-log", write(tmp_path, text), *words)
    assert len(found.table(StepRow)) == 5


def test_peaks_are_those_of_the_nodes_that_are_known() -> None:
    nodes = [load_node(name) for name in node_names()]
    known = {node.gpu: node.peak_bf16_tflops for node in nodes if node.gpu != "CPU core"}
    assert {gpu: peak_tflops(gpu, fp8=False) for gpu in known} == known
    assert peak_tflops("NVIDIA H20", fp8=False) is None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"world_size": "0"}, "world_size is '0'; it must be a whole number, 1 or more"),
        ({"world_size": "6"}, "world_size is 6; it must be a multiple of tp 2 * pp 2 * cp 1"),
        ({"tensor_model_parallel_size": "0"}, "tensor_model_parallel_size is '0'; it must be a"),
        ({"num_attention_heads": "0"}, "num_attention_heads is '0'; it must be a whole number, 1"),
        ({"num_layers": "33"}, "pp 2 * vpp 1 does not divide num_layers 33; it must, as the log"),
        ({"num_experts": "8", "sequence_parallel": "False"}, "sequence_parallel is False; a mix"),
    ],
)
def test_what_cannot_be_is_told_in_the_words_of_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], complaint: str
) -> None:
    """Options of other commands were named, dp was 0, and a degree of 0 was a traceback."""
    words = ("--nodes", "2", "--set", "moe_router_topk=2")
    printed = refused(tmp_path, capsys, "megatron-log", log(**changes), *words)
    assert f"out.txt: {complaint}" in printed
    assert "--" not in printed


def test_results_that_all_failed_their_check_are_said_to_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That there were none was said."""
    text = re.sub(
        r"^( +[1-9].* )0( +[\d.]+ +[\d.]+ +[\d.]+ +\d+)$", r"\g<1>3\2", ALL_REDUCE, flags=re.M
    )
    printed = refused(tmp_path, capsys, "nccl-tests", text)
    assert "out.txt: all 4 lines of results failed nccl-tests' own check of the data" in printed


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (
            "   0.07      0    22.80",
            "   0.00      0    22.80",
            "0.0 GB/s is not that of all_reduce",
        ),
        (
            "    23.00 ",
            "     0.01 ",
            "bus bandwidth of 0.07 GB/s is not that of all_reduce over 4 ra",
        ),
        (
            "    50.00 ",
            "    5000. ",
            "31.46 GB/s is not that of all_reduce over 4 ranks, 1048576 b",
        ),
    ],
)
def test_a_bus_bandwidth_that_its_time_denies_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, complaint: str
) -> None:
    """Below 1 GB/s none was."""
    assert ALL_REDUCE.count(old) == 1
    printed = refused(tmp_path, capsys, "nccl-tests", ALL_REDUCE.replace(old, new))
    assert re.search(r"out.txt line 1[56]: ", printed)
    assert complaint in printed
    assert " us (" in printed


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("alltoall_perf_16n.txt", "all_to_all"),
        ("h100_alltoall_perf.txt", "all_to_all"),
        ("h100-alltoall_perf_mpi_16n.log", "all_to_all"),
        ("alltoallv_perf_16n.txt", None),
        ("alltoall_performance.txt", None),
        ("myall_reduce_perf.txt", None),  # nor that of reduce, which no step uses
    ],
)
def test_a_files_name_says_more_than_its_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str | None
) -> None:
    path = write(tmp_path, ALL_TO_ALL, name)
    if kind is None:
        assert run(main, ["nccl-tests", path, "--system", "x", "--out", str(tmp_path / "no")]) == 2
        assert "nothing says which collective this is" in capsys.readouterr().err
    else:
        (row,) = imported(tmp_path, "nccl-tests", path).table(CollectiveRow)
        assert row.collective == kind
