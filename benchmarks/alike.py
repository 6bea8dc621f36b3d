"""Trains a small model on random tokens and says how alike its tokens come to be.

    python -m benchmarks.alike [--width N] [--steps N] [--json [FILE]]

Of models with and without gates, of one layer and of two: the loss, and the mean cosine of two
tokens' inputs to each product, before the first step and after the last. The learning rate and the
weights' spread go with the width as 1e-4 and 0.02 do with one of 7,168, so that a step changes as
much. A few minutes on two cores; needs torch. docs/power.md has what it is about.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spec import command
from spec.errors import UserError

LIKE = 7168  # the width that it stands for
LEARNING_RATE, SPREAD = 1e-4, 0.02  # there
HEAD_DIM, VOCAB, BATCH, LENGTH = 128, 8192, 2, 256
GATED_FFN = 2 / 3  # of an ungated model's, for as many FLOPs


@dataclass(frozen=True)
class Found:
    """Mean cosines of two tokens' inputs by product, layer by layer."""

    gated: bool
    layers: int
    step: int
    loss: float
    cosines: dict[str, float]


class Model:
    """Layer norms without weights, attention and an MLP, one table at both ends."""

    def __init__(self, torch: Any, width: int, gated: bool, layers: int) -> None:
        self.torch, self.width, self.gated = torch, width, gated
        torch.manual_seed(0)
        spread = SPREAD * math.sqrt(LIKE / width)
        last = spread / math.sqrt(2 * layers)  # as Megatron-LM begins what adds to the residual
        self.ffn = round(4 * width * (GATED_FFN if gated else 1) / 64) * 64

        def matrix(rows: int, columns: int, spread: float = spread) -> Any:
            return (torch.randn(rows, columns) * spread).requires_grad_()

        self.table = matrix(VOCAB, width)
        self.layers = [
            (
                matrix(3 * width, width),
                matrix(width, width, last),
                matrix((2 if gated else 1) * self.ffn, width),
                matrix(width, self.ffn, last),
            )
            for _ in range(layers)
        ]

    def weights(self) -> list[Any]:
        """All that is trained."""
        return [self.table, *(one for layer in self.layers for one in layer)]

    def run(self) -> tuple[Any, dict[str, Any]]:
        """The loss of new random tokens, and what goes into each product, (tokens, features)."""
        torch, width = self.torch, self.width
        linear, norm = torch.nn.functional.linear, torch.nn.functional.layer_norm
        tokens, labels = torch.randint(0, VOCAB, (2, BATCH, LENGTH))
        inputs: dict[str, Any] = {}
        x = torch.nn.functional.embedding(tokens, self.table)
        for number, (qkv, projection, first, second) in enumerate(self.layers, 1):
            y = inputs[f"{number} qkv"] = norm(x, (width,))
            split = linear(y, qkv).view(BATCH, LENGTH, 3, -1, HEAD_DIM).permute(2, 0, 3, 1, 4)
            mixed = torch.nn.functional.scaled_dot_product_attention(*split, is_causal=True)
            y = inputs[f"{number} proj"] = mixed.transpose(1, 2).reshape(BATCH, LENGTH, width)
            x = x + linear(y, projection)
            y = inputs[f"{number} fc1"] = norm(x, (width,))
            y = linear(y, first)
            if self.gated:
                y = torch.nn.functional.silu(y[..., : self.ffn]) * y[..., self.ffn :]
            else:
                y = torch.nn.functional.gelu(y, approximate="tanh")
            inputs[f"{number} fc2"] = y
            x = x + linear(y, second)
        y = inputs["head"] = norm(x, (width,))
        loss = torch.nn.functional.cross_entropy(
            linear(y, self.table).view(-1, VOCAB), labels.view(-1)
        )
        return loss, inputs


def mean_cosine(rows: Any) -> float:
    """Of two different rows of a tensor (..., features)."""
    rows = rows.detach().reshape(-1, rows.shape[-1])
    rows = rows / rows.norm(dim=-1, keepdim=True)
    mean, count = rows.mean(0), len(rows)
    return float((mean @ mean * count - 1) / (count - 1))


def learn(torch: Any, width: int, steps: int, gated: bool, layers: int) -> list[Found]:
    """Before the first step, and after the last one."""
    model = Model(torch, width, gated, layers)
    rate = LEARNING_RATE * LIKE / width
    optimizer = torch.optim.AdamW(model.weights(), lr=rate, weight_decay=0.01)
    found = []
    for step in range(steps + 1):
        loss, inputs = model.run()
        if step in (0, steps):
            cosines = {name: mean_cosine(one) for name, one in inputs.items()}
            found.append(Found(gated, layers, step, loss.item(), cosines))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.weights(), 1.0)
        optimizer.step()
    return found


def main(arguments: Sequence[str]) -> None:
    """Train all four models and print a line for each end."""
    parser = command.Parser(prog="python -m benchmarks.alike", description=__doc__)
    for name, default, low, high, what in (
        ("width", 2048, HEAD_DIM, LIKE, f"of the models, a multiple of {HEAD_DIM}"),
        ("steps", 12, 1, 1000, "of each model"),
    ):
        kind = command.whole(low, high)
        said = f"{what} (default: {default})"
        parser.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=said)
    command.add_json(parser)
    options = parser.parse_args(arguments)
    if options.width % HEAD_DIM:
        raise UserError(f"--width is {options.width}; give a multiple of {HEAD_DIM}")
    try:
        import torch
    except ImportError:
        raise UserError("torch is missing; pip install -e '.[measure]'") from None
    found = [
        one
        for gated in (False, True)
        for layers in (1, 2)
        for one in learn(torch, options.width, options.steps, gated, layers)
    ]
    header = ("MLP", "layers", "step", "loss", "mean cosine of two tokens' inputs")
    lines = [
        (
            "gated" if one.gated else "ungated",
            str(one.layers),
            str(one.step),
            f"{one.loss:.2f}",
            ", ".join(f"{name} {cosine:.2f}" for name, cosine in one.cosines.items()),
        )
        for one in found
    ]
    text = "\n".join(command.aligned([header, *lines]))
    command.emit(options.json, {"schema": "alike/1", "found": [asdict(one) for one in found]}, text)


if __name__ == "__main__":
    sys.exit(command.run(main))
