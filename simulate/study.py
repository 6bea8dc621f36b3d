"""`python -m simulate.study`: named studies, each a question put to the simulator."""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from reports.study import render
from simulate.hardware.unmeasured import unmeasured
from simulate.inputs import (
    Inputs,
    add_inputs,
    add_parallelism,
    check_gpus,
    fixed_parallelism,
    read_batch,
    read_inputs,
)
from simulate.memory.peak import memory
from simulate.plans.find import search
from simulate.projection.attribution import per_sequence
from simulate.projection.no_effect import without_effect
from simulate.projection.projected import Projection, Request, project
from spec.command import Parser, add_draws, add_json, add_progress, emit, new_file, progress, run
from spec.errors import UserError
from spec.files import first_problem
from spec.hardware import Fabric
from spec.outputs import refuse_kept, refuse_replaced
from spec.parallelism import Parallelism
from topologies import fabric_names, load_fabric
from topologies.tiers import SATURATED_MEANS

EXAMPLES = """examples:
  python -m simulate.study --list
  python -m simulate.study scaling --model llama3-70b
  python -m simulate.study fabrics --gpus 1024 --model mixtral-8x7b --json
  python -m simulate.study microbatch --gpus 64 --tp 8 --pp 4 --report microbatch.html
"""
GPUS = 1024
COUNTS = (8, 32, 128, 512, 2048, 8192, 32_768, 131_072)
MICROBATCHES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Case:
    """One point of a study: what to project, or why that is not possible."""

    series: str
    label: str
    request: Callable[[], Request]  # raises UserError where the point is impossible


Cases = Iterator[Case]


def request(inputs: Inputs, p: Parallelism, draws: int, chosen: str = "given") -> Request:
    """A projection of the study's inputs."""
    i = inputs
    return Request(
        i.model, p, i.node, i.fabric, i.calibration, i.calibration_path, draws, chosen=chosen
    )


def fastest(inputs: Inputs, gpus: int, arguments: argparse.Namespace, **more: Any) -> Parallelism:
    """The fastest parallelism that fits, with what the user fixed and `more` where not."""
    i, batch = inputs, read_batch(arguments, gpus)
    fixed = more | fixed_parallelism(arguments)
    return search(i.model, gpus, batch, i.node, i.fabric, i.calibration, fixed).best[0].parallelism


def varied(p: Parallelism, **fields: Any) -> Parallelism:
    """`p` with other fields, checked."""
    try:
        return Parallelism.model_validate(p.model_dump() | fields)
    except ValidationError as error:
        raise UserError(first_problem(error)) from None


def scaling(inputs: Inputs, arguments: argparse.Namespace) -> Cases:
    """How throughput per GPU falls from 8 to 131,072 GPUs, each with its fastest parallelism."""
    for gpus in COUNTS:

        def at(gpus: int = gpus) -> Request:
            p = fastest(inputs, gpus, arguments)
            return request(inputs, p, arguments.draws, "searched")

        yield Case("fastest parallelism", f"{gpus:,}", at)


def fabrics(inputs: Inputs, arguments: argparse.Namespace) -> Cases:
    """The same job on every named fabric: what the network costs, and which tier saturates.

    It is split as is fastest on --fabric, which is a point too where it is none of the named ones.
    """
    p = fastest(inputs, arguments.gpus, arguments)
    protocols = {network.protocol for network in inputs.calibration.networks}
    every = {name: load_fabric(name) for name in fabric_names()}
    named = {
        name: fabric
        for name, fabric in every.items()
        if fabric.protocol in protocols and fabric.protocol != "tcp"  # of emulated nodes
    }
    if inputs.fabric not in named.values():
        named = {arguments.fabric or inputs.fabric.name: inputs.fabric} | named
    for name, fabric in named.items():

        def at(fabric: Fabric = fabric) -> Request:
            return request(replace(inputs, fabric=fabric), p, arguments.draws)

        yield Case("same parallelism", name, at)


def microbatch(inputs: Inputs, arguments: argparse.Namespace) -> Cases:
    """Larger microbatches: their own effect, told apart from that of the bubble.

    At a fixed global batch a larger microbatch means fewer of them, and so a longer bubble; with a
    fixed number of microbatches the bubble stays and the batch grows, from the same plan with 1.
    """
    base = _with_room(inputs, arguments)
    for size in MICROBATCHES:
        for series, batch in (
            ("fixed global batch", base.global_batch),
            ("fixed number of microbatches", base.global_batch * size),
        ):

            def at(size: int = size, batch: int = batch) -> Request:
                return request(
                    inputs, varied(base, microbatch=size, global_batch=batch), arguments.draws
                )

            yield Case(series, f"{size}", at)


