"""Megatron-Core's buckets: which gradients are reduced, and parameters gathered, together."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import LATEST, end_parameters, layer_parameters


def bucket_parameters(p: Parallelism) -> int:
    """Parameters that fill a bucket of Megatron-Core's DistributedDataParallel.

    Source: 0.16's `distributed/distributed_data_parallel.py`, the default `bucket_size`.
    """
    return max(40_000_000, 1_000_000 * p.dp)


class Bucket(NamedTuple):
    """Gradients that are reduced, or parameters that are gathered, together."""

    parameters: int
    ready: float  # share of its chunk's layers that a backward pass is through when it is full


@lru_cache(maxsize=LATEST)
def gradient_buckets(
    model: ModelSpec, p: Parallelism, stage: int, full: int | None = None
) -> tuple[Bucket, ...]:
    """The buckets of `stage`'s first model chunk, in the order that a backward pass fills them.

    A bucket is closed when it is full (of so many parameters, if not of Megatron-Core's), tensor by
    tensor from the model's end on: a large tensor fills one by itself. Experts that are split over
    GPUs have their own, and so has a table that two stages share under the distributed optimizer.
    On every pipeline stage but the first all is one, as in every later chunk
    (`disable_bucketing`). Source: 0.16's `distributed/param_and_grad_buffer.py`.
    """
    layers = p.stage_layers(model)[stage] // p.vpp
    full = (full or bucket_parameters(p)) if stage == 0 else None
    dense, experts = _layer(model, p)
    first, last = (0, 0) if model.lora_rank else end_parameters(model, p)
    before = first if stage == 0 else 0
    after = last if stage == p.pp - 1 and p.vpp == 1 else 0
    alone = model.tied_embeddings and p.pp > 1 and p.zero == 1
    found = [*_filled(dense * layers, full, before, after, alone)]
    return tuple(sorted((*found, *_filled(experts * layers, full)), key=lambda one: one.ready))


def _filled(
    tensors: Sequence[int], full: int | None, before: int = 0, after: int = 0, alone: bool = False
) -> Iterator[Bucket]:
    """Layers' tensors of these sizes, the last layer's first, in buckets of at least `full`.

    before, after: parameters before and after the layers; `alone`: the former share no bucket.
    """
    held, done, whole = after, 0, sum(tensors)
    for size in tensors:
        if full and held >= full:
            yield Bucket(held, done / whole)
            held = 0
        held, done = held + size, done + size
    if held and before and (alone or (full and held >= full)):
        yield Bucket(held, 1.0)
        held = 0
    if held + before:
        yield Bucket(held + before, 1.0)


def _layer(model: ModelSpec, p: Parallelism) -> tuple[list[int], list[int]]:
    """Sizes of a layer's tensors that a GPU trains, last first: (dense, experts over GPUs).

    What is no matrix (norms, biases, the router) is counted with the attention's output projection.
    """
    dense, _ = layer_parameters(model, p)
    if model.lora_rank:
        return [dense], []
    output = model.hidden * model.heads * model.head_dim // p.tp
    product = model.attention_parameters // p.tp - output
    second = model.ffn_hidden * model.hidden // p.tp
    mlp = [second, model.mlp_parameters // p.tp - second] * (model.experts // p.ep or 1)
    rest = dense - product - (0 if model.experts else sum(mlp))
    return ([] if p.ep > 1 else mlp) + [product, rest], mlp if p.ep > 1 else []
