"""Steps whose layers are Megatron-Core's on Transformer Engine."""

from importlib.util import find_spec
from math import hypot
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from measure.megatron import optimizer as megatron_optimizer
from measure.megatron.build import transformer_config
from measure.training.plan import case_of
from measure.training.steps import prepared
from simulate.hardware.as_run import as_run
from simulate.hardware.unmeasured import unmeasured
from simulate.memory.overhead import context_gib
from simulate.projection.local_layers import local_layers_notes
from spec.calibration import HostVisit
from spec.errors import UserError, WorkError
from spec.fitted import changed
from spec.measurable import read_steps, refuse
from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism, describe
from spec.step import layer, optimizer
from spec.step_parts import Part
from spec.step_transformer_engine import (
    ADAM_TIMES,
    CAST,
    CLIP_TIMES,
    GENERAL,
    JOINED,
    NORM_TIMES,
    OF_A_COPY,
    PACED_WAYS,
    accumulated,
)
from spec.training_records import TrainingConfig
from tests.commands import RESULTS
from tests.simulated_steps import CALIBRATION, FABRIC, MODEL, MOE, NODE, simulate
from tests.test_memory import errors, measured
from topologies import load_node

LLAMA, GPT = load_model("llama3-8b"), load_model("gpt3-30b")
P = Parallelism(dp=2, global_batch=4)
FORTY_FIFTH = "20261128-20"  # that visit's runs come before
TE = P.model_copy(update={"transformer_impl": "transformer_engine"})
TE_FP8 = TE.model_copy(update={"fp8": True})


def parts(model: ModelSpec, p: Parallelism) -> dict[tuple[str, int], Part]:
    """Of a layer, by name (of two alike the last) and whether backward."""
    return {(one.name, way): one for way in (0, 1) for one in layer(model, p)[way]}


def ops(part: Part) -> list[str]:
    return [one.op for one in part.kernels]


def test_what_is_one_kernel_there_takes_a_copys_time_of_its_bytes() -> None:
    local, engine = parts(LLAMA, P), parts(LLAMA, TE)
    for name, op in (("norm", "rmsnorm"), ("rope", "rope"), ("swiglu", "swiglu")):
        for way in (0, 1):
            told = next(one for one in local[name, way].kernels if one.op == op)
            runs = engine[name, way].kernels[0]
            assert runs.op == ("paced_copy" if (op, told.direction) in PACED_WAYS else "copy")
            assert runs.bytes == pytest.approx(OF_A_COPY[op][way] * told.bytes, rel=1e-6)


def test_a_gelu_without_a_bias_is_not_fused() -> None:
    """Megatron-Core refuses to fuse one, as plan 60's Falcon found."""
    falcon = load_model("falcon-7b")
    assert not falcon.linear_bias
    for way in (0, 1):
        assert ops(parts(falcon, TE)["gelu", way]) == ops(parts(falcon, P)["gelu", way])
        assert "gelu" not in ops(parts(GPT, TE)["gelu", way])
    learned = falcon.model_copy(update={"position": "learned"})  # the others' asks for the library
    assert not transformer_config(learned, TE, False).bias_activation_fusion


def test_a_width_without_a_kernel_of_its_own_takes_the_general_one() -> None:
    """7,168 is in neither of Transformer Engine's lists of tuned kernels, 4,096 in both."""
    for name, general in (("gpt3-30b", True), ("yi-34b", True), ("llama3-8b", False)):
        model = load_model(name)
        local, engine = parts(model, P), parts(model, TE)
        ratio = engine["norm", 0].kernels[0].bytes / local["norm", 0].kernels[0].bytes
        widths = GENERAL[local["norm", 0].kernels[0].op]
        forward, back, beside = widths[7168 if 7168 in widths else 5120]
        assert (ratio == pytest.approx(forward, rel=1e-6)) == general
        told, runs = local["norm", 1].kernels[0].bytes, engine["norm", 1].kernels[0].bytes
        assert (runs == pytest.approx(back * told + beside, rel=1e-6)) == general