def _with_room(inputs: Inputs, arguments: argparse.Namespace) -> Parallelism:
    """The fastest parallelism of those that hold large microbatches, here with the smallest."""
    for size, recompute in itertools.product((8, 4, 2), ("none", "selective", "full")):
        fixed = {"microbatch": size, "vpp": 1, "recompute": recompute}
        with suppress(UserError):
            p = fastest(inputs, arguments.gpus, arguments, **fixed)
            more = varied(p, global_batch=p.global_batch * size)
            if memory(inputs.model, more, inputs.node, inputs.fabric).fits:
                return varied(p, microbatch=1)
    return fastest(inputs, arguments.gpus, arguments)


def switches(inputs: Inputs, arguments: argparse.Namespace) -> Cases:
    """Recomputation and overlap, each on and off; a switch without effect is said, not plotted."""
    base = fastest(inputs, arguments.gpus, arguments)
    for overlap in (False, True):
        for recompute in ("none", "selective", "full"):

            def at(overlap: bool = overlap, recompute: str = recompute) -> Request:
                p = varied(base, overlap=overlap, recompute=recompute)
                return request(inputs, p, arguments.draws)

            yield Case("with overlap" if overlap else "without overlap", recompute, at)


def schedules(inputs: Inputs, arguments: argparse.Namespace) -> Cases:
    """What the order of passes costs in bubble and memory: 1F1B, interleaved, GPipe, ZB-H1."""
    base = _with_stages(inputs, arguments)
    for name, fields in (
        ("1f1b", {}),
        ("interleaved 2", {"vpp": 2}),
        ("interleaved 4", {"vpp": 4}),
        ("gpipe", {"schedule": "gpipe"}),
        ("zb-h1", {"schedule": "zb-h1"}),
    ):

        def at(fields: dict[str, Any] = fields) -> Request:
            p = varied(base, **fields)
            p.check(inputs.model)
            return request(inputs, p, arguments.draws)

        yield Case("same parallelism", name, at)


def _with_stages(inputs: Inputs, arguments: argparse.Namespace) -> Parallelism:
    """The fastest parallelism with a pipeline, of a size that is usual where none was asked for."""
    if arguments.pp is not None:
        return fastest(inputs, arguments.gpus, arguments, vpp=1)
    for stages in (8, 4, 2):
        with suppress(UserError):
            return fastest(inputs, arguments.gpus, arguments, pp=stages, vpp=1)
    raise UserError(f"{inputs.model.name} has no pipeline on {arguments.gpus} GPUs; name one, --pp")


STUDIES: dict[str, tuple[str, Callable[[Inputs, argparse.Namespace], Cases]]] = {
    "scaling": ("GPUs", scaling),
    "fabrics": ("fabric", fabrics),
    "microbatch": ("sequences per microbatch", microbatch),
    "switches": ("recomputation", switches),
    "schedules": ("schedule", schedules),
}

# Options that a study varies itself, and which would therefore change nothing.
VARIED = {
    "scaling": ("gpus",),
    "microbatch": ("microbatch",),
    "switches": ("recompute", "overlap"),
    "schedules": ("schedule", "vpp"),
}

# Studies of one plan with something changed: each point is compared with the first of its series.
COMPARED = ("microbatch", "switches")


def parser() -> Parser:
    """The command's options."""
    options = Parser(prog="python -m simulate.study", description=__doc__, epilog=EXAMPLES)
    options.add_argument("study", nargs="?", metavar="NAME", help=", ".join(STUDIES))
    options.add_argument("--list", action="store_true", help="the studies and their questions")
    options.add_argument("--gpus", type=int, metavar="N", help=f"default: {GPUS}")
    add_inputs(options)
    add_parallelism(options)
    add_draws(options)
    options.add_argument(
        "--report", type=new_file, metavar="FILE.html", help="default: studies/NAME.html"
    )
    add_json(options)
    add_progress(options)
    return options


def refuse_varied(arguments: argparse.Namespace) -> None:
    """Raise UserError on an option that the study varies itself."""
    varies = VARIED.get(arguments.study, ())
    given = [name for name in varies if getattr(arguments, name) is not None]
    if given:
        raise UserError(f"the study varies --{given[0]} itself; leave it out")


def point(case: Case, first: dict[str, Projection] | None = None) -> dict[str, Any]:
    """What a study keeps of a projection; where none is possible, the reason.

    `first` collects the first projection of each series, with which the others are compared.
    """
    about = {"series": case.series, "label": case.label}
    try:
        projection = project(case.request())
        if not projection.memory.fits:
            peak, capacity = projection.memory.peak_gib, projection.memory.capacity_gib
            raise UserError(f"needs {peak:.0f} GiB a GPU of {capacity:.0f} GiB")
    except UserError as error:
        return about | {"impossible": str(error)}
    found = about | kept(projection)
    if first is not None:
        found["why"] = per_sequence(first.setdefault(case.series, projection), projection)
    return found


