"""The order in which each stage of a pipeline runs its forward and backward passes.

Sources: GPipe (arXiv 1811.06965); 1F1B and its interleaved form as in Megatron-LM
(arXiv 2104.04473, section 2.2) and Megatron-Core's `pipeline_parallel/schedules.py`; ZB-H1, which
takes weight gradients out of the backward pass (Qi et al. 2023, arXiv 2401.10241, section 2.1).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spec.parallelism import Schedule

FORWARD, BACKWARD, WEIGHTS = 0, 1, 2  # ways; the last one only where a schedule tells it apart


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of one model chunk for one microbatch, in one of the ways above."""

    way: int
    microbatch: int
    chunk: int

    @property
    def name(self) -> str:
        """What it is called in an emitted graph."""
        return f"{('forward', 'backward', 'weights')[self.way]} {self.microbatch}.{self.chunk}"


def ways(name: Schedule) -> int:
    """Kinds of passes: forward and backward, or also that of the weights' gradients."""
    return 3 if name == "zb-h1" else 2


def order(
    stage: int, stages: int, microbatches: int, chunks: int = 1, name: Schedule = "1f1b"
) -> list[Pass]:
    """The passes of one stage in the order they run."""
    total = microbatches * chunks

    def virtual(k: int, way: int) -> Pass:
        if chunks == 1:
            return Pass(way, k, 0)
        chunk = (k // stages) % chunks
        microbatch = k // (stages * chunks) * stages + k % stages
        return Pass(way, microbatch, chunks - 1 - chunk if way else chunk)

    early = warmup(stage, stages, microbatches, chunks, name)
    passes = [virtual(k, FORWARD) for k in range(early)]
    for k in range(early, total + early):
        passes += [virtual(k, FORWARD)] if k < total else []
        passes.append(virtual(k - early, BACKWARD))
        # ZB-H1: as late as memory allows, which is as many passes as earlier stages are ahead
        if name == "zb-h1" and k - early >= stage:
            passes.append(Pass(WEIGHTS, k - early - stage, 0))
    if name == "zb-h1":
        passes += [Pass(WEIGHTS, k, 0) for k in range(max(total - stage, 0), total)]
    return passes


def warmup(stage: int, stages: int, microbatches: int, chunks: int, name: Schedule) -> int:
    """Forward passes of a stage before its first backward pass follows one."""
    total = microbatches * chunks
    if name == "gpipe":
        return total
    if chunks == 1:
        return min(stages - stage - 1, total)
    return min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)


def exchanging(
    stage: int, stages: int, microbatches: int, chunks: int, name: Schedule
) -> NDArray[np.bool_]:
    """Of each interleaved pass in its stage's order, whether it waits for an exchange before it.

    That is one which the pass before has ended with: its output sent, the next input received, and
    nothing computed beside. See `simulate.cost.exchange`.
    """
    count = ways(name) * microbatches * chunks
    early = warmup(stage, stages, microbatches, chunks, name)
    place = np.arange(count)
    return (place > 0) & ((place <= early) | (place >= count - early))


def waiting(
    stage: int, stages: int, microbatches: int, chunks: int, name: Schedule
) -> NDArray[np.bool_]:
    """Of each interleaved pass in its stage's order, whether it waits for the last one's output.

    Until that is sent: where `exchanging`, but for the first backward pass after forward and
    backward ones took turns, whose input alone is waited for.
    """
    found = exchanging(stage, stages, microbatches, chunks, name)
    early = warmup(stage, stages, microbatches, chunks, name)
    found[early + 1 : len(found) - early + 1] = False
    return found


def sending(
    stage: int, stages: int, microbatches: int, chunks: int, name: Schedule
) -> NDArray[np.bool_]:
    """Of each pass in its stage's order, whether it also waits for the pass before to be sent.

    Not interleaved, a stage sends one pass's output and receives the next one's input in one batch
    where forward and backward passes take turns. Of two alike in a row the first one's output is
    sent before the second one's input is received.
    """
    place = np.arange(ways(name) * microbatches * chunks)
    if name != "1f1b" or chunks > 1:
        return np.zeros(len(place), dtype=bool)
    early = warmup(stage, stages, microbatches, chunks, name)
    forward = (place > 0) & (place <= min(early, microbatches - 1)) & (stage < stages - 1)
    turned = max(2 * microbatches - early, microbatches + 1)  # backward passes in a row since
    return forward | ((place >= turned) & (stage > 0))