def test_gradients_beside_each_other_are_joined_by_a_slow_copy() -> None:
    """Where nothing is rotated: else attention has them from tensors of their own."""
    for model, times in ((GPT, JOINED), (LLAMA, 1.0)):
        before, after = (parts(model, p)["split", 1].kernels[0].bytes for p in (P, TE))
        assert after == pytest.approx(times * before, rel=1e-6)


def test_products_add_their_weights_gradients_up_and_biases_are_no_kernels() -> None:
    local, engine = parts(GPT, P), parts(GPT, TE)
    for name in ("qkv", "proj", "fc1", "fc2"):
        before = [one for one in local[name, 1].kernels if one.op == "grad_accumulate"]
        after = [one for one in engine[name, 1].kernels if one.op == "grad_accumulate"]
        (rows,) = {one.dims[0] for one in local[name, 1].kernels if one.direction == "wgrad"}
        assert after[0].bytes == pytest.approx(accumulated(rows) * before[0].bytes, rel=1e-6)
        assert after[1:] == before[1:]  # the bias's
        assert "bias" not in ops(engine[name, 0])
    assert "bias" not in ops(engine["qkv", 1])  # summed by the product itself
    assert ops(engine["fc1", 1]).count("bias") == 1


def test_in_fp8_a_norm_casts_what_it_writes_and_other_casts_take_their_time() -> None:
    local = parts(LLAMA, P.model_copy(update={"fp8": True}))
    engine = parts(LLAMA, TE_FP8)
    for name in ("qkv", "fc1"):
        assert ops(local[name, 0]) == ["copy", "gemm"]
        assert ops(engine[name, 0]) == ["gemm"]
    for name, way in (("proj", 0), ("fc2", 0), ("qkv", 1), ("fc1", 1)):
        cast, told = engine[name, way].kernels[0], local[name, way].kernels[0]
        assert cast.op == told.op == "copy"
        assert cast.bytes == pytest.approx(CAST * told.bytes, rel=1e-6)


def test_gradients_are_clipped_in_place_by_kernels_that_take_longer() -> None:
    (norm, clip, adam), (own_norm, own_clip, own_adam) = (
        optimizer(LLAMA, p, 0)[0][-3:] for p in (P, TE)
    )
    assert own_adam.bytes == pytest.approx(ADAM_TIMES * adam.bytes)
    assert (norm.op, clip.op) == (own_norm.op, own_clip.op) == ("grad_norm", "copy")
    assert own_norm.bytes == pytest.approx(NORM_TIMES * norm.bytes)
    assert own_clip.bytes == pytest.approx(CLIP_TIMES * clip.bytes / 2)


def test_steps_are_shorter_and_less_sure_and_say_so() -> None:
    local, engine = simulate(P), simulate(TE)
    assert engine.breakdown_s["compute"] < local.breakdown_s["compute"]
    priced = as_run(CALIBRATION, TE, NODE, LLAMA)
    assert priced.composition_sd > CALIBRATION.composition_sd
    assert priced.host.sd > CALIBRATION.host.sd
    names = {one.name: one.source for one in priced.parameters}
    assert names["kernel.transformer_engine"] == "assumed"
    said = unmeasured(CALIBRATION, NODE, on_engine=True)
    assert any("on up to two H200 and one H100 alone" in one for one in said)
    assert not unmeasured(CALIBRATION, NODE)


def issued_us(p: Parallelism) -> tuple[float, ...]:
    """What a layer's passes take their host beside kernels, us."""
    host = CALIBRATION.host
    return tuple(
        sum(getattr(host, f"{name}_us") * n for one in way for name, n in one.issued.items())
        for way in layer(LLAMA, p)
    )


