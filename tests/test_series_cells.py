"""Cells as people write them: numbers, metrics, words and names of published rows."""

import pytest

from simulate.series.choices import Filling, sequence, zero
from simulate.series.metric_names import metric_kind
from simulate.series.metrics import metric_of
from simulate.series.models import is_mixture, named_shape
from simulate.series.plan import plan
from simulate.series.rows import TooLittle, number, whole
from tests.made_up_series import WHOLE, row


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("5600 (5450)", 5600),
        ("~5600", 5600),
        ("\u2248 5,600*", 5600),
        ("38.5%", 38.5),
        ("10.0s", 10),
        ("10.0 \u00b1 0.2", 10),
        ("10.0 +/- 0.2 s", 10),
        ("5600 tokens/s/GPU", 5600),
        ("<70 billion params", 7e10),
        ("8.03B", 8.03e9),
        ("2k", 2000),
        ("3,0", None),
        ("12,34", None),
        ("1/2", None),
        ("10-12", None),
        ("10 minutes", None),
        ("+5", 5),
        ("5600 [1]", 5600),
        ("nan", None),
        ("\u2014", None),
        ("8 nodes", None),
        ("fp8", None),
        *(("1 000", 1000), ("1\u202f000", 1000), ("12 345 678.5 tokens", 12345678.5)),
        *(("1000\u2020", 1000), ("1000-1100", None), ("1000 1100", None), ("1 00", None)),
    ],
)
def test_the_first_number_of_a_cell_counts(cell: str, value: float | None) -> None:
    """What stands around it is dropped where it cannot change it, else the cell is not read."""
    assert number(cell) == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    ("name", "cell", "value"),
    [
        ("tp", "TP8", 8),
        ("tp", "tp=8", 8),
        ("tp", "8 (intra-node)", 8),
        ("tp", "TP-8", 8),
        ("tp", "-8", None),
        ("tp", "PP8", None),
        ("global_batch", "4.1k", 4100),
        ("global_batch", "2 per GPU", None),
        ("global_batch", "16/GPU", None),
        ("gpus", "64 (8 per node)", 64),
        ("global_batch", "768 seqs", 768),
        ("gpus", "1024 GPUs", 1024),
        ("gpus", "128x8", 1024),
        ("tp", "128x8", None),
        ("seq_len", "4k", 4096),
        ("global_batch", "4k", 4000),
        ("layers", "3.5", None),
    ],
)
def test_whole_numbers_go_by_their_column(name: str, cell: str, value: int | None) -> None:
    """Its name may stand before them, a k is 1,024 in a length, GPUs may be a product."""
    assert whole(cell, name) == value
    assert row(**{name: cell}).whole(name) == value


def test_what_is_not_understood_is_said() -> None:
    """Among what is assumed, or in the reason; not of what counts as not printed."""
    said = "vpp 'xyz' not understood, taken as not printed"
    assert said in plan(row(vpp="xyz")).assumed
    assert not any("understood" in one for one in plan(row(vpp="n/a", cp="-1", ep="0")).assumed)
    with pytest.raises(TooLittle, match="gpus '3,0' not understood"):
        plan(row(gpus="3,0"))


def test_a_batch_in_tokens_is_divided_by_the_length() -> None:
    """Where its cell says tokens, or as many sequences would be too much for any step."""
    for text in ("4194304", "131072 tokens"):
        one = plan(row(global_batch=text, value="60"))
        assert one.parallelism.global_batch == int(text.split()[0]) // int(WHOLE["seq_len"])
        assert any("is in tokens" in said for said in one.assumed)
    assert plan(row(global_batch="4096", value="60")).parallelism.global_batch == 4096


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("TFLOPS per GPU", "model"),
        ("TFLOP/s per device", "model"),
        ("elapsed time per iteration (ms)", "step"),
        ("avg step time (s)", "step"),
        ("sec/iter", "step"),
        ("tokens/sec/device", "tokens"),
        ("tok/s/GPU", "tokens"),
        ("TGS", "tokens"),
        ("sec per step", "step"),
        ("time/step (s)", "step"),
        ("global tokens/s", "tokens_total"),
        ("train_step_timing in s", "step"),
        ("tokens/GPU/s", "tokens"),
        ("tokens per second per GPU", "tokens"),
        ("total tokens/s", "tokens_total"),
        ("samples/s/GPU", "samples_gpu"),
        ("tokens/s total (k)", None),
        ("tokens/s/GPU (k)", None),
        ("block_step_time_s", None),
        ("step time (min)", None),
        ("secs/iter", "step"),
        ("s/it", "step"),
        *(("steps/s", "steps"), ("it/s", "steps"), ("iterations per second", "steps")),
        ("Throughput (tokens/s/GPU)", "tokens"),
        ("throughput per GPU (tokens/s)", "tokens"),
        ("training throughput [samples/s]", "samples"),
        *(("tokens/s/node", "tokens_node"), ("samples/node/s", "samples_node")),
        ("teraFLOP/s/GPU", "model"),
        *(("aggregate TFLOP/s", "model_total"), ("total PFLOPS", "model_total")),
        ("tokens/day", "tokens_total"),
        *((odd, None) for odd in ("tokens/day/GPU", "PFLOP/s", "TFLOPS", "peak tokens/s/GPU")),
        *((odd, None) for odd in ("total training TFLOPs", "Total compute (PFLOP/s-days)")),
        *((odd, None) for odd in ("steps/s/GPU", "aggregate TFLOP/s/GPU", "days for 300B tokens")),
        *((odd, None) for odd in ("step_time_min", "iteration time [min]")),
    ],
)
def test_metrics_by_the_names_that_logs_give_them(name: str, kind: str | None) -> None:
    """Thousands, minutes and a block's time are other metrics."""
    assert metric_kind(name) == kind


