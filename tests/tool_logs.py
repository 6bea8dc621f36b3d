"""Texts as nccl-tests and Megatron-LM print them, and their import."""

from pathlib import Path

import pytest

from measure.imports import main
from spec.command import run
from spec.results import ResultSet, find_result_sets

HEADER = """\
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""  # noqa: E501 - as printed
# 2 nodes of 2; the bus bandwidth of an all-reduce over 4 ranks is 1.5 bytes / time
ALL_REDUCE = f"""\
# nccl-tests version 2.17.6 nccl-headers=22807 nccl-library=22807
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 1 minBytes 8 maxBytes 67108864 step: 8(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid   6899 on node-a device  0 [0000:04:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   6900 on node-a device  1 [0000:05:00] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid   6901 on node-b device  0 [0000:04:00] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid   6902 on node-b device  1 [0000:05:00] NVIDIA H100 80GB HBM3
#
{HEADER}\
           0             0     float     sum      -1     0.18    0.00    0.00      0     0.18    0.00    0.00      0
        1024           256     float     sum      -1    23.00    0.04    0.07      0    22.80    0.04    0.07      0
     1048576        262144     float     sum      -1    50.00   20.97   31.46      0    49.00   21.40   32.10      0
    67108864      16777216     float     sum      -1   1000.0   67.11  100.66      0   999.00   67.18  100.76      0
    67108864      16777216     float     sum      -1   1010.0   66.44   99.67      7   999.00   67.18  100.76      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 44.1
"""  # noqa: E501 - as printed
# as older versions print it: no name, no groups, and the largest error in place of a count
ALL_TO_ALL = f"""\
# nThread 1 nGpus 4 minBytes 65536 maxBytes 65536 step: 2(factor) warmup iters: 5 iters: 50 validation: 1
#   Rank  0 Pid  1234 on node-a device  0 [0x07] NVIDIA A100-SXM4-40GB
#   Rank  1 Pid  1234 on node-a device  1 [0x0a] NVIDIA A100-SXM4-40GB
#   Rank  2 Pid  1234 on node-a device  2 [0x47] NVIDIA A100-SXM4-40GB
#   Rank  3 Pid  1234 on node-a device  3 [0x4d] NVIDIA A100-SXM4-40GB
{HEADER.replace("#wrong", " error")}\
       65536          4096  bfloat16    none      -1    30.00    2.18    1.64  0e+00    30.00    2.18    1.64    N/A
"""  # noqa: E501 - as printed


def imported(tmp_path: Path, *words: str) -> ResultSet:
    out = tmp_path / "results"
    assert run(main, [*words, "--system", "cluster", "--out", str(out)]) == 0
    (found,) = find_result_sets(out)
    return found


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], *asked: str) -> str:
    """The complaint about a tool's text; nothing is written."""
    tool, text, *more = asked
    out = tmp_path / "out"
    words = [tool, write(tmp_path, text), "--system", "x", "--out", str(out), *more]
    assert run(main, words) == 2
    assert not out.exists()
    return capsys.readouterr().err


def write(tmp_path: Path, text: str, name: str = "out.txt") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


LOG = """\
using world size: 16, data-parallel size: 4, tensor-model-parallel size: 2, pipeline-model-parallel size: 2
------------------------ arguments ------------------------
  add_bias_linear ................................. False
  bf16 ............................................ True
  ffn_hidden_size ................................. 14336
  global_batch_size ............................... 128
  group_query_attention ........................... True
  hidden_size ..................................... 4096
  kv_channels ..................................... 128
  micro_batch_size ................................ 1
  normalization ................................... RMSNorm
  num_attention_heads ............................. 32
  num_experts ..................................... None
  num_layers ...................................... 32
  num_query_groups ................................ 8
  overlap_grad_reduce ............................. True
  padded_vocab_size ............................... None
  pipeline_model_parallel_size .................... 2
  position_embedding_type ......................... rope
  recompute_granularity ........................... None
  seq_length ...................................... 2048
  sequence_parallel ............................... True
  swiglu .......................................... True
  tensor_model_parallel_size ...................... 2
  transformer_impl ................................ transformer_engine
  untie_embeddings_and_output_weights ............. True
  use_distributed_optimizer ....................... True
  virtual_pipeline_model_parallel_size ............ None
  world_size ...................................... 16
-------------------- end of arguments ---------------------
 > padded vocab (size: 128256) with 0 dummy tokens (new size: 128256)
[default15]: [2025-05-27 15:23:07] iteration        1/      10 | consumed samples:          128 | elapsed time per iteration (ms): 30000.0 | learning rate: 1.5E-06 | global batch size:   128 | lm loss: 1.192634E+01 | loss scale: 1.0 | grad norm: 5.960 | number of skipped iterations:   0 | number of nan iterations:   0 |
[Rank 0] (after 1 iterations) memory (MB) | allocated: 20000.0 | max allocated: 40960.0 | reserved: 43000.0 | max reserved: 51200.0
"""  # noqa: E501 - as printed
LINE = (
    " [2025-05-27 15:24:07] iteration {:8d}/      10 | consumed samples:  128 | elapsed time per "
    "iteration (ms): {:.1f} | throughput per GPU (TFLOP/s/GPU): 400.4 | energy per GPU "
    "(J/iter/GPU): 1500.0 | power per GPU (W/GPU): 600.0 | global batch size: {:5d} | "
    "lm loss: 1.1E+01 | number of skipped iterations:   {} | number of nan iterations:   0 |\n"
)
TIMES = (2600.0, 2500.0, 2520.0, 2480.0, 2510.0)


def log(**changes: str) -> str:
    text = LOG + "".join(LINE.format(n + 2, time, 128, 0) for n, time in enumerate(TIMES))
    for name, value in changes.items():
        lines = text.splitlines(keepends=True)
        text = "".join(
            f"  {name} ......... {value}\n" if line.startswith(f"  {name} ") else line
            for line in lines
        )
    return text
