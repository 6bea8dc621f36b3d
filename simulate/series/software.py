"""What the software behind a published row does otherwise than Megatron-Core, by its words.

The step that is simulated is Megatron-Core's. Each rule here is what other software is documented
to do, cited; none was fitted.
"""

import re

from simulate.hardware.graphs import UPDATE_TIMES, UPDATES, with_graphs
from simulate.hardware.transfer import with_points
from simulate.series.rows import SeriesRow, says
from spec.calibration import Calibration
from spec.collective import Widths
from spec.fitted import changed
from spec.model import ModelSpec
from spec.parallelism import Parallelism

# Native tensor parallelism of PyTorch: every collective is waited for.
_DTENSOR = re.compile(r"torchtitan|kempnerforge|nanotron|dtensor")
# A product and its collective cut in pieces, by Transformer Engine or by PyTorch.
_PIECES, _ASYNC = r"tp[-_]comm[-_]overl", r"async[-_ ]?tp"
# Weight gradients are added to the fp32 ones inside the product: `gradient_accumulation_fusion`,
# default in Megatron-LM since end of 2021 where Apex or Transformer Engine is installed.
_FUSES = re.compile(r"megatron|nemo|2205\.05198|dgxc|mlcommons")
# llm-foundry's benchmarks, whose attention is FlashAttention's first version in Triton.
_TRITON = re.compile(r"llm-foundry")
# Its second version, by PyTorch or by flash-attn; `.attention` says where that stands.
_SECOND = re.compile(r"torchtitan|fms-fsdp|nanotron")
# NVIDIA's recipes in NeMo; MaxText's and PaxML's stand in the same tables.
_DGXC, _OTHER_DGXC = re.compile(r"dgxc-benchmarking"), re.compile(r"maxtext|paxml")
_NEMO_2 = re.compile(r"dgxc:v(25\.(0[4-9]|1)|2[6-9])")

# All experts of a GPU in one grouped product: `moe_grouped_gemm`, true in the mixtures of NeMo and
# Megatron-Bridge, and torchtitan's `use_grouped_mm`.
_GROUPED = re.compile(r"nemo|megatron[-_ ]bridge|dgxc|torchtitan")

# At most, of what is one fused kernel in a captured graph: NVIDIA has 1.3 us of device time a node
# ("Constant time launch for straight-line CUDA graphs", 2024), short kernels of an H200's graphs
# take 1.1 to 2.7 each (benchmarks/graphs.csv).
GRAPH_LAUNCH_US = 1.5


def replayed(calibration: Calibration) -> Calibration:
    """The calibration where passes are replayed from captured graphs, not issued by the host.

    What the host does once a step stays: both of NVIDIA's graphs, of layers and of a whole
    iteration (Megatron-Core's `cuda_graph_scope`), end before the optimizer, and those of layers
    leave it the buckets of gradients. What ours runs as several kernels is one there.
    """
    graphs = with_graphs(calibration, UPDATE_TIMES | {"bucket_us"})
    kernels = []
    for queued, captured in zip(calibration.kernels, graphs.kernels, strict=True):
        if queued.tflops or queued.op in UPDATES:
            kernels.append(captured)
        else:
            launch_us = min(queued.launch_us, GRAPH_LAUNCH_US)
            kernels.append(with_points(queued, changed(captured, launch_us=launch_us)))
    return changed(graphs, kernels=tuple(kernels))


