"""Published rows as plans: what they print, what is assumed of them and said."""

from typing import Any

import pytest

from simulate.series.hardware import fabric_of, node_of
from simulate.series.metric_names import metric_kind
from simulate.series.models import named_shape
from simulate.series.plan import plan
from simulate.series.rows import TooLittle, number
from tests.made_up_series import row
from topologies import load_node


def test_metrics_become_seconds() -> None:
    """64 sequences of 2,048 tokens in one second on 8 GPUs, said in every way that sources do."""
    flops = plan(row()).model.step_flops(64)
    ways = {
        "step_time_s": 1.0,
        "step_time_s (median)": 1.0,
        "tokens/s/GPU": 64 * 2048 / 8,
        "TFLOP/s/GPU": flops / 8e12,
        "TFLOP/s/GPU (model FLOPs)": flops / 8e12,
        "samples/s total": 64,
        "sequences per second": 64,
        "Step time (ms)": 1000.0,
        "iteration_time_ms": 1000.0,
        "steps/s": 1.0,
        "tokens/s/node": 64 * 2048,
        "tokens/day": 86400 * 64 * 2048,
        "aggregate PFLOP/s": flops / 1e15,
        "aggregate TFLOP/s": flops / 1e12,
        "petaFLOP/s per GPU": flops / 8e15,
        "MFU": flops / 8e12 / 989.4,
        "MFU_%": flops / 8e10 / 989.4,
    }
    for metric, value in ways.items():
        assert plan(row(metric=metric, value=repr(value))).real_s == pytest.approx(1.0), metric
    # eq. 3 of arXiv 2104.04473: the layers' forward pass again, the logits not
    again = flops / 3 - 64 * 2048 * 2 * 32000 * 4096
    hardware = row(
        metric="TFLOP/s/GPU (hardware incl. recompute)",
        value=repr((flops + again) / 8e12),
        recompute="full",
    )
    assert plan(hardware).real_s == pytest.approx(1.0)
    utilised = row(metric="HFU", value=repr((flops + again) / 8e12 / 989.4), recompute="full")
    assert plan(utilised).real_s == pytest.approx(1.0)
    both = row(metric="MFU_%", value="50", metric2="step_time_s", value2="1.0")
    assert plan(both).real_s == 1.0
    assert metric_kind("pct_peak") is None
    for gpu, gpus in (("H200", 8), ("GB200", 4), ("H200 (4 per node)", 4)):
        printed = {"metric": "tokens/s/node", "value": str(gpus * 16384), "gpus": "32"}
        one = plan(row(**printed, gpu_type=gpu, global_batch="256"))
        assert one.real_s == pytest.approx(1.0), gpu


@pytest.mark.parametrize(
    ("rate", "value"),
    [("tokens/s total", 2 * 131072), ("tokens/s/GPU", 2 * 16384), ("samples per second", 128)],
)
def test_times_that_contradict_each_other_are_refused(rate: str, value: int) -> None:
    """In one second the rate makes twice the 64 sequences that are printed."""
    beside = {"metric": rate, "value2": "1000", "metric2": "step time (ms)"}
    with pytest.raises(TooLittle, match=r"1000 and .* make 128 sequences of 2048 .* is 64"):
        plan(row(**beside, value=str(value)))
    assert plan(row(**beside, value=str(value * 0.52))).real_s == pytest.approx(1 / 1.04)
    plan(row(**beside, value=str(value), global_batch="", grad_accum="16"))
    plan(row(metric2="tokens/s total (k)", value2="999", metric3="block_step_time_s", value3="9"))


@pytest.mark.parametrize("cell", ["9670.0ms", "9670 ms", "9,670 msec", "9670 milliseconds", "9.67"])
def test_milliseconds_of_the_value_count(cell: str) -> None:
    assert plan(row(metric="step time", value=cell)).real_s == pytest.approx(9.67)
    assert plan(row(metric="iteration_time_ms", value="9670.0")).real_s == pytest.approx(9.67)


