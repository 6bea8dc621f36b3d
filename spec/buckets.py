"""Megatron-Core's buckets: which gradients are reduced, and parameters gathered, together."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import LATEST, layer_parameters, replicated, trained_tensors, whole_latents
from spec.step_ends import end_parameters


def bucket_parameters(p: Parallelism) -> int:
    """Parameters that fill a bucket of Megatron-Core's DistributedDataParallel.

    Source: 0.16's `distributed/distributed_data_parallel.py`, the default `bucket_size`.
    """
    return max(40_000_000, 1_000_000 * p.dp)


class Bucket(NamedTuple):
    """Gradients that are reduced, or parameters that are gathered, together."""

    parameters: int
    ready: float  # share of its chunk's layers that a backward pass is through when it is full
    axis: str = "dp"  # edp: replicas of experts that are split over GPUs


Tensor = tuple[int, float, bool]  # its parameters, `ready` as above, whether it shares no bucket


@lru_cache(maxsize=LATEST)
def gradient_buckets(
    model: ModelSpec, p: Parallelism, stage: int, full: int | None = None
) -> tuple[Bucket, ...]:
    """The buckets of `stage`'s first model chunk, in the order that a backward pass fills them.

    A bucket is closed when it is full (of so many parameters, if not of Megatron-Core's), tensor by
    tensor from the model's end on: a large tensor fills one by itself. On every pipeline stage but
    the first nothing is full, nor in any later chunk (`disable_bucketing`). Experts that are split
    over GPUs have buckets of their own, and under the distributed optimizer so has, on either
    stage, a table that two stages share. Source: 0.16's `distributed/param_and_grad_buffer.py`.
    """
    full = (full or bucket_parameters(p)) if stage == 0 else None
    dense, experts = _tensors(model, p, stage, 0)
    found = [*_buckets(dense, full), *_buckets(experts, full, "edp")]
    return tuple(sorted(found, key=lambda one: one.ready))


@lru_cache(maxsize=LATEST)
def largest_piece(model: ModelSpec, p: Parallelism, stage: int) -> float:
    """Parameters of the largest part of a tensor that one replica owns (distributed optimizer).

    Replicas own equal parts of each bucket, one after another, whatever tensors lie there.
    """
    largest = 0.0
    for axis, bucket in _every_bucket(model, p, stage):
        part, begin = sum(size for size, _, _ in bucket) / _replicas(p)[axis], 0.0
        for size, _, _ in bucket:
            largest = max(largest, _piece(begin, begin + size, part))
            begin += size
    return largest


@lru_cache(maxsize=LATEST)
def owned_pieces(model: ModelSpec, p: Parallelism, stage: int) -> tuple[float, ...]:
    """Parameters of each tensor, or part of one, that the first replica's optimizer has a copy of.

    Under zero 1 and 2 its equal part of each bucket, see `largest_piece`; none of zero 3's shards,
    nor of adapters, whose tensors are not told apart.
    """
    if p.zero == 3 or model.lora_rank:
        return ()
    found = []
    for axis, bucket in _every_bucket(model, p, stage):
        left = sum(size for size, _, _ in bucket) / (_replicas(p)[axis] if p.zero else 1)
        for size, _, _ in bucket:
            found.append(min(size, left))
            left -= found[-1]
    return tuple(one for one in found if one > 0)


@lru_cache(maxsize=LATEST)
def updated_tensors(model: ModelSpec, p: Parallelism, stage: int) -> float:
    """Tensors that the optimizer of a GPU goes through one by one, on the mean over replicas.

    Under zero 1 and 2 these own equal parts of each bucket, see `largest_piece`: a share of its
    tensors each, and of one more where it is cut. Under zero 3 each has a part of every tensor.
    """
    of_axis = replicated(p, *trained_tensors(model, p, stage))
    if p.zero not in (1, 2):
        return sum(tensors for _, _, tensors in of_axis)
    buckets = Counter(axis for axis, _ in _every_bucket(model, p, stage))
    return sum(
        min(tensors, tensors / size + buckets[axis] * (1 - 1 / size))
        for axis, size, tensors in of_axis
    )


def _replicas(p: Parallelism) -> dict[str, int]:
    return {axis: size for axis, size, _ in replicated(p, 0, 0)}


def _every_bucket(
    model: ModelSpec, p: Parallelism, stage: int
) -> Iterator[tuple[str, list[Tensor]]]:
    """The axis and the tensors of each bucket of each model chunk of `stage`.

    A chunk is one bucket of either axis unless the reduction is overlapped, but for a table alone.
    """
    for chunk in range(p.vpp):
        full = bucket_parameters(p) if p.overlap and stage == chunk == 0 else None
        for axis, tensors in zip(_replicas(p), _tensors(model, p, stage, chunk), strict=True):
            for bucket in _filled(tensors, full):
                yield axis, bucket


def _piece(begin: float, end: float, part: float) -> float:
    """The most of [begin, end] that lies between two multiples of `part`."""
    cut = (begin // part + 1) * part
    if cut >= end:
        return end - begin
    whole = part if end - cut >= part else 0.0
    return max(cut - begin, whole, (end - cut) % part)


def _tensors(
    model: ModelSpec, p: Parallelism, stage: int, chunk: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Of a model chunk, from the model's end on: (dense, experts over GPUs)."""
    layers = p.chunk_layers(model, stage)[chunk]
    done, whole = 0, sum(count for _, count in layers)
    dense, experts = list[Tensor](), list[Tensor]()
    for kind, count in reversed(layers):
        for found, sizes in zip((dense, experts), _layer(kind, p), strict=True):
            found += _of_layers(sizes, count, done / whole, count / whole)
        done += count
    if not model.lora_rank:
        begin, end = end_parameters(model, p)
        table = model.vocab * model.hidden // p.tp
        alone = model.tied_embeddings and p.pp > 1 and p.zero == 1
        if stage == chunk == 0:
            dense = [*dense, (begin - table, 1.0, False), (table, 1.0, alone)]
        if stage == p.pp - 1 and chunk == p.vpp - 1:
            own = table if end >= table else 0  # tied on one stage: the embedding's
            dense = [(own, 0.0, alone), (end - own, 0.0, False), *dense]
    return dense, experts


def _of_layers(
    tensors: Sequence[tuple[int, int]], layers: int, before: float, share: float
) -> Iterator[Tensor]:
    """Tensors of layers alike, the last layer's first; of each, so many alike are there at once.

    They are a `share` of their chunk's layers, and a backward pass meets others `before` them.
    """
    done, whole = 0, sum(size * alike for size, alike in tensors) * layers
    for size, alike in (*tensors,) * layers:
        done += size * alike
        yield from [(size, before + share * (done / whole), False)] * alike


def _buckets(tensors: Sequence[Tensor], full: int | None, axis: str = "dp") -> Iterator[Bucket]:
    for one in _filled(tensors, full):
        yield Bucket(sum(size for size, _, _ in one), one[-1][1], axis)


def _filled(tensors: Sequence[Tensor], full: int | None) -> Iterator[list[Tensor]]:
    """Tensors, some of no size, by buckets of at least `full`, or in one."""
    held, size, closed = list[Tensor](), 0, False
    for one in (one for one in tensors if one[0]):
        alone = one[2]
        if held and (closed or alone):
            yield held
            held, size = [], 0
        held.append(one)
        size += one[0]
        closed = alone or bool(full and size >= full)
    if held:
        yield held


def _layer(model: ModelSpec, p: Parallelism) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """A layer's tensors that a GPU trains, last first: (dense, experts over GPUs).

    Each with its size, and how many alike have their gradients at once: experts have them one after
    another, in one product (on Transformer Engine) all together. What is no matrix (norms, biases,
    the router) is counted with the attention's output projection.
    """
    dense, _ = layer_parameters(model, p)
    if model.lora_rank:
        return [(dense, 1)], []
    attention = _attention(model, p)
    second = model.ffn_hidden * model.hidden // p.tp
    experts, first = model.experts // p.ep or 1, model.mlp_parameters // p.tp - second
    together, apart = p.on_engine and model.experts > 0, p.ep > 1 and model.experts > 0
    mlp = [(second, experts), (first, experts)] if together else [(second, 1), (first, 1)] * experts
    shared = []
    if model.shared_ffn_hidden:
        its_second = model.shared_ffn_hidden * model.hidden // p.tp
        shared = [(its_second, 1), (model.shared_parameters // p.tp - its_second, 1)]
    beside = [*shared, *attention]
    rest = dense - sum(size for size, _ in beside) - (0 if model.experts else second + first)
    beside.append((rest, 1))
    return ([] if apart else mlp) + beside, mlp if apart else []


def _attention(model: ModelSpec, p: Parallelism) -> list[tuple[int, int]]:
    """The matrices of a layer's attention but its output projection, likewise."""
    heads = model.heads // p.tp
    if not model.latent:
        output = model.hidden * heads * model.head_dim
        return [(model.attention_parameters // p.tp - output, 1)]
    split = 1 if whole_latents(model, p) else p.tp
    queries, keys = model.q_lora_rank, model.kv_lora_rank
    found = [
        keys * heads * (model.head_dim + model.value_dim),
        (keys + model.rope_head_dim) * model.hidden // split,
        (queries or model.hidden) * heads * model.query_dim,
        queries * model.hidden // split,
    ]
    return [(size, 1) for size in found if size]