def test_a_metrics_unit_may_stand_in_its_cell() -> None:
    """Milliseconds and per cent, and a GPU's samples are its share of the batch."""
    found = metric_of(row(value="850 ms"))
    assert found is not None
    assert found.value * found.unit == pytest.approx(0.85)
    found = metric_of(row(metric="MFU", value="0.5%"))
    assert found is not None
    assert found.unit == 0.01
    log = row(metric="elapsed time per iteration (ms)", value="1000.0")
    assert plan(log).real_s == pytest.approx(1.0)
    each = plan(row(metric="samples/s/GPU", value="8"))
    assert each.real_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"notes": "full training; no LoRA"},
        {"flags": "lora=none"},
        {"notes": "explorations"},
        {"precision": "bf16 (no fp8)"},
        {"flags": "fp8=False"},
        {"flags": "FP8_DPA=0"},
        {"precision": "bf16, FP8 off"},
        {"flags": "no cuda_graph"},
        {"flags": "LAYER_CUDA_GRAPH=0", "source": "mlcommons/training_results_v5.0 NVIDIA"},
    ],
)
def test_denied_words_are_not_meant(changes: dict[str, str]) -> None:
    """After no, not, without, than, vs, or set to 0, false, off, none."""
    one = row(**changes)
    assert (one.lora, one.fp8, one.graphs) == (False, False, False)


def test_other_words_are_meant() -> None:
    """A word counts where one of its places is not denied."""
    assert row(notes="llama2_70b_lora; rank 16").lora
    assert row(precision="FP8/FP4 see config").fp8
    assert row(flags="fp8=False; MXFP8").fp8
    assert row(flags="TP_COMM_OVERLAP;LAYER_CUDA_GRAPH").graphs
    assert "overlap" not in plan(row(flags="--overlap-grad-reduce")).open
    off = plan(row(flags="--overlap-grad-reduce=False"))
    assert ("overlap" in off.open, off.parallelism.overlap) == (False, False)


@pytest.mark.parametrize(
    ("changes", "stage"),
    [
        ({"sharding": "NO_SHARD"}, 0),
        ({"sharding": "FSDP NO_SHARD"}, 0),
        ({"sharding": "DDP", "notes": "FSDP is slower"}, 0),
        ({"sharding": "ZeRO stage 3"}, 3),
        ({"sharding": "ZeRO 3"}, 3),
        ({"sharding": "Stage 3"}, 3),
        ({"sharding": "DeepSpeed stage 3"}, 3),
        ({"sharding": "ZeRO-0"}, 0),
        ({"sharding": "ZeRO 2"}, 2),
        ({"sharding": "ZeRO-1", "notes": "faster than ZeRO-3", "flags": "FSDP"}, 1),
        ({"sharding": "", "flags": "zero_stage=3", "notes": "ZeRO-1"}, 3),
        ({"sharding": "", "flags": "", "notes": "ZeRO-3", "pp": "1"}, 3),
        ({"sharding": "", "flags": "", "notes": "ZeRO-3"}, 1),
        ({"sharding": "", "flags": "", "notes": "faster than ZeRO-3", "pp": "1"}, 1),
        ({"sharding": "", "flags": "compile", "notes": "ZeRO-3", "pp": "1"}, 1),
        ({"sharding": "FSDP=0"}, 1),
        ({"sharding": "FSDP=1"}, 1),
        ({"sharding": "FSDP=64 (0)", "pp": "1"}, 3),
        ({"sharding": "FSDP=64 (0)"}, 1),  # beside a pipeline, of PyTorch's
        ({"sharding": "FSDP=64 (0)", "source": "NVIDIA/Megatron-Bridge"}, 3),
    ],
)
def test_the_cell_of_sharding_counts_before_all_others(changes: dict[str, str], stage: int) -> None:
    """Then flags; notes and source where both are empty, and not as ZeRO-3 of a pipeline."""
    assert zero(Filling(row(**changes), {})) == stage