def test_a_hosts_times_there_are_its_own_and_collectives_as_anywhere() -> None:
    """Not local layers' times a ratio: kernels there are fewer, and take their host less."""
    host = CALIBRATION.host
    for p, part, backward, checkpoint in (
        (P, host.part_us, host.backward_part_us, host.checkpoint_us),
        (TE, host.te_part_us, host.te_backward_part_us, host.te_checkpoint_us),
        (TE_FP8, host.fp8_part_us, host.fp8_backward_part_us, host.fp8_checkpoint_us),
    ):
        count = len(layer(LLAMA, p)[0])
        assert issued_us(p) == pytest.approx((count * part, count * backward))
        again = issued_us(p.model_copy(update={"recompute": "full"}))
        assert again[1] == pytest.approx(count * (part + backward) + checkpoint)
    split = {"tp": 2, "dp": 1, "sequence_parallel": True}
    collectives = [
        sum(one.issued["collective"] for way in layer(LLAMA, p) for one in way)
        for p in (P.model_copy(update=split), TE.model_copy(update=split))
    ]
    assert collectives[0] == collectives[1] > 0
    older = changed(CALIBRATION, host=changed(host, te_part_us=0.0))
    with pytest.raises(UserError, match=r"no host\.te_part_us, as it is older; run calibrate.fit"):
        as_run(older, TE, NODE, LLAMA)


def test_a_host_whose_nil_steps_ran_there_is_known_there() -> None:
    visit = HostVisit(devices=("a",), slower=1.0, times_us={"te_part_us": 20.0})
    other = HostVisit(devices=("b",), slower=1.0, times_us={"part_us": 5.0})
    spread = {"visit_sd": 0.3, "python_sd": 0.4}
    host = changed(CALIBRATION.host, visits=(visit, other), **spread)
    known, unknown = (changed(CALIBRATION, host=host.on_devices([one])) for one in "ab")
    assert 12.0 < known.host.te_part_us < 20.0
    assert unknown.host.te_part_us == 12.0
    assert as_run(known, TE, NODE, LLAMA).host.sd == pytest.approx(host.sd)
    assert as_run(known, TE_FP8, NODE, LLAMA).host.sd == pytest.approx(hypot(host.sd, 0.15))
    assert as_run(unknown, TE, NODE, LLAMA).host.sd == pytest.approx(hypot(host.sd, 0.15))


@pytest.mark.parametrize("name", ["te_tensor_us", "fp8_pass_us"])
def test_an_update_and_fp8s_scales_take_their_host(name: str) -> None:
    """Once a step, and once a microbatch in FP8 alone; local layers' steps stay as they are."""
    slow = changed(CALIBRATION, host=changed(CALIBRATION.host, **{name: 1e6}))
    for p, longer in ((P, False), (TE, name == "te_tensor_us"), (TE_FP8, True)):
        before, after = (float(simulate(p, one).step_time_s[0]) for one in (CALIBRATION, slow))
        assert (after > 1.5 * before) == longer, p


def test_neither_a_cpu_nor_amds_gpus_are_priced_there() -> None:
    cpu = CALIBRATION.model_copy(update={"kind": "cpu"})
    for calibration, node in ((cpu, NODE), (CALIBRATION, load_node("mi300x-node"))):
        with pytest.raises(
            UserError, match=r"timed on NVIDIA's GPUs, and node .* has .*; leave it"
        ):
            as_run(calibration, TE, node, LLAMA)


def test_sizes_that_fp8_refuses_are_said_before_a_step_runs() -> None:
    odd = LLAMA.model_copy(update={"ffn_hidden": 14344})
    with pytest.raises(UserError, match="multiples of 16; ffn_hidden / tp of llama3-8b is 14344"):
        refuse(odd, TE_FP8)
    short = LLAMA.model_copy(update={"seq_len": 4100})
    with pytest.raises(UserError, match="multiples of 8; a micro-batch leaves a GPU 4100"):
        refuse(short, TE_FP8)
    even = LLAMA.model_copy(update={"seq_len": 4104})  # whose half is no multiple of 8
    with pytest.raises(UserError, match="multiples of 8; a micro-batch leaves a GPU 2052"):
        refuse(even, TE_FP8.model_copy(update={"cp": 2}))


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="it is installed here")
def test_a_machine_without_transformer_engine_says_so_before_a_case_starts() -> None:
    with pytest.raises(UserError, match="needs Transformer Engine, which is not installed"):
        prepared(case_of(LLAMA, TE, "nvidia"), "nvidia")


