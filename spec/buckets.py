"""Megatron-Core's buckets: which gradients are reduced, and parameters gathered, together."""

from collections.abc import Iterator
from functools import lru_cache

from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import LATEST, end_parameters, layer_parameters


def bucket_parameters(p: Parallelism) -> int:
    """Parameters that fill a bucket of Megatron-Core's DistributedDataParallel.

    Source: 0.16's `distributed/distributed_data_parallel.py`, the default `bucket_size`.
    """
    return max(40_000_000, 1_000_000 * p.dp)


@lru_cache(maxsize=LATEST)
def gradient_buckets(model: ModelSpec, p: Parallelism, stage: int) -> tuple[int, ...]:
    """Parameters of each bucket of `stage`'s first model chunk, in the order they are reduced.

    A bucket is closed when it is full, tensor by tensor from the model's end on: a large tensor
    fills one by itself. Experts that are split over GPUs have their own, here the first; and so has
    a table that two stages share under the distributed optimizer. On every pipeline stage but the
    first all is one, as in every later chunk (`disable_bucketing`). Source: 0.16's
    `distributed/param_and_grad_buffer.py`.
    """
    dense, experts = _tensors(model, p, stage)
    if stage:
        return tuple(sum(held) for held in (experts, dense) if held)
    full = bucket_parameters(p)
    shared = model.tied_embeddings and p.pp > 1 and p.zero == 1 and not model.lora_rank
    table = [dense.pop()] if shared else []
    return (*_filled(experts, full), *_filled(dense, full), *table)


def _filled(tensors: list[int], full: int) -> Iterator[int]:
    """Tensors of these sizes in buckets."""
    held = 0
    for size in tensors:
        held += size
        if held >= full:
            yield held
            held = 0
    if held:
        yield held


def _tensors(model: ModelSpec, p: Parallelism, stage: int) -> tuple[list[int], list[int]]:
    """Sizes of what a GPU trains in the first chunk of `stage`, the model's end first.

    (dense, experts that are split over GPUs); those that are not are dense. What is no matrix of a
    layer (norms, biases, the router) is counted with the output projection of its attention.
    """
    layers = p.stage_layers(model)[stage] // p.vpp
    dense, _ = layer_parameters(model, p)
    if model.lora_rank:
        return [dense] * layers, []
    output = model.hidden * model.heads * model.head_dim // p.tp
    product = model.attention_parameters // p.tp - output
    outer = model.ffn_hidden * model.hidden // p.tp
    mlp = [outer, model.mlp_parameters // p.tp - outer] * (model.experts // p.ep or 1)
    rest = dense + (0 if model.experts else -sum(mlp)) - product
    apart = p.ep > 1
    first, last = end_parameters(model, p)
    sizes = ([] if apart else mlp) + [product, rest]
    begin = [first] if stage == 0 else []
    end = [last] if stage == p.pp - 1 and p.vpp == 1 else []
    return end + sizes * layers + begin, mlp * layers if apart else []