def test_sequence_parallelism_has_its_own_cell() -> None:
    """That of recomputation names it by one word only."""
    for cells, expected in (
        ({"sequence_parallel": "no", "recompute": "yes"}, False),
        ({"sequence_parallel": "", "recompute": "no"}, True),
        ({"sequence_parallel": "", "recompute": "selective+seqpar"}, True),
        ({"sequence_parallel": "false", "recompute": "selective+seqpar"}, False),
        ({"sequence_parallel": "disabled"}, False),
        ({"sequence_parallel": "not enabled"}, False),
        ({"sequence_parallel": "N"}, False),
        ({"sequence_parallel": "Enabled"}, True),
    ):
        assert sequence(Filling(row(**cells), {})) is expected, cells
    fill = Filling(row(sequence_parallel="", recompute="on"), {})
    assert (sequence(fill), fill.open) == (True, {"sequence_parallel"})


@pytest.mark.parametrize("precision", ["fp32", "TF32", "fp32 (no amp)"])
def test_products_in_32_bits_are_refused(precision: str) -> None:
    """They are not bf16's."""
    with pytest.raises(TooLittle, match="32 bits"):
        plan(row(precision=precision))
    assert plan(row(precision="bf16 with fp32 accumulation"))


@pytest.mark.parametrize(
    "name",
    [
        "DeepSeekV4 Flash",
        "DeepSeek_V3.2 671B",
        "DeepSeek V3 16B",
        "Qwen3 235B",
        "Llama 4 Maverick (400B, 128 experts)",
    ],
)
def test_mixtures_that_a_name_does_not_spell_out(name: str) -> None:
    """Their experts are not known, and dense models they are not."""
    assert is_mixture(name)
    with pytest.raises(TooLittle, match="experts"):
        plan(row(model=name))


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("GPT 35B", None),
        ("GPT3 5B", 4096),
        ("Paxml GPT5B FP8", 4096),
        ("NeMo Megatron GPT 20B", None),
        ("NeMo Megatron 175B", 12288),
        ("NeMo Megatron 24.11 BF16", 12288),
        ("grok-10", None),
        ("Grok 1.5", None),
        ("Grok 1 314b", 6144),
        ("Yi 34B", 7168),  # shapes that come with the project
        ("Falcon-180B (FSDP)", 14848),
        ("Llama-3.2-3B", 3072),
        ("Qwen 2.5 0.5B", 896),
        ("GPT-2 XL", 1600),
        ("the tiny one", None),
    ],
)
def test_names_that_begin_like_others(name: str, hidden: int | None) -> None:
    """A longer number is another model's."""
    shape = named_shape(name)
    assert (shape.hidden if shape else None) == hidden


def test_cells_and_parameters_have_to_agree() -> None:
    """Where no name says the shape: whatever of it they leave open, and not by the name's own."""
    cells = {"model": "MyLM-70B", "layers": "32", "kv_heads": "", "ffn_hidden": "", "vocab": ""}
    for params in ("7B", "6.7", "5.6B", "8.9B", "", "7"):
        assert plan(row(**cells, params=params)).model.hidden == 4096
    for params in ("70B", "4B", "355B"):
        with pytest.raises(
            TooLittle, match=f"params {params} is not the 6.66 billion of 32 layers"
        ):
            plan(row(**cells, params=params))
    wide = plan(row(**cells, params="12B", value="9")).model  # 32 * (4 + 2 * 9) * 4096**2
    assert wide.ffn_hidden == pytest.approx(9 * 4096, rel=0.03)
    by_count = [
        plan(row(**cells | {"layers": ""}, params=params)).model.layers for params in ("8", "8B")
    ]
    assert by_count == [40, 40]
    gated = cells | {"ffn_hidden": "16384", "kv_heads": "32", "vocab": "50257"}
    assert plan(row(**gated, params="9B")).model.layers == 32