@pytest.mark.parametrize(
    ("model", "more", "noun"),
    [
        (
            MOE.model_copy(update={"linear_bias": True}),
            {},
            "experts that have biases, or no gates,",
        ),
        (MODEL, {"zero": 3, "overlap": True}, "zero 3"),
    ],
)
def test_what_is_not_simulated_there_is_refused(
    model: ModelSpec, more: dict[str, Any], noun: str
) -> None:
    with pytest.raises(UserError, match=f"transformer_engine with {noun} is not supported"):
        TE.model_copy(update=more).check(model)


def test_fp8_steps_of_local_layers_are_not_measured() -> None:
    with pytest.raises(UserError, match="use transformer_impl transformer_engine, or fp8 false"):
        refuse(LLAMA, P.model_copy(update={"fp8": True}))
    (note,) = local_layers_notes(LLAMA, P.model_copy(update={"fp8": True}))
    assert note.startswith("Products in FP8 on local layers were never measured in a step")
    assert local_layers_notes(LLAMA, P) == local_layers_notes(LLAMA, TE_FP8) == []
    refuse(LLAMA, TE_FP8)


@pytest.mark.parametrize("p", [P, TE])
def test_local_layers_are_updated_by_torch_wherever_they_run(
    monkeypatch: pytest.MonkeyPatch, p: Parallelism
) -> None:
    """Megatron-Core takes Transformer Engine's Adam, norm and clipping where it can import it."""
    of_it = {
        name: [one for one in vars(module) if one in switches]
        for name, module, switches in (
            ("built", megatron_optimizer.built, {"Adam", "USING_PYTORCH_OPTIMIZER"}),
            (
                "distrib_optimizer",
                megatron_optimizer.distrib_optimizer,
                {"Adam", "USING_TE_OPTIMIZER"},
            ),
            (
                "clip_grads",
                megatron_optimizer.clip_grads,
                {"l2_norm_impl", "multi_tensor_scale_impl"},
            ),
            ("mixed_precision", megatron_optimizer.mixed_precision, {"multi_tensor_scale_impl"}),
        )
    }
    for module, names in of_it.items():
        for name in names:
            monkeypatch.setattr(getattr(megatron_optimizer, module), name, "Transformer Engine's")
    monkeypatch.setattr(
        megatron_optimizer, "get_megatron_optimizer", lambda *_, **__: SimpleNamespace()
    )
    monkeypatch.setattr(megatron_optimizer, "of_torch", lambda _: [])
    megatron_optimizer.build_optimizer([], p, torch.device("cpu"))
    left = {
        (module, name)
        for module, names in of_it.items()
        for name in names
        if getattr(getattr(megatron_optimizer, module), name) == "Transformer Engine's"
    }
    assert len(left) == (7 if p.on_engine else 0)
    monkeypatch.delattr(megatron_optimizer.clip_grads, "l2_norm_impl")
    with pytest.raises(WorkError, match=r"clip_grads has no l2_norm_impl; 0\.16 has"):
        megatron_optimizer.update_by_torch()


def test_a_row_keeps_what_runs_its_layers() -> None:
    row = TrainingConfig.of("one", LLAMA, TE_FP8)
    assert row.parallelism() == TE_FP8
    assert TrainingConfig.name_of(LLAMA, TE_FP8).endswith("-FP8-TE")
    assert describe(TE_FP8).endswith("FP8 TE")
    plan = RESULTS / "2x-h200" / "forecasts" / "plan-53.csv"  # of before these columns
    assert {one.transformer_impl for one in read_steps(plan)} == {"local"}


