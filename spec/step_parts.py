"""What a training step is written in: parts, segments, and the sizes that recur in them."""

from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

from spec.collective import Collective
from spec.kernel import GROUPED, PACED, STREAMED, Kernel
from spec.model import ModelSpec
from spec.parallelism import Parallelism

# What autograd takes a host around an expert, in what that takes in the forward pass: nil steps
# with 8 and 32 experts, 1.28 in the middle of 13 runs on 12 hosts (0.99 to 1.54).
EXPERT_BACKWARD = 1.28


@dataclass(frozen=True)
class Part:
    """Work that runs together: `kernels` in order, `hidden` communication beside them.

    A part lasts as long as the longer of the two; `exposed` communication has nothing beside it
    and follows. Of the kernels a share `covers` what is hidden, the others wait for it. In one that
    `waits` the host reads what the device computed: it cannot be ahead.
    """

    name: str
    kernels: tuple[Kernel, ...] = ()
    exposed: tuple[Collective, ...] = ()
    hidden: tuple[Collective, ...] = ()
    covers: float = 1.0
    waits: bool = False
    uneven: bool = False  # its ranks exchange tokens, and no two of them as many
    # pieces of ring attention, put together and sent by Python, in what one takes it forward
    ring: float = 0.0
    exchanges: int = 0  # tensors of which context-parallel ranks exchange tokens for heads
    routing: float = 0.0  # share of what it takes to choose a layer's experts, find their tokens
    checkpoint: bool = False  # here activations begin to be computed again
    adapter: bool = False  # low-rank products of LoRA are in it beside its own
    backward: bool = False  # autograd issues it
    # what its names in `HostFit` begin with: on Transformer Engine, in FP8 there
    on: Literal["", "te_", "fp8_"] = ""
    later: bool = False  # weights' gradients by themselves: its host issues kernels, nothing else

    @property
    def issued(self) -> dict[str, float]:
        """How often it has what takes its host time beside its kernels, as `HostFit` names it.

        Experts count where they run one after another; a ring's messages count with its pieces. An
        adapter of local layers counts where autograd has its gradients: forward it is little
        (docs/calibration.md). An exchange of tensors is part of attention's part.
        """
        if self.later:
            return {"collective": len(self.hidden)}
        apart = self.uneven or self.ring or self.exchanges
        products = {one.op: one.dims[0] for one in self.kernels if one.op in GROUPED}
        experts = products.get("grouped_gemm", 0)
        streamed = products.get(STREAMED, 0)
        return {
            self.on + ("backward_part" if self.backward else "part"): int(not self.exchanges),
            "collective": 0 if apart else len(self.exposed) + len(self.hidden),
            "uneven": int(self.uneven),
            "expert": experts * (EXPERT_BACKWARD if self.backward else 1.0),
            (self.on or "te_") + ("backward_expert" if self.backward else "expert"): streamed,
            "routing": self.routing,
            "te_ring" if self.on else "ring": self.ring,
            "te_exchange": self.exchanges,
            f"{self.on}checkpoint": int(self.checkpoint),
            "adapter": int(self.adapter and self.backward and not self.on),
            "te_adapter": int(self.adapter and bool(self.on)),
        }


Segment = tuple[Part, ...]


def by_autograd(segment: Segment) -> Segment:
    """The parts of a backward pass."""
    return tuple(replace(part, backward=True) for part in segment)


@dataclass(frozen=True)
class Shapes:
    """Sizes that recur in one microbatch on one GPU."""

    tokens: int  # rows of the activations that a full-sequence operation sees
    local_tokens: int  # rows outside the tensor-parallel region (a tp-th under sequence parallel)
    activation_bytes: float  # tokens * hidden in bf16


def shapes(model: ModelSpec, p: Parallelism) -> Shapes:
    """Row counts of one microbatch on one GPU."""
    tokens = p.microbatch * model.seq_len // p.cp
    local = tokens // p.tp if p.sequence_parallel else tokens
    return Shapes(tokens, local, 2.0 * tokens * model.hidden)


def pair(name: str, op: str, dims: tuple[int, ...]) -> tuple[Part, Part]:
    """Forward and backward part of one operation."""
    forward, backward = (Kernel(op, way, dims) for way in ("forward", "backward"))
    return Part(name, (forward,)), Part(name, (backward,))


def norm(model: ModelSpec, rows: int, width: int) -> tuple[Part, Part]:
    """Forward and backward part of a norm; what its vectors' gradients are added to is kept."""
    forward, backward = pair("norm", model.norm, (rows, width))
    if model.lora_rank:  # frozen
        return forward, backward
    vectors = (added(width),) * model.norm_vectors
    return forward, replace(backward, kernels=(*backward.kernels, *vectors))


def added(elements: int) -> Kernel:
    """A parameter's gradient in bf16 added to the one in fp32 that stays; experts' all at once."""
    return Kernel("grad_accumulate", "forward", (elements,))


def copied(nbytes: int) -> Kernel:
    """A copy that moves `nbytes`, read and written bytes counted together."""
    return Kernel("copy", "forward", (max(nbytes // 4, 1),))


def paced(nbytes: int) -> Kernel:
    """What lasts as long as such a copy at the reference clock, and longer at lower ones."""
    return replace(copied(nbytes), op=PACED)


def reordered(rows: int, width: int, head_dim: int) -> Kernel:
    """A copy of `rows` x `width` in bf16 that changes their order; a width need not be of heads."""
    dim = gcd(width, head_dim)
    return Kernel("reorder", "forward", (rows, width // dim, dim))


def of_weights(kernel: Kernel, part: Part) -> bool:
    """Whether it can wait, as it makes a matrix's gradient or adds it up."""
    if kernel.op == "grad_accumulate":
        biases = [one.dims[1:] for one in part.kernels if one.op == "bias"]
        matrix = any(one.direction == "wgrad" for one in part.kernels)
        return matrix and kernel.dims not in biases
    return kernel.direction == "wgrad"


def without_weights(backward: Segment) -> tuple[Segment, Segment]:
    """A backward segment as (gradients of inputs, gradients of weights), for zero-bubble schedules.

    What was hidden beside weight gradients is exposed when those run later, but for the inputs
    that they gather again.
    """
    inputs, weights = [], []
    for part in backward:
        later = tuple(k for k in part.kernels if of_weights(k, part))
        if not later:
            inputs.append(part)
            continue
        now = tuple(kernel for kernel in part.kernels if kernel not in later)
        again = tuple(one for one in part.hidden if one.kind == "all_gather")
        behind = tuple(one for one in part.hidden if one.kind != "all_gather")
        inputs.append(replace(part, kernels=now, exposed=(*behind, *part.exposed), hidden=()))
        weights.append(Part(part.name, later, hidden=again, later=True))
    return tuple(inputs), tuple(weights)