@pytest.mark.parametrize(
    ("changes", "peaks", "said"),
    [
        ({}, 1, "989.4 TFLOP/s, the bf16 peak"),
        ({"precision": "FP8"}, 2, "1978.8 TFLOP/s, the FP8 peak"),
        ({"precision": "FP8", "metric": "MFU of bf16 peak"}, 1, "the bf16 peak"),
        ({"metric": "MFU_fp8"}, 2, "the FP8 peak"),
        ({"precision": "FP8", "metric": "HFU"}, 2, "the FP8 peak"),
        ({"precision": "FP8", "gpu_type": "A100 80GB"}, 1, "the bf16 peak"),
    ],
)
def test_utilisation_is_of_the_peak_that_sources_divide_by(
    changes: dict[str, str], peaks: int, said: str
) -> None:
    """llm-foundry and dgxc-benchmarking divide by the FP8 peak where they run in FP8."""
    one = plan(row(**{"metric": "MFU", "value": "0.4"} | changes))
    share = one.flops / one.printed_s / one.node.peak_bf16_tflops / 1e12
    assert share == pytest.approx(0.4 * peaks)
    assert any(said in sentence for sentence in one.assumed)


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        *(("1,024", 1024), ("8.03B", 8.03e9), ("250k", 25e4), ("nan", None), ("inf", None)),
        *(("-3", None), ("n/a", None), ("", None), ("0", None), ("12 (of 24)", 12)),
    ],
)
def test_numbers(cell: str, value: float | None) -> None:
    assert number(cell) == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    ("name", "cell", "value"),
    [
        *(("gpus", "16K", 16384), ("gpus", "10k", 1e4), ("global_batch", "0.5M", 2**19)),
        *(("global_batch", "4 million", 2**22), ("global_batch", "3.2M", 32e5)),
        *(("global_batch", "4000000", 4e6), ("params", "4M", 4e6)),
        *(("global_batch", "1e305M", None), ("gpus", "1e309k", None)),
    ],
)
def test_rounded_powers_of_two(name: str, cell: str, value: float | None) -> None:
    """Thousands of GPUs and millions of tokens are; GPT-3's 3.2 million are none."""
    assert number(cell, name) == value


def test_a_row_that_prints_everything_assumes_nothing() -> None:
    one = plan(row())
    assert one.assumed == ()
    assert (one.parallelism.tp, one.parallelism.pp, one.parallelism.dp) == (2, 2, 2)
    assert one.fabric.nic_gbits_per_s == 400
    assert one.network_printed


def test_what_is_missing_is_assumed_and_said() -> None:
    names = ("recompute", "vpp", "sequence_parallel", "sharding", "flags", "interconnect", "vocab")
    one = plan(row(gpus="64", model="GPT", **dict.fromkeys(names, "")))
    text = "; ".join(one.assumed)
    for word in (
        "recompute",
        "vpp",
        "sequence parallel",
        "zero",
        "overlap",
        "fabric",
        "vocabulary",
    ):
        assert word in text
    assert {"recompute", "vpp", "sequence_parallel", "zero", "overlap"} <= one.open
    assert not one.network_printed


def test_the_printed_global_batch_is_trusted() -> None:
    """Data-parallel size follows from the GPUs, micro-batch and the rest from the batch."""
    one = plan(row(dp="7", micro_batch="3", grad_accum="5", global_batch="64"))
    p = one.parallelism
    assert (p.dp, p.global_batch, p.microbatch) == (2, 64, 4)  # 8 passes: 3 a pass are 11, not 16
    for said in ("dp 2, not 7", "8 micro-batches, not 5", "micro-batch 4, not 3"):
        assert said in " ".join(one.assumed)
    fewer = plan(row(tp="1", pp="1", cp="", gpus="64", global_batch="8")).parallelism
    assert (fewer.dp, fewer.cp, fewer.gpus) == (8, 8, 64)
    # but context parallelism that is printed, or would be over more GPUs than anyone's, is not made
    # up: a step lasts as long as its largest share
    for cp, gpus, batch in (("1", "64", "8"), ("", "512", "1100"), ("1", "512", "1100")):
        uneven = plan(row(tp="1", pp="1", cp=cp, gpus=gpus, global_batch=batch))
        p = uneven.parallelism
        assert (p.dp, p.cp) == (int(gpus), 1)
        assert 0 <= p.global_batch - int(batch) < p.dp
        assert uneven.real_s == plan(row()).real_s
    # nor is it where the sequence does not divide by it: 3 times 16 of 48 replicas
    thirds = plan(row(tp="1", pp="1", cp="", gpus="48", global_batch="16")).parallelism
    assert (thirds.dp, thirds.cp, thirds.global_batch) == (48, 1, 48)
    # nor where every replica has a sequence and more
    shares = plan(row(tp="1", pp="1", cp="", gpus="64", global_batch="100")).parallelism
    assert (shares.dp, shares.cp, shares.global_batch) == (64, 1, 128)


