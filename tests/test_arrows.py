"""Which stage may import which: the walls of the architecture."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "spec": {"spec"},
    "measure": {"measure", "spec"},
    "calibrate": {"calibrate", "spec", "reports"},
    "topologies": {"topologies", "spec"},
    "simulate": {"simulate", "spec", "topologies", "reports"},
    "reports": {"reports", "spec", "topologies"},
}
# within a stage each may import those before it; its commands, which are not listed, may import all
LAYERS = {
    "calibrate": (
        "alone", "apart", "physics", "state", "evidence", "telemetry", "variability", "network",
        "host", "clock", "kernels", "report",
    ),
    "measure": (
        "devices", "telemetry", "hosts", "timed", "megatron", "training", "store", "plans",
        "suites", "checks", "budget", "wanted", "campaign", "logs", "serve", "result_set",
    ),
    "simulate": (
        "cost", "hardware", "step", "memory", "inputs", "plans", "power", "placement",
        "projection", "astra", "validation", "series", "twins",
    ),
}  # fmt: skip
# what only measuring needs must not be needed by anything else
HEAVY = {"torch", "megatron", "zeus", "pynvml", "amdsmi", "psutil"}


def imports(path: Path) -> set[str]:
    """Top-level names of all modules that a file imports, lazily or not."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def imported_from(stage: str, tree: ast.AST) -> set[str]:
    """A stage's own folders and files that code imports, as `stage.folder`; not for types alone."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == stage:
            found.add(".".join(f"{node.module}.{node.names[0].name}".split(".")[:2]))
        found |= imported_from(stage, node)
    return found


def names_from(path: Path, module: str) -> set[str]:
    """Names that a file imports from a module; the module's own name where it imports all of it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == module}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == module:
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("stage", sorted(ALLOWED))
def test_import_arrows(stage: str) -> None:
    for path in sorted((ROOT / stage).rglob("*.py")):
        found = imports(path)
        assert found & set(ALLOWED) <= ALLOWED[stage], path
        if stage != "measure":
            assert not found & HEAVY, path


@pytest.mark.parametrize("stage", sorted(LAYERS))
def test_import_arrows_within_a_stage(stage: str) -> None:
    folder, layers = ROOT / stage, LAYERS[stage]
    assert {path.name for path in folder.iterdir() if any(path.glob("*.py"))} <= set(layers)
    for number, layer in enumerate(layers):
        below = {f"{stage}.{one}" for one in layers[: number + 1]}
        file = folder / f"{layer}.py"
        for path in [file] if file.is_file() else sorted((folder / layer).rglob("*.py")):
            assert imported_from(stage, ast.parse(path.read_text())) <= below, path


def test_code_that_a_stranger_could_run_is_never_loaded() -> None:
    for stage in ALLOWED:
        for path in sorted((ROOT / stage).rglob("*.py")):
            found = imports(path)
            assert not found & {"pickle", "marshal", "shelve"}, path
            if "joblib" in found:  # it runs work on several cores; its `load` would unpickle
                known = {"Parallel", "cpu_count", "delayed", "parallel_config"}
                assert names_from(path, "joblib") <= known
