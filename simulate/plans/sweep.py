"""Simulates many plans: on all cores or a cluster, written to disk as they finish, and resumed.

The file is JSON lines. The first says what was swept (model, node, fabric, calibration); a file of
another sweep is refused. A line that a killed process left unfinished is dropped.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

from pydantic import Field

from simulate.hardware.nvls import has_nvls
from simulate.inputs import Inputs
from simulate.plans.find import Plan
from simulate.step.estimate import StepSimulator
from spec.calibration import Calibration
from spec.errors import UserError
from spec.files import parse, read_text, sha256, write_text
from spec.fitted import Positive, Record
from spec.hardware import Fabric, Node
from spec.model import ModelSpec
from spec.parallelism import Parallelism

SCHEMA = "sweep/1"
CHUNK = 32  # plans that a worker gets at once
# Starting workers takes about as long as simulating this many plans.
WORTH_WORKERS = 300


class Point(Record):
    """The central estimate of a plan: a line of the file."""

    parallelism: Parallelism
    step_time_s: Positive
    power_w: Positive = Field(description="mean of one GPU")
    peak_gib: Positive

    @property
    def energy_j(self) -> float:
        """Of all GPUs for one step."""
        return self.step_time_s * self.power_w * self.parallelism.gpus


@dataclass(frozen=True)
class Workers:
    """Where plans are simulated: this machine's cores, or a cluster that already runs."""

    count: int | None = None  # None: all cores, where that pays
    address: str | None = None  # dask://host:port or ray://host:port


def simulate(inputs: Inputs, plans: Sequence[Plan]) -> list[Point]:
    """Central estimates of some plans, here."""
    found = []
    for plan in plans:
        p = plan.parallelism
        simulator = StepSimulator(
            inputs.model, p, inputs.node, inputs.fabric, inputs.calibration, draws=0
        )
        estimate = simulator.run()
        time, power = float(estimate.step_time_s[0]), float(estimate.power_w[0])
        found.append(Point(parallelism=p, step_time_s=time, power_w=power, peak_gib=plan.peak_gib))
    return found


def sweep(
    inputs: Inputs, plans: Sequence[Plan], out: Path | None = None, workers: Workers | None = None
) -> Iterator[Point]:
    """Points of all plans as they finish; those that `out` already holds come first.

    Raises UserError where `out` holds another sweep or the workers' cluster cannot be used.
    """
    known: dict[Parallelism, Point] = {}
    with ExitStack() as stack:
        keep: Callable[[Point], None] | None = None
        if out is not None:
            known, file = _resume(inputs, out)
            stack.enter_context(file)

            def keep(point: Point) -> None:
                print(json.dumps(_line(point), allow_nan=False), file=file, flush=True)

        yield from (known[plan.parallelism] for plan in plans if plan.parallelism in known)
        left = [plan for plan in plans if plan.parallelism not in known]
        for points in _all(inputs, left, workers or Workers()):
            for point in points:
                if keep:
                    keep(point)
                yield point


def _all(inputs: Inputs, plans: Sequence[Plan], workers: Workers) -> Iterable[list[Point]]:
    from joblib import cpu_count  # of a scheduler's cpuset or a container's limit, not the machine

    count = workers.count or (cpu_count() if len(plans) >= WORTH_WORKERS else 1)
    if workers.address is None and count == 1:
        return (simulate(inputs, [plan]) for plan in plans)
    return _parallel(inputs, plans, count, workers.address)


def _parallel(
    inputs: Inputs, plans: Sequence[Plan], count: int, address: str | None
) -> Iterator[list[Point]]:
    from joblib import Parallel, delayed, parallel_config

    texts = _texts(inputs)
    chunks = [plans[at : at + CHUNK] for at in range(0, len(plans), CHUNK)]
    options: dict[str, Any] = {"n_jobs": count, "return_as": "generator_unordered"}
    with ExitStack() as stack:
        if address is not None:
            backend = _connect(address, stack)
            stack.enter_context(parallel_config(backend=backend))
            options = {"n_jobs": -1}
            options["return_as"] = "generator_unordered" if backend == "dask" else "list"
        yield from Parallel(**options)(delayed(_simulate_there)(texts, chunk) for chunk in chunks)