def test_a_name_and_its_parameters_have_to_agree() -> None:
    """Within 20 %, with the published shape or, where cells change it, with theirs."""
    named = dict.fromkeys(("layers", "hidden", "heads", "ffn_hidden", "vocab", "kv_heads"), "")
    named |= {"model": "Llama 3 8B"}
    assert plan(row(**named, params="8.5B")).model.layers == 32
    assert plan(row(**named, params="8")).model.layers == 32
    assert plan(row(**named | {"layers": "8"}, params="8B")).model.layers == 8
    assert plan(row(**named | {"layers": "8"}, params="2.8B")).model.layers == 8
    with pytest.raises(TooLittle, match="params 13B is not the 8"):
        plan(row(**named, params="13B"))


@pytest.mark.parametrize(
    ("model", "gated"),
    [
        ("Llama 3.2 1B", True),
        ("Gemma 2 9B", True),
        ("OLMo-1B", True),
        ("GPT 1B", False),
        ("GPT 7B (Llama tokenizer)", False),
    ],
)
def test_an_mlp_four_times_as_wide_has_gates_where_its_family_has(model: str, gated: bool) -> None:
    one = plan(row(model=model, layers="16", hidden="2048", heads="32", ffn_hidden="8192"))
    assert one.model.gated == gated


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("TFLOP/s/GPU (hardware incl. recompute)", "hardware"),
        ("TFLOP/s/GPU (including recomputation)", "hardware"),
        ("HFU TFLOP/s/GPU", "hardware"),
        ("HW TFLOP/s/GPU", "hardware"),
        ("TFLOP/s/GPU (model FLOPs, excluding recompute)", "model"),
        ("model TFLOP/s/GPU, w/o recomputation", "model"),
        ("TFLOP/s/GPU (no recompute counted)", "model"),
        ("TFLOP/s/GPU (recompute not included)", "model"),
        ("TFLOPS/GPU, selective recomputation", "model"),
        ("model TFLOP/s/GPU (HFU in notes)", "model"),
        ("TFLOPS/GPU (no bubbles with recompute)", "hardware"),
    ],
)
def test_whether_a_metrics_flops_count_recomputation(name: str, kind: str) -> None:
    assert metric_kind(name) == kind


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "Acme 40B", "num_experts": "8", "top_k": "2"},
        {"model": "Llama 3 8B upcycled, 8 experts"},
        {"model": "Llama 3 8B E8T2"},
        {"model": "Llama 3 8B", "ep": "8"},
    ],
)
def test_a_mixture_is_not_read_as_a_dense_model(changes: dict[str, str]) -> None:
    with pytest.raises(TooLittle, match="are not known"):
        plan(row(**changes))
    assert not plan(row(num_experts="1", experts="none")).model.experts
    for dense in ("expert-tuned Llama 3 8B", "Llama 3 8B (dense, MoE baseline)"):
        assert not plan(row(model=dense)).model.experts


def test_experts_are_as_wide_as_published_beside_a_dense_layers_width() -> None:
    cells = {"model": "Qwen3-30B-A3B", "layers": "48", "hidden": "2048", "heads": "32"}
    cells |= {"kv_heads": "4", "vocab": "151936", "ep": "2", "params": "30.5B", "value": "9"}
    one, other = (plan(row(**cells, ffn_hidden=width)) for width in ("6144", "768"))
    assert one.model == other.model
    assert "experts of width 768, not 6144" in one.assumed


CONFIGURATION = "results/x.txt ; config /nemo/config_GB300_18x4x1xtp1pp1cp8.sh"


@pytest.mark.parametrize(
    ("changes", "split"),
    [
        ({}, {"tp": 1, "pp": 1, "cp": 8}),
        (
            {"source_locator": CONFIGURATION.replace(".sh", "_8b_fp4.sh")},
            {"tp": 1, "pp": 1, "cp": 8},
        ),
        ({"tp": "2"}, {}),  # what a row prints counts
        ({"cp": "8"}, {}),
        ({"grad_accum": "2"}, {}),  # of one sequence
        ({"grad_accum": "1"}, {"tp": 1, "pp": 1, "cp": 8}),
        ({"gpus": "64"}, {}),  # another row's
        ({"global_batch": "18"}, {}),
        ({"source_locator": CONFIGURATION.replace("tp1", "tp5")}, {}),
        ({"source_locator": CONFIGURATION.replace("tp1", "tp0")}, {}),
        ({"source_locator": "line 5"}, {}),
    ],
)
def test_a_configurations_name_says_how_it_is_split(
    changes: dict[str, str], split: dict[str, int]
) -> None:
    cells = {"gpus": "72", "global_batch": "9", "tp": "", "pp": "", "cp": ""}
    one = row(**{**cells, "source_locator": CONFIGURATION, **changes})
    assert one.named_split == split
