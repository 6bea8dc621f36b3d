"""Attention over a sequence that lies on several GPUs: in a ring, or tokens exchanged for heads.

Of a ring's `cp` pieces of attention each is half a square of this GPU's part of the sequence: its
own keys under the causal mask, and blocks without one. The kernels are the last rank's, all of
whose later pieces are of all queries to half the keys: it does most, and the others wait for its
keys.

The local ring is `measure/megatron/context.py`'s, joined kernel by kernel in fp32. Transformer
Engine's (`AttnFuncWithCPAndKVP2P` of its pytorch/attention, version 2.11) keeps pieces in bf16, as
they come, and joins each by one fused kernel. Backward it begins with the block whose keys came
last and ends with its own keys, beside which gradients of keys come back: none of its messages has
nothing beside it. Forward the last block has none beside it, in either ring: it waits for its keys.

Its other way (`AttnFuncWithCPAndQKVOA2A`; Ulysses, Jacobs et al. 2023, arXiv 2309.14509) exchanges
tokens for heads, so that a GPU has a `cp`-th of the heads and the whole sequence, and back. Of
queries, keys and values, or their gradients, each is laid out by rank, sent, and put in order
beside the next one's message; behind attention these two change places.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from spec.collective import Collective
from spec.kernel import Kernel
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step_parts import Part, copied, pair

# What joins a piece, over a copy of as many bytes: 1.33 to 1.4 at 17 to 19 million values of
# queries and 0.94 at 34 million, by profiled steps on two H200; what scales the first 0.97 to 1.27.
RING_JOINED = 1.2
# What autograd takes a host around a piece of Transformer Engine's ring, in what that takes in the
# forward pass: nil steps of two hosts, 1.12 and 1.39.
RING_BACKWARD = 1.3
# Of a copy of as many bytes, laying out by rank: an H200's kernels, as in profiles of such steps.
BY_RANK = 2.4
CORE_ATTENTION = ("attention", "exchange")  # parts that Megatron-Core's is, and runs again


def context_attention(
    model: ModelSpec, p: Parallelism, heads: int, kv_heads: int
) -> list[tuple[Part, Part]]:
    """Forward and backward parts of the attention of one layer of a GPU with so many heads."""
    if not p.exchanges_heads:
        return [ring_attention(model, p, heads, kv_heads)]
    own = (p.microbatch, model.seq_len // p.cp, heads, kv_heads, model.head_dim)
    return exchanged_attention(own, p.cp)


def exchanged_attention(own: tuple[int, ...], cp: int) -> list[tuple[Part, Part]]:
    """Attention between two exchanges of tokens for heads; own: dims of this GPU's tokens."""
    batch, length, heads, kv_heads, dim = own
    whole = batch, length * cp, heads // cp, kv_heads // cp, dim
    given = [(batch * length, each, dim) for each in (heads, kv_heads, kv_heads)]
    taken = given[:1]
    return [
        (_exchange(given, before=True), _exchange(given, before=False)),
        pair("attention", "attention", whole),
        (_exchange(taken, before=False), _exchange(taken, before=True)),
    ]


def _exchange(tensors: Sequence[tuple[int, int, int]], *, before: bool) -> Part:
    """Tensors of (rows, heads, head_dim) on their way, before attention or behind it.

    The first one's first kernel and the last one's second have no message beside them.
    """
    by_rank = tuple(Kernel("reorder", "forward", one) for one in tensors)
    in_order = tuple(copied(4 * prod(one)) for one in tensors)
    sent = tuple(Collective("all_to_all", "cp", 2.0 * prod(one)) for one in tensors)
    first, second = (by_rank, in_order) if before else (in_order, by_rank)
    part = Part("exchange", (*first, *second), exchanges=len(tensors))
    if len(tensors) == 1:
        return replace(part, exposed=sent)
    times = (BY_RANK, 1.0) if before else (1.0, BY_RANK)
    sizes = [prod(one) for one in tensors]
    alone = times[0] * sizes[0] + times[1] * sizes[-1]
    return replace(part, hidden=sent, covers=1 - alone / (sum(times) * sum(sizes)))


