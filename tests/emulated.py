"""A made-up host as two emulated nodes: its network in closed form, its rows and manifest."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spec.calibration import Calibration, read_calibration
from spec.collective import COLLECTIVES, busbw_factor
from spec.files import write_json
from spec.manifest import Manifest
from spec.network_fit import NetworkFit
from spec.records import CollectiveRow
from tests.made_up import write_calibration
from tests.synthetic import Truth, manifest

BASE, SYSTEM = "4x-h200", "4x-h200-2x2"
# (ranks, stride, groups): of a node's two devices each belongs to a group of its own, or all to one
SPANS = ((4, 1, 1), (2, 2, 1), (2, 2, 2))


def across_us(kind: str, ranks: int, groups: int, nbytes: int) -> float:
    """The made-up network: 150 us, 8 GB/s; two groups at once get 6 GB/s each."""
    rate = 8e3 if groups == 1 else 6e3
    return 150.0 + nbytes * busbw_factor(kind, ranks) / rate


def rows() -> Iterator[CollectiveRow]:
    for kind in COLLECTIVES:
        yield from rows_of(kind)


def rows_of(kind: str) -> Iterator[CollectiveRow]:
    for ranks, stride, groups in SPANS:
        for power in range(10, 29, 2):
            time = across_us(kind, ranks, groups, 2**power)
            yield CollectiveRow(
                case_id=f"{kind}-{ranks}-{stride}-{groups}-{power}",
                role="judge" if power == 16 else "fit",
                collective=kind,
                backend="nccl",
                ranks=ranks,
                nodes=2,
                stride=stride,
                groups=groups,
                bytes=2**power,
                dtype="bf16",
                busbw_gbytes_per_s=2**power * busbw_factor(kind, ranks) / time / 1e3,
                repeats=20,
                std_us=0.0,
                **dict.fromkeys(("median_us", "p10_us", "p90_us", "min_us", "mean_us"), time),
            )


def with_network(folder: Path, network: NetworkFit) -> Calibration:
    """The made-up calibration with this network, also as `calibration.json` in the folder."""
    whole = write_calibration(folder / "made-up.json", system=SYSTEM)
    value = whole.model_dump(mode="json", by_alias=True)
    write_json(folder / "calibration.json", value | {"networks": [network.model_dump(mode="json")]})
    return read_calibration(folder / "calibration.json")


def about(system: str) -> Manifest:
    plain = manifest(system, "run-1", 4, Truth(), "2030-01-01T00:00:00Z")
    changes: dict[str, Any] = {"environment": {"NCCL_IB_DISABLE": "1"}}
    return plain.model_copy(update=changes | {"emulated_nodes": 2, "base_system": BASE})
