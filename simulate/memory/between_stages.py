"""What an interleaved pipeline stage holds of the tensors between stages while it runs backward.

Megatron-Core 0.16.1's loop (`pipeline_parallel/schedules.py`,
`forward_backward_pipelining_with_interleaving`), variable by variable. Beside the inputs of passes
in flight, which are among what their layers keep, and the gradient that a pass begins with:

- the output that is being sent, and the next pass's input (`fwd_recv_buffer`);
- the gradient that the pass before gave (`input_tensor_grad`);
- of each chunk, the input of its last forward pass and its gradient, once its backward pass has
  been: the chunk's decoder refers to it until its next one (`set_input_tensor`);
- the same of the input that was received last before forward and backward passes take turns, to
  the end of the step (`input_tensor`);
- at the end, the gradient that was received last while they did (`recv_next_wait_handle`).

Counted in a step over gloo, allocation by allocation, where it is the same for two and four stages.
"""

from collections.abc import Callable
from functools import lru_cache

from simulate.step.pipeline_order import BACKWARD, FORWARD, order, warmup

PERIODS = 4  # rounds of microbatches after which nothing new comes
Held = tuple[int, int]  # passes in flight, tensors beside them


@lru_cache(maxsize=1024)
def tensors_held(
    stage: int, stages: int, microbatches: int, chunks: int, *, last_chunk: bool = False
) -> tuple[Held, ...]:
    """What there is at backward passes, of all chunks or of the last one.

    Only where at no other one there is more of both.
    """
    shape = stages, min(microbatches, PERIODS * stages), chunks
    passes = order(stage, *shape)
    forward = [one for one in passes if one.way == FORWARD]
    backward = [one for one in passes if one.way == BACKWARD]
    early = warmup(stage, *shape, "1f1b")
    done_at = {(one.microbatch, one.chunk): k for k, one in enumerate(backward)}
    done = [done_at[one.microbatch, one.chunk] for one in forward]  # by forward pass
    received = [stage > 0 or one.chunk > 0 for one in forward]
    sent = [stage < stages - 1 or one.chunk < chunks - 1 for one in forward]
    turns = len(forward) - early
    found = set()
    for k, one in enumerate(backward):
        ran = min(early + k + 1, len(forward))
        last = {forward[f].chunk: f for f in range(ran)}
        kept = {f for f in last.values() if received[f] and done[f] < k}
        if turns and received[early] and done[early] < k:
            kept.add(early)
        gradients = {done[f] for f in kept}
        if k and (stage > 0 or backward[k - 1].chunk > 0):
            gradients.add(k - 1)
        count = len(kept) + len(gradients)
        if k < turns:
            count += sent[ran - 1] + (ran < len(forward) and received[ran])
        elif 0 < turns < k:
            waited = backward[turns]
            count += stage < stages - 1 or waited.chunk < chunks - 1
        if not last_chunk or one.chunk == chunks - 1:
            found.add((ran - k, count))
    return tuple(one for one in sorted(found) if not any(map(_less(one), found)))


def _less(one: Held) -> Callable[[Held], bool]:
    """Whether another has more of both, or of one and as much of the other."""
    return lambda other: other != one and other[0] >= one[0] and other[1] >= one[1]