def test_printed_chunks_stay_where_the_schedule_here_has_other_multiples() -> None:
    words = {"tp": "1", "pp": "8", "layers": "32", "gpus": "8"}
    for batch, below, vpp in (("9", 8, 4), ("23", 16, 4), ("3", 8, 4), ("16", 16, 4)):
        one = plan(row(**words, vpp="4", global_batch=batch))
        assert (one.parallelism.vpp, one.parallelism.microbatches) == (vpp, below)
        assert one.microbatches == int(batch)
        assert one.flops == pytest.approx(one.model.step_flops(int(batch)) / 8)
    # of chunks that are not printed Megatron-Core takes fewer microbatches than stages for none
    assert plan(row(**words, vpp="", global_batch="3"), {"vpp": 4}).parallelism.vpp == 1
    assert plan(row(**words, vpp="", global_batch="9"), {"vpp": 4}).parallelism.vpp == 4


def test_stages_without_chunks_overlap_where_it_is_printed() -> None:
    """Many would gather their parameters one after another, which costs more than it hides."""
    words = {"tp": "1", "layers": "32", "gpus": "16", "vpp": "1", "global_batch": "32"}

    def overlaps(pp: str, flags: str = "") -> bool:
        return plan(row(**words, pp=pp, flags=flags)).parallelism.overlap

    assert not overlaps(pp="8")
    assert overlaps(pp="2")
    assert overlaps(pp="8", flags="overlap-grad-reduce")
    # and what would be taken otherwise is the other way
    other = plan(row(**words, pp="8", flags=""), {"overlap": False})
    assert (other.parallelism.overlap, "overlap" in other.open) == (True, True)


def test_racks_are_filled_with_powers_of_two() -> None:
    def gpus_of(**changes: str) -> int:
        return plan(row(gpu_type="NVIDIA GB200", pp="1", vpp="", **changes)).node.gpus

    assert gpus_of(gpus="64", tp="1") == 72
    assert gpus_of(gpus="128", tp="1") == 64
    assert gpus_of(gpus="144", tp="8", global_batch="144") == 72
    assert gpus_of(gpus="96", tp="1", global_batch="96") == 32
    assert gpus_of(gpus="132", tp="1", global_batch="132") == 44  # eleven trays of three racks
    assert gpus_of(gpus="80", tp="8", global_batch="80") == 40


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu_type": "abacus"}, "gpu_type 'abacus' is no known GPU"),
        ({"gpus": "nan"}, "gpus is not printed"),
        ({"gpus": "-8"}, "gpus '-8' is no number of GPUs"),
        ({"hidden": "", "model": "secret"}, "shape of model 'secret'"),
        ({"value": "fast"}, "metric 'step_time_s' with value 'fast'"),
        ({"metric": "happiness"}, "happiness"),
        ({"tp": "3"}, "does not divide 8 GPUs"),
        ({"global_batch": "", "grad_accum": ""}, "bubble"),
        ({"layers": "", "model": "other", "hidden": "4096"}, "number of layers"),
    ],
)
def test_too_little_says_what(changes: dict[str, str], words: str) -> None:
    with pytest.raises(TooLittle, match=words):
        plan(row(**changes))


def test_a_length_or_a_batch_that_is_not_printed_is_assumed() -> None:
    """And the other length is tried; four million tokens are the batch."""
    names = ("seq_len", "global_batch", "micro_batch", "grad_accum")
    one = plan(row(tp="1", pp="1", value="9", sequence_parallel="", **dict.fromkeys(names, "")))
    assert (one.model.seq_len, one.parallelism.global_batch) == (2048, 2048)
    assert "seq_len" in one.open
    other = plan(one.row, {"seq_len": 4096})
    assert (other.model.seq_len, other.parallelism.global_batch) == (4096, 1024)
    assert any("global batch" in sentence for sentence in one.assumed)
    same = plan(one.row, {"batch": "of a GPU"})  # what 256 GPUs have of four million tokens
    assert (same.parallelism.global_batch, "batch" in one.open) == (8 * 8, True)


def test_a_precision_that_is_not_printed_is_a_choice_where_the_gpu_has_it() -> None:
    assert not plan(row()).fp8
    assert plan(row(precision="fp8")).fp8
    blank = plan(row(precision=""))
    assert (blank.fp8, "precision" in blank.open) == (False, True)
    assert plan(blank.row, {"precision": "fp8"}).fp8
    assert "precision" not in plan(row(precision="", gpu_type="A100 80GB")).open


