"""Plans are data: stable ids and roles, every model shape covered, nothing impossible asked for."""

import json
from pathlib import Path

import pytest

from measure.plans import widths
from measure.plans.cases import (
    CollectiveCase,
    KernelCase,
    collective_cases,
    interference_cases,
    kernel_cases,
    role_of,
    spans,
)
from measure.plans.file import PlanFile, read_plan
from measure.run import main
from measure.training.plan import cases as steps_of
from measure.wanted import Options, planned
from spec.command import run
from spec.errors import UserError
from spec.files import write_table
from spec.kernel import AROUND_BLOCKS, Kernel
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.step import kernels_of
from spec.training_records import TrainingConfig


def test_ids_are_unique_and_roles_split_about_one_in_five() -> None:
    cases = [
        *kernel_cases("nvidia", 4, False, (), PlanFile()),
        *collective_cases("nvidia", 4, False, PlanFile()),
        *interference_cases("nvidia", 4, False),
    ]
    assert len({case.case_id for case in cases}) == len(cases)
    judged = sum(case.role == "judge" for case in cases) / len(cases)
    assert 0.15 < judged < 0.25


def test_stages_of_several_pipelines_send_in_the_sizes_of_real_models() -> None:
    sent = {
        (case.stride, case.groups): set[int]()
        for case in collective_cases("nvidia", 4, False, PlanFile())
        if case.groups > 1
    }
    for case in collective_cases("nvidia", 4, False, PlanFile()):
        if case.collective == "send_recv" and case.groups > 1:
            sent[case.stride, case.groups].add(case.bytes)
    for sizes in sent.values():
        assert {2 * 8192 * 8192 // tp for tp in (1, 2, 4, 8)} <= sizes  # Llama 3 70B
        assert {2 * 2048 * 12288 // tp for tp in (1, 2, 4, 8)} <= sizes  # GPT-3 175B


def test_every_median_stands_on_twenty_repeats() -> None:
    pytest.importorskip("torch")
    from measure.suites.collectives import repeats_of

    assert min(repeats_of(2**e, gpu) for e in range(10, 31) for gpu in (False, True)) >= 20


def test_roles_never_change() -> None:
    # committed results were split by this hash
    assert role_of("kernel gemm forward m=1 n=1 k=1 bf16") == "fit"
    assert [role_of(str(number)) for number in range(12)].count("judge") == 2


def test_both_states_of_a_kernel_share_a_role() -> None:
    for size in range(64, 640, 64):
        kernel = Kernel("gemm", "forward", (size, size, size))
        assert KernelCase(kernel).role == KernelCase(kernel, "sustained").role
        assert KernelCase(kernel, "sustained", device=3).role == "fit"


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("seq_len", [4096, 8192])
def test_every_kernel_of_the_default_models_is_measured(name: str, tp: int, seq_len: int) -> None:
    measured = {case.kernel for case in kernel_cases("nvidia", 4, False, (), PlanFile())}
    split = Parallelism(tp=tp, sequence_parallel=tp > 1)
    missing = kernels_of(load_model(name).resized(seq_len=seq_len), split) - measured
    # optimizer passes over more parameters than a device holds
    assert all(one.op in ("adam", "grad_norm", "copy") for one in missing)
    assert all(one.dims[0] > 2**33 for one in missing)


def test_what_rings_and_shards_run_is_measured() -> None:
    """At the shapes of the plan's own steps, and in few rows."""
    new = {"attention_block", "gather_copy_out", "scatter_copy_in", *AROUND_BLOCKS}
    steps = [(case.model, case.parallelism) for case in steps_of(4, "nvidia", quick=False)]
    cases = kernel_cases("nvidia", 4, False, (), PlanFile(), steps)
    measured = {case.kernel for case in cases if case.kernel.op in new}
    wanted = {one for model, p in steps for one in kernels_of(model, p) if one.op in new}
    assert {one.op for one in wanted} == new
    assert wanted < measured
    orders = {one for one in measured if one.op == "reorder"}  # steps without a ring have some, too
    assert len(orders) <= 20
    assert len(measured - orders - set(widths.kernels())) <= 58
    assert new <= {case.kernel.op for case in kernel_cases("cpu", 2, True, (), PlanFile())}


def test_a_users_model_is_measured_at_its_own_length() -> None:
    cases = kernel_cases("nvidia", 1, True, ("tiny",), PlanFile(tp=[2]))
    split = Parallelism(tp=2, sequence_parallel=True)
    assert kernels_of(load_model("tiny"), split) <= {case.kernel for case in cases}
    assert not any(case.kernel.op == "gemm" and case.kernel.dims[1] == 128256 for case in cases)


def test_spans_cover_pairs_strides_and_several_groups_at_once() -> None:
    assert spans(1) == []
    assert spans(2) == [(2, 1, 1)]
    assert spans(4) == [(2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2), (4, 1, 1)]
    assert (3, 1, 1) in spans(3)


@pytest.mark.parametrize(
    ("ranks", "stride", "groups", "members"),
    [
        (2, 1, 2, [[0, 1], [2, 3]]),
        (2, 2, 2, [[0, 2], [1, 3]]),
        (2, 2, 1, [[0, 2]]),
        (4, 1, 1, [[0, 1, 2, 3]]),
        (2, 2, 4, [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ],
)
def test_members_of_groups(ranks: int, stride: int, groups: int, members: list[list[int]]) -> None:
    assert CollectiveCase("all_reduce", ranks, 1024, stride, groups).members() == members


def test_a_plan_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "kernels:\n- {op: gemm, shape: m=8 n=8 k=8, state: sustained}\n"
        "collectives:\n- {collective: all_reduce, ranks: 2, bytes: 4096}\n"
    )
    plan = read_plan(path)
    (kernel,) = kernel_cases("cpu", 2, False, (), plan)
    assert kernel.case_id == "gemm-forward-8x8x8-bf16-sustained"
    (collective,) = collective_cases("cpu", 2, False, plan)
    assert collective.case_id == "all_reduce-2r-stride1-1groups-4096"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kernel: []\n", "unknown key 'kernel'"),
        ("collectives:\n- {collective: gossip, ranks: 2, bytes: 1}\n", "gossip"),
        ("kernels: [\n", "not valid YAML"),
        (
            "tp: [2]\nkernels:\n- {op: gemm, shape: m=8 n=8 k=8}\n",
            "tp has no effect beside kernels",
        ),
        (
            "kernels:\n- {op: ragged_gemm, shape: m=8 n=8 k=8}\n",
            r"op 'ragged_gemm' is a model's; write 'gemm'",
        ),
        ("kernels:\n- {op: gem, shape: m=8}\n", r"plan\.yaml: kernels\.0: op 'gem' is unknown"),
        (
            "kernels:\n- {op: gemm, shape: m=8 n=-8 k=8}\n",
            r"kernels\.0: shape of gemm is 'm=8 n=-8",
        ),
        ("models: [tiny, nope]\n", r"plan\.yaml: models\.1: model 'nope' is neither"),
        ("seq_len: [999999999999]\n", r"plan\.yaml: seq_len\.0 is 999999999999"),
        (
            f"collectives:\n- {{collective: all_reduce, ranks: 2, bytes: {10**22}}}\n",
            "0.bytes is 1",
        ),
    ],
)
def test_a_wrong_plan_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        read_plan(path)


def test_what_a_plan_has_twice_is_refused_before_it_is_measured(tmp_path: Path) -> None:
    """No table of a run may have two rows of one case: nobody could read it afterwards."""
    wish = {"kernels": {"op": "gemm", "shape": "m=8 n=8 k=8"}}
    wish["collectives"] = {"collective": "all_reduce", "ranks": 2, "bytes": 4096}
    for suite, one in wish.items():
        plan = PlanFile.model_validate({suite: [one, one]})
        with pytest.raises(UserError, match=rf"suite {suite}: the plan has .* twice"):
            planned(Options((suite,), (), False, plan), "cpu", 2)
    row = TrainingConfig.of("mine", load_model("tiny"), Parallelism(global_batch=2))
    write_table(tmp_path / "plan.csv", TrainingConfig, [row, row])
    with pytest.raises(UserError, match=r"plan\.csv: case_id mine stands there 2 times"):
        read_plan(tmp_path / "plan.csv")


def test_a_step_that_ignores_its_option_is_refused_by_file_and_line(tmp_path: Path) -> None:
    tiny = load_model("tiny")
    rows = [
        TrainingConfig.of("fine", tiny, Parallelism(dp=2, global_batch=2)),
        TrainingConfig.of("idle", tiny, Parallelism(dp=2, global_batch=2, overlap=True)),
    ]
    path = tmp_path / "plan.csv"
    write_table(path, TrainingConfig, rows[:1])
    assert read_plan(path).training == rows[:1]
    write_table(path, TrainingConfig, rows)
    with pytest.raises(UserError, match=r"plan\.csv: line 3, idle: overlap has no effect"):
        read_plan(path)
    path = tmp_path / "plan.yaml"
    wrong = rows[0].model_dump(mode="json") | {"vpp": 2}
    path.write_text(json.dumps({"training": [wrong]}))
    with pytest.raises(UserError, match=r"plan\.yaml: training\.0: vpp 2 has no effect"):
        read_plan(path)


@pytest.mark.parametrize(
    ("text", "more", "words"),
    [
        ("models: [llama3-8b]\ntp: [1, 3]\n", (), "tp.1 is 3, which no step of it can have: tp 3 "),
        ("tp: [1, 3]\n", ("--model", "tiny"), "tp.1 is 3, which no step of it can have: tp 3 "),
        ("tp: [2]\nseq_len: [64, 65]\n", (), "seq_len.1 is 65, which no step of it can have"),
        ("models: [tiny, smollm2-135m]\ntp: [2]\n", (), "models.1 is smollm2-135m, which no step"),
    ],
)
def test_what_no_kernel_is_measured_of_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    more: tuple[str, ...],
    words: str,
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    listed = ["--kind", "fake:2", "--list", "--suite", "kernels", "--plan", str(path)]
    assert run(main, [*listed, *more]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert f"plan.yaml: {words}" in printed.err
    path.write_text("tp: [1, 8]\nmodels: [tiny, llama3-8b]\n")  # 8 of one of them
    assert run(main, [*listed, *more]) == (2 if more else 0)
    path.write_text("microbatch: [3]\n")
    assert run(main, [*listed, *more]) == 0
