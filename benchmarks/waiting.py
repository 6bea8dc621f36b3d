"""Where a step goes over from waiting for its host to waiting for its device.

    python -m benchmarks.waiting [FILE] [--measure FILE] [--gpus N] [--calibration FILE]

Steps of several kinds, each with sequences of several lengths and, in turns with these, as nil
steps (`spec.nil`) of as many layers, experts and microbatches: `--measure` times two turns of those
of one GPU (mixtures of experts) or of two (nine minutes), and writes a row of each step to a file.
Then, by default from `waiting.csv` beside this file: how long each lasts beside its nil steps, and
beside what a calibration has the device take. docs/visits.md has what came out.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from pydantic import BaseModel

from simulate.inputs import default_node, usual_fabric
from simulate.validation.cases import predict
from spec import command
from spec.calibration import read_calibration
from spec.files import format_row, read_table, write_table
from spec.model import ModelSpec, load_model
from spec.nil import ON_GPU, nil_model
from spec.parallelism import Parallelism
from spec.training_records import TrainingConfig
from topologies import load_fabric

VOCAB, STEPS, TURNS = 32000, 12, 2
NIL = 0  # in the place of a length


@dataclass(frozen=True)
class Kind:
    """A model over some GPUs, as replicas or each layer over all; lengths in the order they run."""

    model: str
    lora_rank: int
    tp: int
    lengths: tuple[int, ...]
    gpus: int = 2
    layers: int = 8
    microbatch: int = 1
    microbatches: int = 8

    @property
    def name(self) -> str:
        """Its name in tables."""
        adapted = f"-lora{self.lora_rank}" if self.lora_rank else ""
        return f"{self.model}{adapted}-TP{self.tp}"

    @property
    def split(self) -> Parallelism:
        """How it is split."""
        dp = self.gpus // self.tp
        return Parallelism(
            tp=self.tp,
            dp=dp,
            sequence_parallel=self.tp > 1,
            microbatch=self.microbatch,
            global_batch=dp * self.microbatch * self.microbatches,
        )

    def of(self, seq_len: int) -> ModelSpec:
        """The model with sequences of so many tokens, or the nil one."""
        whole = load_model(self.model)
        if seq_len == NIL:
            nil = nil_model(ON_GPU, experts=whole.experts, lora_rank=self.lora_rank)
            return nil.resized(layers=self.layers)
        sizes = {"vocab": VOCAB, "seq_len": seq_len, "lora_rank": self.lora_rank}
        return whole.resized(layers=self.layers, **sizes)


KINDS = (
    Kind("llama3-8b", 16, 1, (512, 4096, 2048, 6144, 3072)),
    Kind("mistral-nemo-12b", 0, 2, (512, 4096, 2048, 8192, 3072)),
    Kind("mistral-nemo-12b", 16, 2, (512, 8192, 4096, 12288)),
    Kind("llama3-8b", 0, 1, (512, 2048, 4096)),
    Kind("mixtral-8x7b", 0, 1, (1024, 4096), gpus=1, layers=1, microbatches=4),
    Kind("granite-3b-a800m", 0, 1, (1024, 4096), gpus=1, layers=4, microbatch=4, microbatches=4),
    Kind("olmoe-1b-7b", 0, 1, (1024, 4096), gpus=1, layers=2, microbatch=4, microbatches=4),
    Kind("qwen3-30b-a3b", 0, 1, (1024, 4096), gpus=1, layers=1, microbatch=4, microbatches=4),
)


class Timed(BaseModel):
    """Medians of the steps of a kind and a length in one turn."""

    kind: str
    seq_len: int  # 0: nil steps
    turn: int
    step_time_s: float
    layers_s: float  # the layers' passes of all microbatches, forward and backward, of a rank


def measured(gpus: int) -> Iterator[Timed]:
    """One length of every kind of so many GPUs after another: nil steps lie between real ones."""
    from measure.training.plan import WARM_UP, TrainingCase
    from measure.training.steps import step_times

    kinds = [kind for kind in KINDS if kind.gpus == gpus]
    for turn in range(TURNS):
        for place in range(1 + max(len(kind.lengths) for kind in kinds)):
            for kind in kinds:
                for seq_len in (NIL, *kind.lengths)[place : place + 1]:
                    p = kind.split
                    case = TrainingCase(kind.of(seq_len), p, STEPS, WARM_UP, 14.0, kind.name)
                    (found,) = step_times(case, (p.global_batch,), 1, device_kind="nvidia")
                    layers = [
                        one["layers_forward_s"] + one["layers_backward_s"] for one in found.passes
                    ]
                    yield Timed(
                        kind=kind.name,
                        seq_len=seq_len,
                        turn=turn,
                        step_time_s=median(found.times_s),
                        layers_s=median(layers),
                    )


def compared(rows: Sequence[Timed], calibration: Path) -> Iterator[str]:
    """A line for every kind and length: means over turns, ms, and how they compare."""
    of: dict[tuple[str, int], list[Timed]] = defaultdict(list)
    for row in rows:
        of[row.kind, row.seq_len].append(row)
    fit = read_calibration(calibration)
    node = default_node(fit)
    fabric = load_fabric(usual_fabric(node))
    for kind in KINDS:
        nil = of[kind.name, NIL]
        for seq_len in sorted(kind.lengths):
            mine = of[kind.name, seq_len]
            if not nil or not mine:
                continue
            config = TrainingConfig.of(kind.name, kind.of(seq_len), kind.split)
            told = predict(config, fit, node, fabric, draws=0)
            whole = told.step_time_s["median"]
            device = whole - told.breakdown_s["other"]
            host, took = (fmean(one.step_time_s for one in some) for some in (nil, mine))
            yield (
                f"{kind.name} {seq_len}: {took * 1e3:.0f} ms, nil {host * 1e3:.0f}, device "
                f"{device * 1e3:.0f}, told {whole * 1e3:.0f}; {took / host:.2f} of nil, layers "
                f"{fmean(one.layers_s for one in mine) / fmean(one.layers_s for one in nil):.2f}; "
                f"{took / max(host, device):.2f} of the longer; told {whole / took - 1:+.2%} off"
            )


def main(arguments: Sequence[str]) -> None:
    """Measure, where that is asked for, and compare."""
    parser = command.Parser(prog="python -m benchmarks.waiting", description=__doc__)
    own, system = Path(__file__).with_suffix(".csv"), Path("results/2x-h200/calibration.json")
    parser.add_argument("file", type=Path, nargs="?", default=own, metavar="FILE", help="its rows")
    parser.add_argument("--measure", type=command.new_file, metavar="FILE", help="rows go here")
    said = "(default: %(default)s)"
    parser.add_argument("--gpus", type=int, default=2, choices=(1, 2), help=f"to measure on {said}")
    parser.add_argument("--calibration", type=Path, default=system, metavar="FILE", help=said)
    options = parser.parse_args(arguments)
    rows: list[Timed] = []
    for row in measured(options.gpus) if options.measure else ():
        rows.append(row)
        write_table(Path(options.measure), Timed, rows)
        print(" ".join(format_row(row).values()), flush=True)
    for line in compared(rows or read_table(options.file, Timed), options.calibration):
        print(line)


if __name__ == "__main__":
    sys.exit(command.run(main))