def test_overlap_by_the_optimizers_name() -> None:
    words = {"source": "alibaba/Megatron-LLaMA README.md", "tp": "1", "pp": "1"}
    assert not plan(row(flags="DistributedOptimizer", **words)).parallelism.overlap
    assert plan(row(flags="OverlappedDistributedOptimizer", **words)).parallelism.overlap


def test_sharding_words() -> None:
    def zero(**changes: str) -> int:
        return plan(row(tp="1", pp="1", sequence_parallel="", **changes)).parallelism.zero

    assert zero(sharding="FSDP FULL_SHARD") == 3
    assert zero(sharding="FSDP SHARD_GRAD_OP") == 2
    assert zero(sharding="FSDP2") == 3
    assert zero(sharding="FSDP=0") == 1
    assert zero(sharding="ZeRO-3") == 3
    assert zero(sharding="", notes="measured, Megatron-DeepSpeed") == 0
    # FSDP beside a pipeline keeps what it gathered, ZeRO-3 of others is taken at its word
    beside = plan(row(sharding="FSDP2", pp="2"))
    assert beside.parallelism.zero == 1
    assert any("FSDP beside a pipeline" in sentence for sentence in beside.assumed)
    assert plan(row(sharding="ZeRO-3", pp="2", vpp="1", gpus="16")).parallelism.zero == 3


def test_layers_that_stages_do_not_divide() -> None:
    """126 layers on 8 stages: the embedding and the head take the place of a layer each."""
    one = plan(row(value="9", layers="126", pp="4", tp="2", vpp="8", global_batch="64"))
    assert one.model.layers == 128
    assert one.parallelism.vpp == 8
    assert any("slots for 126 layers" in sentence for sentence in one.assumed)


def test_model_shapes_by_name_and_by_parameters() -> None:
    llama = named_shape("Llama 3.1 405b 24.09 BF16")
    assert llama is not None
    assert (llama.layers, llama.hidden) == (126, 16384)
    assert named_shape("MPT-7b") is None
    for name in ("GPT 175B (MegaScale)", "ViT-22B+GPT", "\u4e2d\u6587", "", "x" * 200):
        assert plan(row(model=name)).model.layers == 8
    solved = plan(
        row(layers="", params="8.03B", ffn_hidden="14336", vocab="128256", model="x llama")
    )
    assert solved.model.layers == 32


def test_names_as_tables_print_them() -> None:
    free = {"layers": "", "hidden": "", "heads": "", "kv_heads": "", "ffn_hidden": "", "vocab": ""}
    wide = {"value": "99", "gpus": "64", "global_batch": "1024"}
    for name, experts in (("DBRX", 16), ("Skywork\u2011MoE", 16), ("Llama\u20113\u20118B", 0)):
        assert plan(row(**free, **wide, model=name)).model.experts == experts
    with pytest.raises(TooLittle, match="neither printed nor known"):
        plan(row(**free, model="a small model"))


def test_a_cell_that_is_not_taken_is_named() -> None:
    one = plan(row(heads="7", kv_heads=""))
    assert "32 heads assumed, as 7 do not divide the hidden size 4096" in one.assumed
    chunks = plan(row(vpp="", layers="20", global_batch="128"), {"vpp": 6})
    assert [said for said in chunks.assumed if "vpp" in said] == ["vpp 5, not 6: 10 layers a stage"]


def test_a_paper_that_counts_recomputation_is_taken_at_its_word() -> None:
    """arXiv 2104.04473 counts by its eq. 3 and names heads of 96; others count the model's."""
    printed = {"metric": "TFLOP/s/GPU", "value": "100", "recompute": "full", "model": "GPT 1.7B"}
    printed |= {"hidden": "2304", "layers": "24", "heads": "", "kv_heads": "", "ffn_hidden": ""}
    printed |= {"vocab": "51200", "tp": "1", "pp": "1"}
    plain = plan(row(**printed))
    paper = plan(row(source="Narayanan et al. 2021 arXiv:2104.04473 Table 1", **printed))
    assert 1.28 < paper.real_s / plain.real_s < 4 / 3
    assert (plain.model.heads, plain.model.head_dim) == (24, 96)


