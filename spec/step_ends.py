"""The two ends of a model: what is before its first layer, and what is behind its last.

Source: Megatron-Core 0.16's `models/common/embeddings/language_model_embedding.py`,
`tensor_parallel/layers.py` and `tensor_parallel/cross_entropy.py`.
"""

from spec.collective import Collective
from spec.kernel import Kernel
from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step_linear import column
from spec.step_parts import (
    Part,
    Segment,
    Shapes,
    added,
    by_autograd,
    copied,
    norm,
    pair,
    reordered,
    shapes,
)
from spec.step_sharded import of_shards


def embedding(model: ModelSpec, p: Parallelism) -> tuple[Segment, Segment]:
    """Token embedding at the head of the first stage, and positions where they are learned."""
    s = shapes(model, p)
    forward, backward = _words(model, p, s)
    learned = model.position == "learned"
    if learned:
        positions = (s.tokens, model.hidden, model.seq_len)
        both = copied(6 * s.tokens * model.hidden)
        forward += (Kernel("embedding", "forward", positions), both)
        table = added(model.seq_len * model.hidden)
        backward += (Kernel("embedding", "backward", positions), table)
    if p.microbatch > 1:  # from one sequence after another to one position after another
        by_position = reordered(s.tokens, model.hidden, model.head_dim)
        forward += (by_position,)
        backward = (by_position,) * (1 + learned) + backward  # the gradient of either table
    sums: tuple[Collective, ...] = ()
    gather: tuple[Collective, ...] = ()
    if p.tp > 1:
        # learned positions are added before the sequence is split, so there the sum is whole
        kind = "reduce_scatter" if p.sequence_parallel and not learned else "all_reduce"
        sums = (Collective(kind, "tp", s.activation_bytes),)
    if p.sequence_parallel:
        gather = (Collective("all_gather", "tp", s.activation_bytes),)
        forward += (copied(4 * s.local_tokens * model.hidden),)  # so that the whole can be freed
    there = (Part("embedding", forward, exposed=sums),)
    if model.lora_rank:  # frozen: nothing needs a gradient
        return there, ()
    back = (Part("embedding", backward, exposed=gather),)
    return of_shards(p, end_parameters(model, p)[0], there, by_autograd(back))


def _words(
    model: ModelSpec, p: Parallelism, s: Shapes
) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """Forward and backward kernels of the words' table, or of a rank's part of it."""
    vocab = max(model.vocab // p.tp, 1)
    op = "embedding"
    dims: tuple[int, ...] = (s.tokens, model.hidden, vocab)
    if p.tp > 1:
        op, dims = "vocab_parallel_embedding", (*dims, p.tp)
    # the gradient is dense: the whole table is added to the accumulated one, or, where it is the
    # output layer's too, to that one's bf16 gradient
    grad = added(vocab * model.hidden)
    if model.tied_embeddings and p.pp == 1:
        grad = copied(6 * vocab * model.hidden)
    return (Kernel(op, "forward", dims),), (Kernel(op, "backward", dims), grad)


def head(model: ModelSpec, p: Parallelism) -> tuple[Segment, Segment]:
    """Final norm, output projection and vocabulary-parallel cross-entropy of the last stage."""
    s = shapes(model, p)
    vocab = max(model.vocab // p.tp, 1)
    logits = column("logits", s.tokens, vocab, model.hidden, model, p, layers=False)
    loss = pair("cross_entropy", "cross_entropy", (s.tokens, vocab))
    if p.tp > 1:  # maximum, predicted logit and denominator of each token, fp32
        sums = (Collective("all_reduce", "tp", 4.0 * s.tokens),) * 3
        loss = (Part("cross_entropy", loss[0].kernels, exposed=sums), loss[1])
    pairs = (norm(model, s.local_tokens, model.hidden), logits, loss)
    forward, backward = tuple(f for f, _ in pairs), tuple(b for _, b in reversed(pairs))
    return of_shards(p, end_parameters(model, p)[1], forward, by_autograd(backward))


def end_parameters(model: ModelSpec, p: Parallelism) -> tuple[int, int]:
    """Parameters of a GPU outside layers: (embedding, final norm and output layer)."""
    table = model.vocab * model.hidden
    shared = model.tied_embeddings and p.pp == 1
    return (
        table // p.tp + model.embedding_parameters() - table,
        norm_parameters(model) + (0 if shared else table // p.tp),
    )


def norm_parameters(model: ModelSpec) -> int:
    """Of one norm over what is between layers."""
    return model.hidden * model.norm_vectors
