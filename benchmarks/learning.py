"""Times a model's steps as it begins and as it learns, from random tokens and from text.

    python -m benchmarks.learning MODEL --layers N [--text FOLDER] [--device N] [--csv FILE]

Power under a cap depends on data. Megatron-Core steps of one GPU follow each other in blocks: as
the model begins, on random tokens and on text in turn; after it has learnt from random tokens; as
it began, again; after it has learnt from text; as it began, again. Of each block: the median step,
power, the shown clock and the loss. Text is Python source, by default torch's own, cut into words,
signs and blanks and numbered by how common they are. Five minutes on a GPU; docs/power.md has what
came out.
"""

import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from benchmarks.alike import LEARNING_RATE, LIKE, mean_cosine
from measure.devices import open_devices
from measure.hosts.window import Window
from spec import command
from spec.errors import UserError
from spec.files import format_row, parse, write_table
from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism

STILL = 1e-7  # a learning rate that hardly changes a bf16 weight
WARM_UP_STEPS = 50  # to the whole learning rate, on text
MOST_TOKENS = 10_000_000
TOKEN = re.compile(r"\w+|\s+|[^\w\s]")


@dataclass(frozen=True)
class Phase:
    """Blocks of steps on `tokens`: with weights that stay as they are, or `learning`."""

    name: str
    tokens: str
    blocks: int = 1
    learning: bool = False
    restored: bool = False  # weights are first put back to those that it began with


def phases(blocks: int) -> list[Phase]:
    """What follows what, with so many blocks of learning from text."""

    def turns(name: str, order: str) -> list[Phase]:
        return [Phase(name, {"R": "random", "T": "text"}[one]) for one in order]

    return [
        *turns("begun", "RTRT"),
        Phase("learning", "random", 2, learning=True),
        *turns("learnt random", "RT"),
        Phase("begun", "random", restored=True),
        *turns("begun", "T"),
        Phase("learning", "text", blocks, learning=True),
        *turns("learnt text", "TRTR"),
        Phase("begun", "text", restored=True),
        *turns("begun", "RTR"),
    ]


class Block(BaseModel):
    """What one block of steps did; the cosine is the mean of two tokens', layer by layer."""

    model: str
    layers: int
    phase: str
    tokens: str
    steps_learnt: int  # since it began, or was restored, before the block
    step_time_s: float
    power_w: float | None
    clock_mhz: float | None
    loss: float
    cosines: str  # into each layer and the head, joined by +


def numbered(folder: Path, vocab: int, most: int) -> list[int]:
    """Up to `most` tokens of the Python files below a folder, by rank; the last are all others."""
    found: list[str] = []
    for path in sorted(folder.rglob("*.py")):
        found += TOKEN.findall(path.read_text(errors="replace"))
        if len(found) >= most:
            break
    if not found:
        raise UserError(f"{folder} holds no Python files; give --text a folder that does")
    ranks = {one: n for n, (one, _) in enumerate(Counter(found[:most]).most_common(vocab - 1))}
    return [ranks.get(one, vocab - 1) for one in found[:most]]