def kept(projection: Projection) -> dict[str, Any]:
    """The figures of a point."""
    value, r = projection.as_json(), projection.request
    p = value["inputs"]["parallelism"]
    names = ["step_time_s", "tokens_per_s_per_gpu", "mfu", "tokens_per_j", "power_w_per_gpu"]
    names += ["clock_mhz", "burst_w"]
    return {
        "gpus": value["inputs"]["gpus"],
        "parallelism": p["name"],
        "global_batch": p["global_batch"],
        "breakdown_s": value["breakdown_s"],
        "fabric": value["fabric"],
        "without_effect": without_effect(r.model, r.parallelism, r.calibration, r.step_s),
    } | {name: value[name] for name in names}


def table(value: dict[str, Any]) -> str:
    """The terminal summary."""
    lines = [value["question"], ""]
    for one in value["points"]:
        head = f"{one['series']:30} {one['label']:>22}  "
        if "impossible" in one:
            lines.append(head + one["impossible"])
            continue
        rate, mfu = one["tokens_per_s_per_gpu"], one["mfu"]["median"]
        busy = [tier["tier"] for tier in one["fabric"] if tier["saturated"]]
        lines.append(
            f"{head}{rate['median']:7.1f} [{rate['low']:.1f}, {rate['high']:.1f}] tokens/s/GPU  "
            f"MFU {mfu:.1%}  {one['tokens_per_j']['median']:.3g} tokens/J  {one['parallelism']}"
            + (f"  saturated: {', '.join(busy)}" if busy else "")
        )
        told = [(name, share) for name, share in one.get("why", {}).items() if abs(share) >= 5e-4]
        if told:
            parts = ", ".join(f"{name} {share:+.1%}" for name, share in told)
            lines.append(f"{'':55}time of a sequence: {parts}")
    if any(tier["saturated"] for one in value["points"] for tier in one.get("fabric", ())):
        lines += ["", SATURATED_MEANS]
    return "\n".join(lines)


def main(words: Sequence[str]) -> int:
    """Run the command."""
    options = parser()
    arguments = options.parse_args(words)
    if arguments.list or arguments.study is None:
        others = [name for name in vars(arguments) if name not in ("list", "json")]
        options.refuse_given(arguments, others, "where studies are listed")
        listed = {name: _question(work) for name, (_, work) in STUDIES.items()}
        text = "\n".join(f"{name:12} {question}" for name, question in listed.items())
        emit(arguments.json, {"schema": "studies/1", "studies": listed}, text)
        return 0
    if arguments.study not in STUDIES:
        raise UserError(f"study {arguments.study!r} is none of {', '.join(STUDIES)}")
    if arguments.gpus is not None:
        check_gpus(arguments.gpus)
    refuse_varied(arguments)
    arguments.gpus = arguments.gpus or GPUS
    report = Path(arguments.report or f"studies/{arguments.study}.html")
    refuse_kept("--report", report, (report,))
    refuse_replaced("--json", arguments.json, {"the report": report})
    inputs = read_inputs(arguments)
    axis, work = STUDIES[arguments.study]
    cases = list(work(inputs, arguments))
    first: dict[str, Projection] | None = {} if arguments.study in COMPARED else None
    bar = progress(cases, len(cases), arguments.study, arguments.progress)
    value = {
        "schema": "study/1",
        "study": arguments.study,
        "question": _question(work),
        "axis": axis,
        "model": inputs.model.name,
        "node": inputs.node.name,
        "fabric": None if arguments.study == "fabrics" else inputs.fabric.name,
        "calibration": inputs.calibration_path.as_posix(),
        "points": [point(case, first) for case in bar],
    }
    possible = [one for one in value["points"] if "impossible" not in one]
    if not possible:
        last = value["points"][-1]  # of most GPUs, where that is what varies
        raise UserError(
            f"no point of study {arguments.study} is possible; {axis} {last['label']}: "
            f"{last['impossible']}"
        )
    idle = [  # what changes no point
        sentence
        for sentence in possible[0]["without_effect"]
        if all(sentence in one["without_effect"] for one in possible)
    ]
    value["warnings"] = idle + unmeasured(
        inputs.calibration,
        inputs.node,
        on_engine=arguments.transformer_impl == "transformer_engine",
        cuda_graphs=bool(arguments.cuda_graphs),
        model=inputs.model,
        idle=idle,
    )
    notes = "".join(f"\nnote: {one}" for one in value["warnings"])
    text = f"{table(value)}\n{notes}\nwritten {report}"
    emit(arguments.json, value, text, {report: render(value)})
    return 0


def _question(work: Callable[..., Cases]) -> str:
    return (work.__doc__ or "").partition("\n\n")[0].strip()


if __name__ == "__main__":
    sys.exit(run(main))
