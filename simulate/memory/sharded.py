"""What a step holds at its peak where PyTorch's FSDP shards weights and gradients (ZeRO 3).

FSDP gathers a unit (the embedding, each layer, and the rest: final norm and output layer) into a
message and copies it out, so that both are there for a moment. What it then holds, and when:

- Forward the message stays until the next unit's is there: at the loss, the last layer's.
- Backward, as a unit begins, the message of the unit before is gathered already. Megatron-Core
  names what to gather where layers are recomputed: before the first layer rotary positions, which
  have no weights, so that the embedding is not.
- Gradients of a unit stay in bf16 until all are there, and are then copied into a message in fp32,
  which stays until the next unit's (earlier layer's) gradients are complete.
- A unit's gradients count as complete when those of its inputs are. The embedding's and the rest's
  inputs are tokens, which have none: weights and gradients of both stay to the end of the pass,
  where the rest's are scattered, then the embedding's. Their one matrix's gradient stays meanwhile
  (a loop's variable in `foreach_reduce` refers to it).
- Reduced gradients are bf16; Megatron-Core's optimizer replaces them by fp32 copies.

Sources: torch's `distributed/fsdp/_fully_shard` (`FSDPParamGroup.wait_for_unshard` and
`post_backward`, `FSDPState._root_post_backward_final_callback`, `foreach_reduce`), Megatron-Core
0.16's `TorchFullyShardedDataParallel` and `Float16OptimizerWithFloat16Params`.
"""

from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from spec.model import ModelSpec
from spec.parallelism import Parallelism
from spec.step import layer_parameters
from spec.step_ends import end_parameters
from spec.step_parts import shapes


def units(model: ModelSpec, p: Parallelism, stage: int) -> tuple[float, float, float]:
    """Parameters of the embedding, the largest layer and the rest on a GPU; 0 of what `stage`
    lacks."""
    first, last = end_parameters(model, p)
    layer = max(_parameters(kind, p) for kind, _ in p.layers_of(model, stage))
    return float(first * (stage == 0)), layer, float(last * (stage == p.pp - 1))


def _parameters(model: ModelSpec, p: Parallelism) -> float:
    """The same of a layer."""
    return float(sum(layer_parameters(model, p)))


def blocks_apart_bytes(model: ModelSpec, p: Parallelism, stage: int) -> float:
    """Blocks that the peak leaves idle: PyTorch's allocator gives no stream another's.

    Messages of two units that come one after the other are gathered in a stream of their own (one
    layer's is there at the peak); fp32 gradients are reduced, and cast to bf16, in another. The
    largest unit's message of fp32 gradients needs a block that activations leave none for.
    """
    if p.zero < 2:
        return 0.0
    embedding, layer, rest = units(model, p, stage)
    gathered = 2.0 * max(rest + embedding, embedding + layer, 2 * layer) - 2.0 * layer
    return (gathered if p.zero >= 3 else 0.0) + (4.0 + (4.0 + 2.0) / (p.dp * p.cp)) * max(
        embedding, layer, rest
    )


def scattered_bytes(model: ModelSpec, p: Parallelism, stage: int) -> tuple[float, float]:
    """What ZeRO 2 holds of gradients beside a layer's backward pass and beside the embedding's.

    As ZeRO 3, whose weights come and go besides: the rest's gradients and the layer's own, in bf16,
    and messages in fp32 of that layer and of the one after it. No row was measured.
    """
    if p.zero != 2:
        return 0.0, 0.0
    _, layer, rest = units(model, p, stage)
    messages = min(2, p.stage_layers(model)[stage])
    first = _parameters(p.layers_of(model, stage)[0][0], p)
    return 2 * rest + 2 * layer + 4 * layer * messages, 2 * rest + 4 * first


class Layer(NamedTuple):
    """A layer's passes, each number bytes, for one microbatch.

    `kept`: activations that it keeps; `recomputed`: those that it makes again; `passing`: what
    comes and goes beside them at the MLP's second product's weight gradient.
    """

    model: ModelSpec
    kept: float
    recomputed: float
    passing: float