class Model:
    """A model on one device, its text and the weights that it began with."""

    def __init__(self, model: ModelSpec, split: Parallelism, device: int, text: Path | None):
        try:
            import torch

            from measure.megatron.build import build
            from measure.megatron.optimizer import of_torch
            from measure.training.rank import Ranks
        except ImportError as error:
            raise UserError(f"{error.name} is missing; pip install -e '.[measure]'") from None
        kind = "nvidia" if torch.cuda.is_available() else "cpu"
        monitors = open_devices(kind)
        if device >= len(monitors):
            raise UserError(f"--device is {device}; of this host's the last is {len(monitors) - 1}")
        self.torch: Any = torch
        self.monitor = monitors[device]
        folder = text or Path(torch.__file__).parent
        self.text = torch.tensor(numbered(folder, model.vocab, MOST_TOKENS))
        if len(self.text) <= 2 * model.seq_len:
            raise UserError(
                f"{folder} holds {len(self.text)} tokens; more than two sequences' are needed"
            )
        case = {"device_kind": kind, "device": device, "gpus": 1, "address": "127.0.0.1"}
        self.ranks = Ranks(case, 0, lambda port: port)
        self.trainer = build(model, split, self.ranks.device)
        self.optimizers = of_torch(self.trainer.optimizer)
        self.groups = [group for one in self.optimizers for group in one.param_groups]
        self.first = [one.detach().clone() for one in self._stepped()]
        self.number = 0

    def _stepped(self) -> Iterator[Any]:
        for group in self.groups:
            yield from group["params"]

    def restore(self) -> None:
        """Put the weights back that it began with, and forget the gradients' moments."""
        with self.torch.no_grad():
            for now, was in zip(self._stepped(), self.first, strict=True):
                now.copy_(was)
            for optimizer in self.optimizers:
                for state in optimizer.state.values():
                    for value in state.values():
                        value.zero_()
        self.step("random", STILL)  # which copies them to the bf16 ones

    def step(self, tokens: str, rate: float) -> tuple[float, float]:
        """One step: its seconds and its loss."""
        for group in self.groups:
            group["lr"] = rate
        model, batch = self.trainer.model, self.trainer.parallelism.global_batch
        self.number += 1
        if tokens == "random":
            batches = self.trainer.batches(self.number)
        else:
            length = model.seq_len + 1
            generator = self.torch.Generator().manual_seed(self.number)
            begins = self.torch.randint(len(self.text) - length, (batch, 1), generator=generator)
            batches = self.trainer.cut(self.text[begins + self.torch.arange(length)])
        self.ranks.barrier()
        begin = time.perf_counter()
        losses, _ = self.trainer.step(batches)
        self.ranks.barrier()
        return time.perf_counter() - begin, statistics.fmean(map(float, losses))

    def cosines(self, tokens: str) -> str:
        """Mean cosines of two tokens of a micro-batch, into each layer and the head."""
        decoder = self.trainer.chunks[0].module.module.decoder
        found: list[float] = []
        hooks = [
            one.register_forward_pre_hook(
                lambda _, given, named: found.append(
                    mean_cosine((given[0] if given else named["hidden_states"]).float())
                ),
                with_kwargs=True,
            )
            for one in (*decoder.layers, decoder.final_layernorm)
        ]
        self.step(tokens, STILL)
        for hook in hooks:
            hook.remove()
        return "+".join(f"{one:.3f}" for one in found[: len(hooks)])

    def block(self, phase: Phase, steps: int, learnt: int, rate: float) -> Block:
        """One block of so many steps, of a model that has learnt for `learnt`."""
        times, losses = [], []
        with Window([self.monitor]) as window:
            for step in range(steps):
                part = (
                    min(1.0, (learnt + step + 1) / WARM_UP_STEPS) if phase.tokens == "text" else 1.0
                )
                took, loss = self.step(phase.tokens, rate * part if phase.learning else STILL)
                times.append(took)
                losses.append(loss)
        seen, model = window.result, self.trainer.model
        assert seen is not None
        power = seen.energy_j / seen.seconds if seen.energy_j is not None else None
        return Block(
            model=model.name,
            layers=model.layers,
            phase=phase.name,
            tokens=phase.tokens,
            steps_learnt=learnt,
            step_time_s=statistics.median(times),
            power_w=power,
            clock_mhz=seen.clock_mean_mhz,
            loss=statistics.fmean(losses),
            cosines=self.cosines(phase.tokens),
        )

    def run(self, blocks: int, steps: int) -> Iterator[Block]:
        """All phases, block by block."""
        rate = LEARNING_RATE * LIKE / self.trainer.model.hidden
        learnt = 0
        for phase in phases(blocks):
            if phase.restored:
                self.restore()
                learnt = 0
            for _ in range(phase.blocks):
                yield self.block(phase, steps, learnt, rate)
                learnt += steps if phase.learning else 0


def main(arguments: Sequence[str]) -> None:
    """Run all phases and write a row for each block."""
    parser = command.Parser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="a named model, or a file of one")
    parser.add_argument(
        "--text", type=Path, metavar="FOLDER", help="of Python files (default: torch's)"
    )
    for name, default, low, what in (
        ("layers", 2, 1, "of the model"),
        ("vocab", 32000, 64, "numbers of tokens"),
        ("seq-len", 2048, 16, "tokens of a sequence"),
        ("microbatch", 2, 1, "sequences of a micro-batch"),
        ("global-batch", 8, 1, "sequences of a step"),
        ("device", 0, 0, "which one"),
        ("steps", 20, 2, "of a block"),
        ("blocks", 25, 1, "of learning from text"),
    ):
        kind = command.whole(low, 1_000_000)
        said = f"{what} (default: {default})"
        parser.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=said)
    parser.add_argument("--csv", type=command.new_file, metavar="FILE", help="rows go here")
    options = parser.parse_args(arguments)
    changes = {one: getattr(options, one) for one in ("layers", "vocab", "seq_len")}
    model = load_model(options.model).resized(**changes)
    split = parse(
        Parallelism,
        {"microbatch": options.microbatch, "global_batch": options.global_batch},
        "the command line",
    )
    built = Model(model, split, options.device, options.text)
    blocks: list[Block] = []
    for block in built.run(options.blocks, options.steps):
        blocks.append(block)
        if options.csv:
            write_table(Path(options.csv), Block, blocks)
        print(" ".join(format_row(block).values()), flush=True)
    built.torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(command.run(main))