def test_megatron_core_gets_megatron_lms_fusions_there_alone() -> None:
    """Of a model without rotary embeddings, whose fusion asks for Transformer Engine itself."""
    local, engine, eight = (transformer_config(GPT, p, True) for p in (P, TE, TE_FP8))
    names = ("bias_activation_fusion", "bias_dropout_fusion")
    assert not any(getattr(local, name) for name in names)
    assert all(getattr(engine, name) for name in names)
    assert (local.fp8, engine.fp8, eight.fp8) == (None, None, "hybrid")
    assert eight.fp8_recipe == "delayed"


@pytest.mark.parametrize(("system", "least", "later"), [("2x-h200", 44, 22), ("2x-h100", 14, 10)])
def test_measured_peaks_are_what_the_sources_say(system: str, least: int, later: int) -> None:
    """Allocated, and what lies beside the reserved: 0.13 GiB less than is counted in pipelines.

    A mixture of 128 experts in FP8 over interleaved stages has 1.1 GiB of 58.9 more, one whose
    layers run again 0.9 of 51.4, one of 160 experts 0.8 of 90 whatever runs again, and a model of
    960 wide 52 MiB of 4.7 GiB: rests of blocks beside small tensors.
    """
    cases = [one for one in measured(system, engine=True) if not one[0].cuda_graphs]
    new = [run > FORTY_FIFTH for *_, run in cases]
    assert new.count(False) >= least
    assert new.count(True) >= later
    assert mean(errors(cases, "allocated")) < 0.0015
    for (row, stage, peaks, _), of_new in zip(cases, new, strict=True):
        real, told = peaks["allocated"]
        again = row.vpp > 1 or row.recompute == "full"
        many = row.fp8 and (row.experts == 160 or (row.experts == 128 and again))
        most = (0.02 if many else 0.008 if of_new else 0.006) * real
        most += 0.015 if row.hidden < 1024 else 0.0
        assert told["median"] == pytest.approx(real, abs=most), f"{row.case_id} stage {stage}"
        beside = peaks["device"][0] - peaks["reserved"][0]
        node = load_node("hgx-h200").model_copy(update={"gpus": row.parallelism().gpus})
        counted = context_gib(row.model_spec(), row.parallelism(), stage, node, FABRIC)
        worst = 0.13 if row.pp > 1 else 0.035 if row.cuda_graphs else 0.01
        assert counted == pytest.approx(beside, abs=worst), row.case_id


def test_a_stage_there_has_workspaces_of_what_it_runs() -> None:
    """PyTorch's are the output layer's: without that first stages had 32 MiB too much, last ones
    and rings as much too little (medians)."""
    lack_mib: dict[str, list[float]] = {"first": [], "last": [], "ring": []}
    for row, stage, peaks, _ in measured("2x-h200", engine=True):
        if row.cuda_graphs or row.experts or row.pp * row.cp == 1:
            continue
        real, told = peaks["allocated"]
        kind = "ring" if row.cp > 1 else "last" if stage else "first"
        lack_mib[kind].append((real - told["median"]) * 1024)
    assert all(len(some) > 9 for some in lack_mib.values())
    for kind, some in lack_mib.items():
        assert abs(median(some)) < 12, kind


def test_values_are_copied_beside_rotated_queries_and_keys() -> None:
    first = parts(LLAMA, TE)["attention", 0].kernels[0]
    assert first.bytes == 4 * LLAMA.seq_len * LLAMA.kv_heads * LLAMA.head_dim
    assert ops(parts(GPT, TE)["attention", 0]) == ["attention"]


def test_a_kernel_that_only_moves_memory_is_never_lost() -> None:
    """What is not fused, summed or cast stays as it is."""
    for way in (0, 1):
        kept = {"gemm", "attention", "reorder", "residual", "gradient_sum"}
        before = [k for one in layer(LLAMA, P)[way] for k in one.kernels if k.op in kept]
        after = [k for one in layer(LLAMA, TE)[way] for k in one.kernels if k.op in kept]
        assert before == after