@dataclass(frozen=True)
class Passes:
    """The passes of a GPU of `stage`; of its layers those alike, and how many, first ones first."""

    model: ModelSpec
    p: Parallelism
    stage: int
    layers: tuple[tuple[Layer, int], ...]

    def temporary_bytes(self) -> float:
        """What their peak holds beside all shards and a microbatch's activations."""
        places, layers = set[int](), 0
        for _, count in reversed(self.layers):
            # linear in `done` from the second layer that comes to the last but one, of those alike
            inner = {0, min(1, count - 1), max(count - 2, 0), count - 1}
            places |= {layers + one for one in inner}
            layers += count
        found = [self._layer_bytes(layers, done) for done in places]
        found.append(self._end_bytes() - self._kept_bytes(layers))
        if self.stage == self.p.pp - 1:
            found.append(self._loss_bytes() - self._missing_bytes(layers))
        return max(found)

    def _at(self, done: int) -> Layer:
        """The layer whose backward pass comes after those of as many others."""
        every = (one for one, count in reversed(self.layers) for _ in range(count))
        return next(islice(every, done, None))

    def _parameters(self, done: int) -> float:
        return _parameters(self._at(done).model, self.p)

    def _kept_bytes(self, done: int) -> float:
        """What the last layers keep."""
        found = 0.0
        for one, count in reversed(self.layers):
            found, done = found + min(done, count) * one.kept, max(done - count, 0)
        return found

    @property
    def _outside(self) -> float:
        """A gradient's bytes between layers."""
        return 2.0 * shapes(self.model, self.p).local_tokens * self.model.hidden

    def _missing_bytes(self, layers: int) -> float:
        """Shards of gradients that an only microbatch lacks while `layers` have none yet."""
        if self.p.microbatches > 1:
            return 0.0
        embedding, _, rest = units(self.model, self.p, self.stage)
        found = embedding + rest
        for one, count in self.layers:
            found += min(layers, count) * _parameters(one.model, self.p)
            layers = max(layers - count, 0)
        return 2.0 * found / (self.p.dp * self.p.cp)

    def _loss_bytes(self) -> float:
        """Logits in bf16 and fp32 beside the last layer's message; those in fp32 beside the rest's;
        those in bf16 beside the rest's gradient and the last layer's next message."""
        _, _, rest = units(self.model, self.p, self.stage)
        logits = 2.0 * shapes(self.model, self.p).tokens * self.model.vocab / self.p.tp
        message, gathered = 2 * self._parameters(0), 2 * rest
        most = max(3 * logits + message, 2 * logits + gathered, logits + gathered + message)
        return gathered + most + 4 * self._outside

    def _layer_bytes(self, layers: int, done: int) -> float:
        """In a layer's backward pass, after `done` of `layers`, beside all shards and what all
        layers keep."""
        embedding, _, rest = units(self.model, self.p, self.stage)
        one, parameters = self._at(done), self._parameters(done)
        own, sent = 2 * parameters, 4 * parameters  # bf16 weights or gradients; gradients in fp32
        if done < layers - 1:
            message = 2 * self._parameters(done + 1)  # of the unit before
        else:
            named = self.p.recompute != "none" and self.model.position == "rope"
            message = 0.0 if named else 2 * embedding
        held = 4 * rest + message - self._kept_bytes(done) + one.recomputed
        held -= self._missing_bytes(layers - done)
        # when all gradients are there, no activations are; then weights go and are they sent
        gone = one.recomputed or one.kept
        complete = own - gone + 2 * self._outside
        # of a layer's gradients the loop's variable refers to the last, which may be a bias's
        last = 0.0 if self.model.linear_bias else self._second_bytes(one)
        reduced = 6 * parameters / (self.p.dp * self.p.cp) + last - own
        older = 4 * self._parameters(done - 1) if done else 0.0
        during = own + older + max(self._passing_bytes(one), complete)
        return held + max(during, sent + complete + max(reduced, 0.0))

    def _second_bytes(self, one: Layer) -> float:
        """A weight gradient of the MLP's second product, a layer's last matrix."""
        return 2.0 * one.model.hidden * one.model.ffn_hidden / self.p.tp

    def _passing_bytes(self, one: Layer) -> float:
        """`passing`, or what there is at the first product's weight gradient: the second's too, but
        none of the activations between the products."""
        model, p = one.model, self.p
        share = max(model.top_k, 1) / max(model.experts // p.ep, 1)  # experts run in turn
        wide = 2.0 * shapes(model, p).tokens * model.ffn_hidden / p.tp * share
        first = (2 if model.gated else 1) * (self._second_bytes(one) - 2 * wide)
        return one.passing + max(first, 0.0)

    def _end_bytes(self) -> float:
        """Without activations: the embedding's gradient; the rest's scattered; then its own."""
        embedding, _, rest = units(self.model, self.p, self.stage)
        first = _parameters(self.layers[0][0].model, self.p)
        scattered = 2 + 4 + (4 + 2) / (self.p.dp * self.p.cp)  # bf16, fp32; reduced fp32, bf16
        held = max(
            4 * embedding + 4 * rest + 4 * first,
            4 * embedding + scattered * rest,
            scattered * embedding,
        )
        return held - self._missing_bytes(0)