def grouped_experts(row: SeriesRow, model: ModelSpec, p: Parallelism) -> int:
    """How many experts of a GPU its host issues as one; 1 where they run one after another."""
    return max(model.experts // p.ep, 1) if _GROUPED.search(row.words) else 1


def with_joint_updates(calibration: Calibration) -> Calibration:
    """The calibration where one kernel clips or updates many tensors, and one norm is read back.

    Apex's and Transformer Engine's `multi_tensor_applier`, which Megatron-Core takes where they are
    installed (`optimizer/clip_grads.py`), and PyTorch's foreach and fused updates elsewhere.
    """
    return changed(calibration, host=changed(calibration.host, tensor_us=0.0))


def flash_attention(row: SeriesRow) -> int:
    """The version of FlashAttention that attention is, see `.attention`; 0: what is measured."""
    if _TRITON.search(row.words):
        return 1
    return 2 if _SECOND.search(row.words) and not row.amd else 0


def fused_gradients(row: SeriesRow) -> bool:
    """Whether products add weight gradients up themselves, so that no kernel of its own does."""
    return bool(_FUSES.search(row.words)) and not _of_2021(row) and not row.amd


def fused_biases(row: SeriesRow) -> bool:
    """Whether biases are added within other kernels, so that no kernel of its own does.

    Megatron-LM's `bias_gelu_fusion` and `bias_dropout_fusion`, on by default since 2020; queries'
    and keys' with Transformer Engine within the product, and taken to be so before.
    """
    return bool(_FUSES.search(row.words)) or _of_2021(row)


def _in_pieces(row: SeriesRow) -> bool:
    """Whether its words say so; a source's file may be named so for the rows beside such ones."""
    own = " ".join(row.text(name) for name in ("model", "sharding", "flags", "notes")).lower()
    return says(_PIECES, row.words) or says(_ASYNC, own)


def waits_for_all(row: SeriesRow) -> bool:
    """Whether tensor-parallel communication has no product beside it, so that it slows none."""
    waits = _DTENSOR.search(row.words) or _of_2021(row)
    return bool(waits) and not _in_pieces(row)


def _of_2021(row: SeriesRow) -> bool:
    """Megatron-LM before it reduced the input's gradient beside the weight's (v2.6, end of 2021).

    Korthikanti et al.'s is the next year's.
    """
    return row.early and "2205.05198" not in row.words


def _recipe(row: SeriesRow) -> bool:
    """Whether a row is one of dgxc-benchmarking's recipes in NeMo."""
    return bool(_DGXC.search(row.words)) and not _OTHER_DGXC.search(row.words)


def tensor_exposure(
    row: SeriesRow, p: Parallelism, exposed_us: tuple[float, float], hidden_us: float
) -> float:
    """By how much exposed tensor-parallel communication is longer than Megatron-Core's.

    `exposed_us` is the latter's in the forward pass (again under recomputation) and in the
    backward pass, `hidden_us` what it sends beside products.

    - Transformer Engine's `tp_comm_overlap` and PyTorch's asynchronous tensor parallelism cut a
      product and its collective in as many pieces as ranks: all but one are sent beside products.
    - PyTorch's native one waits for all. Where queries, keys, values, gate and up projection each
      gather their own input (KempnerForge, distributed/tensor_parallel.py) five gathers, and five
      scatters of gradients, stand where Megatron-Core has two.
    - Megatron-LM before 2022 waited for all, too.
    """
    forward, backward = exposed_us
    whole = forward + backward
    if p.tp == 1 or not whole:
        return 1.0
    if _in_pieces(row) or (_recipe(row) and not row.lora and p.ep == 1):
        return 1 / p.tp
    if re.search(r"kempnerforge", row.words) and p.sequence_parallel:
        return ((forward * (5 + 2) / (2 + 2)) + backward * (5 + 2) / 2) / whole
    if _DTENSOR.search(row.words) and p.sequence_parallel:
        return (whole + hidden_us / 2) / whole  # the gathered input is kept, not gathered again
    if waits_for_all(row):
        return (whole + hidden_us) / whole
    return 1.0


def sent_widths(row: SeriesRow, model: ModelSpec, fp8: bool) -> Widths:
    """What a row's software sends of gradients and parameters, over fp32 and bf16.

    - Gradients of 16 bits: Megatron-LM before 2022, where it trained in fp16; NVIDIA's MLPerf
      submissions (`grad_sync_dtype: bf16` of gpt3, `grad_reduce_in_fp32=False` of the others);
      NeMo 2's performance recipes, which dgxc-benchmarking runs since 25.04 (NeMo 1 has fp32);
      `PURE` mixed precision of Composer's FSDP.
    - Parameters of 8 bits, where layers run in FP8: `fp8_params` of dgxc-benchmarking,
      `FP8_PARAM_GATHER` of MLPerf's since v5.1, off with FP4. Tables stay in bf16.
    """
    halves = row.early and "fp16" in row.text("precision").lower()
    halves |= re.search(r"mp_mode=pure", row.words) is not None
    eighths = False
    if row.mlperf and not row.amd:
        halves = True
        eighths = row.mlperf >= 5.1 and "fp4" not in row.text("flags").lower()
    elif _recipe(row):
        halves = _NEMO_2.search(row.pair_id.lower()) is not None and "nemo_mega" not in row.words
        eighths = True
    parameters = 1.0
    if eighths and fp8:
        tables = model.embedding_parameters() + model.head_parameters()
        parameters = (1 + tables / model.parameters()) / 2
    return Widths(0.5 if halves else 1.0, parameters)