def test_nodes_and_fabrics_from_their_words() -> None:
    def of(words: str) -> Any:
        node = node_of(words)
        assert node is not None
        return node

    assert of("A100 40GB").memory_gbytes_per_s == 1555
    assert of("H100 96GB HBM2e, 500W power cap").power_limit_w == 500
    assert of("H200 141GB (4 per node)").gpus == 4
    assert of("H200 141GB (4 per node)").mesh
    assert not of("H200 141GB").mesh
    assert of("NVIDIA Blackwell GPU (GB200)").gpus == 72
    assert of("NVIDIA Blackwell GPU (B200-SXM-180GB)") == load_node("hgx-b200")
    assert of("NVIDIA Blackwell Ultra GPU (B300-SXM-270GB)").memory_gib > 268
    assert of("NVIDIA Blackwell Ultra GPU (GB300)").gpus == 72
    assert of("AMD Instinct MI300X").gpu == "AMD Instinct MI300X"
    assert of("AMD Instinct MI325X").memory_gib == 256
    assert of("H100 80GB PCIe").peak_bf16_tflops < of("H100 80GB SXM").peak_bf16_tflops
    assert of("H20").peak_bf16_tflops == 148
    assert of("A100 80GB PCIe").scale_up_gbytes_per_s < of("A100 80GB SXM").scale_up_gbytes_per_s
    assert (of("H100 NVL 94GB").gpu, of("GH200").mesh) == ("H100 NVL", True)
    assert of("H100 NVLink") == of("H100 SXM") == of("H100 (a2 host)")
    assert of("H200 NVLink") == of("H200")
    assert of("H200NVL").peak_bf16_tflops == of("H200 NVL").peak_bf16_tflops
    for words in ("RTX PRO 6000 Blackwell", "RTX A6000 (Ampere)", "A30 (Ampere)", "GB10 Blackwell"):
        assert node_of(words) is None  # other chips than their architecture's large ones
    assert of("H10080GB") == of("H100 80GB")
    assert of("H100 (v2024)") == of("H100")
    for words in ("NVIDIA H1000", "B2000", "GH2000", "A1000 80GB", "MI3000X"):
        assert node_of(words) is None  # misprints
    assert node_of("") is None
    fabric, printed = fabric_of("4x Omni-Path 100Gb/s per node", load_node("dgx-a100"))
    assert (fabric.nic_gbits_per_s, fabric.ports_per_node, printed) == (100, 4, True)
    assert fabric_of("", load_node("dgx-a100"))[0].nic_gbits_per_s == 200
    for words, rate, ports in (
        ("8x H100, 400Gb/s per node", 50, None),  # GPUs are no ports: all of them together
        ("8x400Gb/s per node", 400, 8),
        ("NVLink 900 GB/s / InfiniBand 200Gb/s", 200, None),
        ("NVLink intra-node & 8x200Gb/s HDR per node", 200, 8),
        ("8x400Gb/s InfiniBand with NVLink", 400, None),
    ):
        fabric, printed = fabric_of(words, load_node("hgx-h100"))
        assert (fabric.nic_gbits_per_s, fabric.ports_per_node, printed) == (rate, ports, True)
    assert fabric_of("Storage: 2x 400Gb/s; 1x 100Gb/s", load_node("hgx-h100"))[1] is False


def test_sequences_of_many_gpus_are_no_tokens() -> None:
    """As many as replicas share are sequences, however many: sharded ones, and printed ones."""
    cells = {"gpus": "16384", "global_batch": "32768", "seq_len": "8192", "tp": "", "pp": ""}
    for more in ({"sharding": "FSDP"}, {"sharding": "", "dp": "16384"}):
        one = plan(row(**cells | {"vpp": ""} | more, value="20"))
        assert one.batch.printed == 32768
    few = {"gpus": "1024", "global_batch": "4194304", "sharding": "FSDP", "vpp": ""}
    assert plan(row(**cells | few)).batch.printed == 512  # 33 million tokens a GPU otherwise
    tokens = plan(row(**cells | {"vpp": "", "sharding": "FSDP", "global_batch": str(2**27)}))
    assert tokens.batch.printed == 2**27 // 8192


def test_early_software_had_no_context_parallelism() -> None:
    """Replicas beyond the batch have no sequence there, and share one elsewhere."""
    cells = {"tp": "8", "pp": "1", "cp": "", "vpp": "", "gpus": "256", "global_batch": "16"}
    late = plan(row(**cells)).parallelism
    early = plan(row(**cells, source="arXiv 2104.04473")).parallelism
    assert (late.dp, late.cp) == (16, 2)
    assert (early.dp, early.cp) == (32, 1)
