"""Words of recomputation, sharding, precision and encoders: understood, or said not to be."""

from dataclasses import replace

import pytest

from simulate.series.choices import shard_degree
from simulate.series.models import named_shape
from simulate.series.plan import plan
from tests.made_up_series import row


@pytest.mark.parametrize(
    ("cell", "recompute"),
    [
        *(("SAC", "selective"), ("selective per-op", "selective"), ("uniform", "full")),
        *(("block", "full"), ("activation checkpointing", "full"), ("Enabled", "full")),
        *(("full (README/paper)", "full"), ("yes", "full"), ("true", "full")),
        *(("no full recompute", "none"), ("None", "none"), ("none (fits)", "none"), ("no", "none")),
        *(("activation checkpointing: off", "none"), ("no full, selective", "selective")),
        *(
            ("disabled", "none"),
            ("0", "none"),
            ("without", "none"),
            ("selective, not full", "selective"),
        ),
        *((denied, "none") for denied in ("no activation checkpointing", "block, 0 layers")),
        *(("No gradient checkpointing", "none"), ("without activation checkpointing", "none")),
        *(("gradient checkpointing not used", "none"), ("full; no MLP", "full")),
    ],
)
def test_words_of_recomputation(cell: str, recompute: str) -> None:
    one = plan(row(recompute=cell))
    assert (one.parallelism.recompute, "recompute" in one.open) == (recompute, False)


@pytest.mark.parametrize("cell", ["1", "some of it", "MLP"])
def test_words_of_recomputation_that_are_not_understood(cell: str) -> None:
    one = plan(row(recompute=cell))
    assert "recompute" in one.open
    assert f"recompute '{cell}' not understood, taken as not printed" in one.assumed


@pytest.mark.parametrize(
    ("cell", "stage", "said"),
    [
        ("ZeRO++", 3, "zero++ as ZeRO-3, without what it does beside that"),
        ("DeepSpeed ZeRO-Infinity", 3, "zero-infinity as ZeRO-3, without what it does beside that"),
        (
            "hybrid-shard",
            3,
            "sharded over 8 of 32 replicas: ZeRO-3 over each group, gradients summed between them",
        ),
        ("GSPMD", 1, "sharding 'GSPMD' not understood, taken as not printed"),
    ],
)
def test_words_of_sharding(cell: str, stage: int, said: str) -> None:
    one = plan(row(sharding=cell, flags="", tp="1", pp="1", vpp="", gpus="32"))
    assert one.parallelism.zero == stage
    assert said in one.assumed


def test_words_of_precision() -> None:
    """8-bit floats are FP8; what other 8-bit numbers are is left open, not taken for bf16."""
    for cell in ("E4M3", "fp8_e5m2", "FP8 (hybrid)"):
        one = plan(row(precision=cell))
        assert (one.fp8, one.open) == (True, frozenset())
    for cell in ("int8", "8-bit"):
        one = plan(row(precision=cell))
        assert (one.fp8, one.open) == (False, {"precision"})
        assert f"precision '{cell}' not understood, taken as not printed" in one.assumed
        assert plan(row(precision=cell), {"precision": "fp8"}).fp8


@pytest.mark.parametrize(
    "cell",
    [
        "512",
        "512 (4M tokens)",
        "512 sequences (of 8192 tokens)",
        "4M tokens",
        "4M tokens (512 x 8k)",
        "512 x 8192",
        "512 seqs \u00d7 8k tokens",
    ],
)
def test_a_batch_of_sequences_with_its_tokens_in_brackets(cell: str) -> None:
    one = plan(row(global_batch=cell, seq_len="8192", tp="1", pp="1", gpus="64", value="10"))
    assert one.batch.printed == 512


@pytest.mark.parametrize(
    "said", ["not used", "is not enabled", "was disabled", ": not enabled", "is off", "unused"]
)
def test_what_is_denied_behind_its_name_is_denied(said: str) -> None:
    one = plan(row(flags=f"FP8 {said}; LoRA {said}; CUDA graphs {said}"))
    assert (one.fp8, one.row.lora, one.row.graphs) == (False, False, False)
    one = plan(row(sharding=f"FSDP {said}", tp="1", pp="1", vpp=""))
    assert one.parallelism.zero != 3


