"""Attention over a sequence that lies on several GPUs: `measure/megatron/context.py`'s kernels.

Of the ring's `cp` pieces of attention each is half a square of this GPU's part of the sequence: its
own keys under the causal mask, then blocks without one. The kernels are the last rank's, all of
whose later pieces are of all queries to half the keys: it does most, and the others wait for its
keys. The ring of Transformer Engine joins pieces in fp32, too.
"""

from spec.collective import Collective
from spec.kernel import Kernel
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step_parts import Part, copied


def ring_attention(
    model: ModelSpec, p: Parallelism, heads: int, kv_heads: int
) -> tuple[Part, Part]:
    """Forward and backward of the attention of one layer of a GPU with so many heads."""
    length, dim = model.seq_len // p.cp, model.head_dim
    rows = p.microbatch * length
    queries, keys, sums = rows * heads * dim, rows * kv_heads * dim, rows * heads
    ring = Collective("send_recv", "cp", 2.0 * 2 * keys)
    own = (p.microbatch, length, heads, kv_heads, dim)
    block = (p.microbatch, length, length // 2, heads, kv_heads, dim)
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
        Part("attention", forward, hidden=(ring,) * later, ring=p.cp),
        # gradients of queries and of keys
        Part(
            "attention", backward, exposed=(ring,), hidden=(ring,) * (2 * later - 1), ring=2 * p.cp
        ),
    )