def ring_attention(
    model: ModelSpec, p: Parallelism, heads: int, kv_heads: int
) -> tuple[Part, Part]:
    """Forward and backward of the attention of one layer of a GPU with so many heads."""
    length, dim = model.seq_len // p.cp, model.head_dim
    own = (p.microbatch, length, heads, kv_heads, dim)
    if p.on_engine:
        return engine_ring(own, p.cp)
    rows, (queries, keys, sums) = p.microbatch * length, elements_of(own)
    ring = Collective("send_recv", "cp", 2.0 * 2 * keys)
    block = block_of(own)
    later = p.cp - 1
    # keys and values, all of them and half, and queries: by head, as the attention wants them
    stacked, half, ordered = (
        Kernel("reorder", "forward", (rows, n, dim)) for n in (2 * kv_heads, kv_heads, heads)
    )
    # scaled by exp of differences of log-sums, both summands read and one written, in fp32
    joined = (
        *(copied(12 * sums),) * 3,  # logaddexp, two differences
        *(copied(8 * sums),) * 3,  # two exponentials, and where the sums stay
        *(Kernel("rescale", "forward", (sums, dim)),) * 2,
        copied(12 * queries),
    )

    def there(attention: Kernel) -> tuple[Kernel, ...]:
        return ordered, attention, Kernel("widen", "forward", (queries,))

    def back(attention: Kernel) -> tuple[Kernel, ...]:
        # gradient and queries by head; gradients of queries are summed in fp32
        return ordered, ordered, attention, Kernel("accumulate", "forward", (queries,))

    forward = (
        stacked,
        *there(Kernel("attention", "forward", own)),
        *((half, *there(Kernel("attention_block", "forward", block)), *joined) * later),
        copied(6 * queries),  # cast back
        ordered,  # by token again
    )
    # gradients of half the keys and values, added in bf16 to those that came around
    passed_on = (copied(4 * keys), copied(6 * keys))
    backward = (
        stacked,
        copied(4 * queries),  # zeros in fp32
        *back(Kernel("attention", "backward", own)),
        copied(8 * keys),
        copied(4 * keys),  # zeros in bf16, before the first gradients go around
        *((half, *back(Kernel("attention_block", "backward", block)), *passed_on) * later),
        copied(12 * keys),  # this GPU's and those that came back
        copied(6 * queries),  # cast
    )
    # keys go around beside attention, gradients behind them; the last of these come back at the end
    return (
        Part("attention", forward, hidden=(ring,) * later, covers=later / p.cp, ring=p.cp),
        # gradients of queries and of keys
        Part(
            "attention", backward, exposed=(ring,), hidden=(ring,) * (2 * later - 1), ring=2 * p.cp
        ),
    )


def engine_ring(own: tuple[int, ...], cp: int) -> tuple[Part, Part]:
    """The same by Transformer Engine; own: dims of the attention to a GPU's own keys."""
    queries, keys, sums = elements_of(own)
    block, later = block_of(own), cp - 1
    ring = Collective("send_recv", "cp", 2.0 * 2 * keys)
    both = Collective("send_recv", "cp", 2 * 2.0 * 2 * keys)  # keys, and gradients of those before
    beside = copied(8 * keys)  # keys and values to where they are sent from
    forward = (
        beside,
        Kernel("attention", "forward", own),
        *(Kernel("attention_block", "forward", block),) * later,
        copied(8 * sums),
        *(copied(12 * sums),) * later,
        copied(4 * queries),  # scaled by what the sums of all pieces leave of it
        *(copied(int(RING_JOINED * 6 * queries)),) * later,
    )
    backward = (
        beside,
        *(Kernel("attention_block", "backward", block),) * later,
        # gradients of queries, and of half the keys: laid down, then added up in bf16
        *(copied(4 * queries), copied(4 * keys)),
        *(copied(6 * queries), copied(6 * keys)) * (later - 1),
        Kernel("attention", "backward", own),
        *(copied(6 * queries), copied(12 * keys)),
    )
    return (
        Part("attention", forward, hidden=(ring,) * later, covers=later / cp, ring=cp),
        Part(
            "attention",
            backward,
            hidden=(ring, *(both,) * (later - 1), ring),
            ring=RING_BACKWARD * cp,
        ),
    )


def elements_of(own: tuple[int, ...]) -> tuple[int, int, int]:
    """Of a GPU's queries, of its keys (as many as values), and of log-sums, one a query's head."""
    batch, length, heads, kv_heads, dim = own
    rows = batch * length
    return rows * heads * dim, rows * kv_heads * dim, rows * heads


def block_of(own: tuple[int, ...]) -> tuple[int, ...]:
    """Dims of a later piece, of as many queries to half as many keys."""
    batch, length, *heads = own
    return batch, length, length // 2, *heads
