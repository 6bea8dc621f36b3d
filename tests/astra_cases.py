"""The workloads of which real Astra-Sim's answers are recorded under tests/data/astra.

Each case writes its files into a directory. Two kinds: `raw`, nodes made by hand to try one rule
each (every collective and algorithm, several dimensions, ranks that arrive at different times),
and steps that went through `emit`.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from simulate.astra import emit
from simulate.astra.chakra import COLL, COMM_TYPES, COMP, Node, encode_header, encode_node
from simulate.astra.configs import Dimension, Files, Network, System, write_configs
from tests.programs import pipeline

Case = Callable[[Path], None]


def write_raw(
    directory: Path, network: Network, system: System, ranks: Sequence[Sequence[Node]]
) -> None:
    """Write every rank's nodes and the configs."""
    files = Files(directory)
    files.prefix.parent.mkdir(parents=True)
    write_configs(files, network, system)
    for rank, nodes in enumerate(ranks):
        data = b"".join(map(encode_node, nodes))
        files.trace(rank).write_bytes(encode_header() + data)


def compute(number: int, ns: int, deps: Sequence[int] = ()) -> Node:
    """A compute node of so many ns under the default System."""
    return Node(
        number,
        f"compute {number}",
        COMP,
        data_deps=tuple(deps),
        num_ops=ns * 1000 + 500,
        tensor_size=1,
    )


def collective(number: int, kind: str, size: int, deps: Sequence[int], **fields: Any) -> Node:
    """A collective node of Astra-Sim's comm_size `size`."""
    return Node(
        number,
        kind,
        COLL,
        data_deps=tuple(deps),
        comm_type=COMM_TYPES[kind],
        comm_size=size,
        **fields,
    )


def every(algorithm: str, dims: int) -> dict[str, tuple[str, ...]]:
    """One algorithm for everything; Astra-Sim has no halving-doubling all-to-all."""
    return {
        kind: ("direct" if algorithm == "halvingDoubling" and kind == "all_to_all" else algorithm,)
        * dims
        for kind in COMM_TYPES
    }


def four_collectives(
    directory: Path,
    *,
    dims: Sequence[Dimension],
    algorithm: str,
    optimization: str = "baseline",
    delay: int = 10,
    memory_gbps: float = 1e9,
    skew: int = 0,
    seed: int = 0,
) -> None:
    """Each kind once, one after the other; ranks start up to `skew` ns apart."""
    network = Network(tuple(dims))
    system = System(every(algorithm, len(dims)), optimization, delay, memory_gbps)
    rng = random.Random(seed)
    ranks = []
    for _ in range(network.npus):
        nodes = [compute(1, 1000 + rng.randrange(skew + 1))]
        for number, kind in enumerate(COMM_TYPES, start=2):
            nodes.append(collective(number, kind, 3_000_001, [number - 1]))
        ranks.append(nodes)
    write_raw(directory, network, system, ranks)