Texts = tuple[str, str, str, str, str]


def _texts(inputs: Inputs) -> Texts:
    """The inputs as a worker gets them, with each chunk."""
    records = (inputs.model, inputs.node, inputs.fabric, inputs.calibration)
    model, node, fabric, calibration = (one.model_dump_json(by_alias=True) for one in records)
    return model, node, fabric, calibration, inputs.calibration_path.as_posix()


@lru_cache(maxsize=2)
def _inputs(texts: Texts) -> Inputs:
    """Read once in each worker: what its fits work out for the first plan serves all others."""
    model, node, fabric, calibration, path = texts
    return Inputs(
        ModelSpec.model_validate_json(model),
        Node.model_validate_json(node),
        Fabric.model_validate_json(fabric),
        Calibration.model_validate_json(calibration),
        Path(path),
    )


def _simulate_there(texts: Texts, plans: Sequence[Plan]) -> list[Point]:
    return simulate(_inputs(texts), plans)


def _connect(address: str, stack: ExitStack) -> str:
    """Name of joblib's backend for a cluster at `address`, connected until `stack` closes."""
    kind, _, host = address.partition("://")
    if kind not in ("dask", "ray") or not host:
        raise UserError(
            f"--workers is {address!r}; give a number of processes, dask://HOST:PORT or "
            "ray://HOST:PORT"
        )
    try:
        if kind == "dask":
            from distributed import Client

            connect: Any = Client  # not annotated
            stack.enter_context(connect(f"tcp://{host}", timeout=10))
        else:
            import ray
            from ray.util.joblib import register_ray

            ray.init(address=address)
            stack.callback(ray.shutdown)
            register_ray()  # type: ignore[no-untyped-call]
    except ImportError:
        package = {"dask": "distributed", "ray": "ray[client]"}[kind]
        raise UserError(
            f"--workers {address} needs the package {package}; install it with pip"
        ) from None
    except (OSError, ConnectionError) as error:
        raise UserError(f"--workers {address}: nothing answers there ({error})") from None
    return kind


def _line(point: Point) -> dict[str, Any]:
    return point.model_dump(exclude_defaults=True)


def _header(inputs: Inputs) -> dict[str, Any]:
    header: dict[str, Any] = {
        "schema": SCHEMA,
        "model": inputs.model.model_dump(mode="json"),
        "node": inputs.node.model_dump(mode="json"),
        "fabric": inputs.fabric.model_dump(mode="json"),
        "calibration": sha256(inputs.calibration_path),
    }
    # what changed the calibration is said where something did: files from before go on
    if inputs.what_if:
        header["what_if"] = dict(inputs.what_if)
    if has_nvls(inputs.calibration):
        header["nvls"] = True
    return header


def _resume(inputs: Inputs, path: Path) -> tuple[dict[Parallelism, Point], TextIO]:
    """What a sweep's file already holds, and the file to go on with."""
    header, known = _header(inputs), dict[Parallelism, Point]()
    path.parent.mkdir(parents=True, exist_ok=True)
    first = json.dumps(header) + "\n"
    lines = read_text(path, "a sweep").splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith("\n")]
    if lines and not whole and not first.startswith(lines[0]):  # no sweep's, half-written
        raise UserError(f"{path}: holds no sweep; name another file with --out")
    for number, line in enumerate(whole):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(
                f"{path}: line {number + 1} is not of a sweep; name another file with --out"
            ) from None
        if number:
            point = parse(Point, value, f"{path}: line {number + 1}")
            known[point.parallelism] = point
        elif value != header:
            raise UserError(
                f"{path}: holds a sweep of another model, node, fabric or calibration, or what-if; "
                "name another file with --out"
            )
    if not whole or len(whole) < len(lines):
        write_text(path, "".join(whole) or first)
    return known, path.open("a", encoding="utf-8")