def test_a_word_is_not_denied_by_what_stands_in_another_clause() -> None:
    assert plan(row(flags="FP8, LoRA not used")).fp8
    assert plan(row(flags="FP8; activation offload is off")).fp8
    assert plan(row(precision="FP8: not blockwise, tensorwise")).fp8
    assert plan(row(flags="cuda_graphs is off by default, on here")).row.graphs
    assert plan(row(recompute="full: not selective")).parallelism.recompute == "full"


@pytest.mark.parametrize(
    ("flags", "taken", "left_open"),
    [
        ("--overlap-grad-reduce", True, False),
        ("overlap_grad_reduce=True", True, False),
        ("overlap_grad_reduce=False", False, False),
        ("no overlap", False, False),
        ("without communication overlap", False, False),
        ("tp_comm_overlap=False", True, True),
        ("no tp_comm_overlap", True, True),
        ("--overlap-grad-reduce; no overlap of P2P", True, False),
        ("no overlap of gradients", False, False),
        ("there is no overlap between stages", True, True),
        ("", True, True),
    ],
)
def test_words_of_overlap(flags: str, taken: bool, left_open: bool) -> None:
    one = plan(row(flags=flags))
    assert (one.parallelism.overlap, "overlap" in one.open) == (taken, left_open)


@pytest.mark.parametrize(
    ("cell", "stage", "degree"),
    [
        *(("Fully Sharded Data Parallel", 3, None), ("fully_sharded", 3, None)),
        *(("dp_shard=-1", 3, None), ("dp_shard=32, dp_replicate=1", 3, 32)),
        *(("HSDP (dp_replicate=2, dp_shard=16)", 3, 16), ("dp_shard 8, dp_replicate 4", 3, 8)),
        ("data_parallel_shard_degree=8", 3, 8),
        *(("no distributed optimizer", 0, None), ("use_distributed_optimizer=False", 0, None)),
        *(("without ZeRO", 0, None), ("distributed optimizer", 1, None)),
    ],
)
def test_other_words_of_sharding(cell: str, stage: int, degree: int | None) -> None:
    one = plan(row(sharding=cell, flags="", tp="1", pp="1", vpp="", gpus="32"))
    assert one.parallelism.zero == stage
    assert shard_degree(one.row, one.node) == degree
    assert not any("sharding" in said and "not understood" in said for said in one.assumed)


def test_an_encoder_in_front_of_a_model_is_more_of_its_layers() -> None:
    """GPT-3's layer has 12 * 12288**2 weights: 22 billion are 12 of them."""
    alone, both = (named_shape(name) for name in ("GPT-175B", "ViT-22B+GPT-175B MLLM (Optimus)"))
    assert alone is not None
    assert both == replace(alone, layers=96 + 12, source=both.source if both else "")
    assert both.source.endswith("and 12 layers for its encoder of 22 billion parameters")
    assert named_shape("ViT-22B + GPT-175B") == both
    # two groups of eight heads share keys, three matrices an MLP: 856 million weights a layer
    gated = named_shape("InternViT-6B+Llama-3-70B")
    assert gated is not None
    assert gated.layers == 80 + 7
    wide = named_shape("ViT-22B+qwen3-32b")  # heads of 128 values, 8192 of a width of 5120
    assert wide is not None
    assert (wide.layers, wide.qk_norm) == (64 + 45, True)
    unknown = ("GPT-175B+GPT-175B", "ViT-22B+MyLM", "ViT-22B+Mixtral-8x7B", "ViT-22B+", "+GPT-175B")
    hostile = ("ViT-0B+GPT-175B", f"ViT-{'9' * 320}b+GPT-175B", "ViT-22b+" * 1500 + "GPT-175B")
    assert not any(named_shape(name) for name in (*unknown, *hostile))


@pytest.mark.parametrize(("name", "normed"), [("Qwen3 8B", True), ("Qwen2.5-7B", False)])
def test_published_models_have_their_norms_of_queries_and_keys(name: str, normed: bool) -> None:
    shape = named_shape(name)
    assert shape is not None
    assert shape.qk_norm == normed
    cells = {"layers": "4", "hidden": "", "heads": "", "kv_heads": "", "ffn_hidden": ""}
    assert plan(row(model=name, vocab="", **cells, value="9")).model.qk_norm == normed