def some_dimensions(directory: Path, *, optimization: str) -> None:
    """Collectives over one, two or all of three dimensions, while others compute."""
    network = Network(
        (
            Dimension("FullyConnected", 4, 400.0, 300.0),
            Dimension("Ring", 3, 50.0, 700.0),
            Dimension("Switch", 2, 25.0, 1100.0),
        )
    )
    names = {
        "all_reduce": ("halvingDoubling", "ring", "direct"),
        "all_gather": ("ring", "ring", "halvingDoubling"),
        "reduce_scatter": ("direct", "ring", "ring"),
        "all_to_all": ("direct", "ring", "ring"),
    }
    system = System(names, optimization)
    ranks = []
    for rank in range(network.npus):
        nodes = [compute(1, 500 + 4000 * (rank // 12))]
        number = 2
        for kind in COMM_TYPES:
            for flags in ((True, False, False), (False, True, True), (True, True, True)):
                nodes.append(collective(number, kind, 1 << 20, [number - 1], dims=flags))
                number += 1
        nodes.append(compute(number, 90_000, [1]))
        ranks.append(nodes)
    write_raw(directory, network, system, ranks)


def step(directory: Path, axes: Mapping[str, int], *, whole: bool = True, **options: Any) -> None:
    """A pipeline step through `emit`."""
    emit(pipeline(axes, **options), directory, whole=whole)


def _switch(npus: int) -> list[Dimension]:
    return [Dimension("Switch", npus, 150.0, 600.0)]


def _ring(npus: int) -> list[Dimension]:
    return [Dimension("Ring", npus, 50.0, 250.0)]


_MIXED = [Dimension("FullyConnected", 4, 400.0, 300.0), Dimension("Switch", 4, 50.0, 1500.0)]
_CUBE = [*_MIXED, Dimension("Ring", 4, 25.0, 2500.0)]
_TP, _DP, _EP = (1 << 25, 120e3), (1 << 30, 20e6), (1 << 23, 90e3)
_ALGORITHMS = ("ring", "direct", "halvingDoubling")

CASES: dict[str, Case] = {
    # one dimension, all ranks together
    **{
        f"{name}-{algorithm}-together": partial(four_collectives, dims=dims, algorithm=algorithm)
        for algorithm in _ALGORITHMS
        for name, dims in (("switch8", _switch(8)), ("ring8", _ring(8)))
    },
    # ranks that arrive at different times, with a slow reduction and endpoint
    **{
        f"{name}-{algorithm}-apart": partial(
            four_collectives, dims=dims, algorithm=algorithm, skew=200_000, delay=40,
            memory_gbps=50.0,
        )
        for algorithm in _ALGORITHMS
        for name, dims in (("switch8", _switch(8)), ("ring16", _ring(16)))
    },
    "switch6-ring-apart": partial(
        four_collectives, dims=_switch(6), algorithm="ring", skew=50_000
    ),
    # several dimensions
    **{
        f"{name}-{optimization}-{when}": partial(
            four_collectives, dims=dims, algorithm=algorithm, optimization=optimization, skew=skew
        )
        for name, dims, algorithm in (("two", _MIXED, "ring"), ("three", _CUBE, "halvingDoubling"))
        for optimization in ("baseline", "localBWAware")
        for when, skew in (("together", 0), ("apart", 90_000))
    },
    "some-dimensions-baseline": partial(some_dimensions, optimization="baseline"),
    "some-dimensions-localBWAware": partial(some_dimensions, optimization="localBWAware"),
    # steps
    "step-8-dp8": partial(step, axes={"dp": 8}, dp=_DP, norm_ns=60e3),
    "step-8-pp8": partial(step, axes={"pp": 8}, microbatches=16, norm_ns=60e3),
    "step-8-turns": partial(
        step, axes={"dp": 2, "pp": 4}, dp=_DP, norm_ns=60e3, transfer_ns=5e5, rest_ns=4e5
    ),
    "step-16-uneven": partial(
        step, axes={"dp": 4, "pp": 4}, forward_ns=[3e5, 4e5, 2.5e5, 3.3e5], dp=_DP, norm_ns=60e3
    ),
    "step-32-overlap": partial(
        step, axes={"dp": 8, "pp": 4}, dp=_DP, norm_ns=60e3, overlap=True
    ),
    "step-32-overlap-layer": partial(
        step, axes={"tp": 2, "dp": 4, "pp": 4}, tp=_TP, dp=_DP, overlap=True, layers=3
    ),
    "step-64-layer": partial(
        step, axes={"tp": 8, "dp": 4, "pp": 2}, tp=_TP, dp=_DP, norm_ns=60e3, layers=4
    ),
    "step-512-layer": partial(
        step, axes={"tp": 8, "dp": 8, "pp": 8}, tp=_TP, dp=_DP, norm_ns=60e3, layers=2
    ),
    "step-64-layer-symmetric": partial(
        step, axes={"tp": 8, "dp": 4, "pp": 2}, whole=False, tp=_TP, dp=_DP, norm_ns=60e3, layers=4
    ),
    "step-64-moe": partial(
        step, axes={"tp": 2, "ep": 4, "dp": 4, "pp": 2}, tp=_TP, ep=_EP, dp=_DP, layers=2
    ),
    "step-256-stage": partial(
        step, axes={"tp": 8, "dp": 4, "pp": 8}, microbatches=16, dp=_DP, norm_ns=60e3
    ),
    "step-1024-stage": partial(
        step, axes={"tp": 8, "dp": 16, "pp": 8}, microbatches=16, dp=_DP, norm_ns=60e3
    ),
    "step-1024-symmetric": partial(
        step, axes={"tp": 8, "dp": 16, "pp": 8}, whole=False, microbatches=16, dp=_DP, norm_ns=60e3
    ),
    "step-8192-symmetric": partial(
        step, axes={"tp": 8, "dp": 64, "pp": 16}, whole=False, microbatches=64, dp=_DP, norm_ns=60e3
    ),
    "step-8192-stage": partial(
        step, axes={"tp": 8, "dp": 64, "pp": 16}, microbatches=64, dp=_DP, norm_ns=60e3
    ),
}  # fmt: skip
