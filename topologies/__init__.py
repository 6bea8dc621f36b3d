"""Nodes, fabrics and cooling as data, and how parallel groups lie on them.

`load_node` and `load_fabric` take the name of a file beside this one or the path of the user's own.
Nothing here imports networkx or numpy; only `topologies.graph` does, when a graph is built.
"""

from pathlib import Path
from typing import TypeVar

from spec.errors import UserError
from spec.files import parse, read_yaml
from spec.hardware import Cooling, Fabric, Node

HERE = Path(__file__).parent
NODES = HERE / "nodes"
FABRICS = HERE / "fabrics"
COOLING = HERE / "cooling"

Record = TypeVar("Record", Node, Fabric, Cooling)


def node_names() -> list[str]:
    """Names of the nodes that come with the project."""
    return sorted(path.stem for path in NODES.glob("*.yaml"))


def fabric_names() -> list[str]:
    """Names of the fabrics that come with the project."""
    return sorted(path.stem for path in FABRICS.glob("*.yaml"))


def cooling_names() -> list[str]:
    """Names of the kinds of cooling that come with the project."""
    return sorted(path.stem for path in COOLING.glob("*.yaml"))


def load_node(name_or_path: str | Path) -> Node:
    """A named node or the user's own YAML; UserError if it is neither or its content is wrong."""
    return _load(Node, NODES, name_or_path, "node")


def load_fabric(name_or_path: str | Path) -> Fabric:
    """A named fabric or the user's own YAML; UserError if it is neither or its content is wrong."""
    return _load(Fabric, FABRICS, name_or_path, "fabric")


def load_cooling(name_or_path: str | Path) -> Cooling:
    """A named cooling or the user's own YAML; UserError if it is neither or is wrong."""
    return _load(Cooling, COOLING, name_or_path, "cooling")


def _load(record: type[Record], folder: Path, name_or_path: str | Path, noun: str) -> Record:
    named = folder / f"{name_or_path}.yaml"
    if "/" not in str(name_or_path) and named.is_file():
        return parse(record, read_yaml(named, f"a {noun}"), f"{noun} {name_or_path}")
    path = Path(name_or_path)
    if not (path.is_file() or path.is_dir()):  # what is wrong with a folder reading it says
        names = ", ".join(sorted(known.stem for known in folder.glob("*.yaml")))
        raise UserError(
            f"{noun} {str(name_or_path)!r} is neither a file nor a named {noun}; "
            f"the named ones are {names}"
        )
    return parse(record, read_yaml(path, f"a {noun}"), str(path))
