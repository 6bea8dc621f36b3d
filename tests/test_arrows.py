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
        "physics", "state", "evidence", "telemetry", "variability", "network", "host", "clock",
        "kernels", "report",
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
            nodes = ast.walk(ast.parse(path.read_text()))
            modules = [one.module or "" for one in nodes if isinstance(one, ast.ImportFrom)]
            ours = {".".join(one.split(".")[:2]) for one in modules if one.startswith(stage)}
            assert ours <= below, path


def test_code_that_a_stranger_could_run_is_never_loaded() -> None:
    for stage in ALLOWED:
        for path in sorted((ROOT / stage).rglob("*.py")):
            found = imports(path)
            assert not found & {"pickle", "marshal", "shelve"}, path
            if "joblib" in found:  # it runs work on several cores; its `load` would unpickle
                known = {"Parallel", "cpu_count", "delayed", "parallel_config"}
                assert names_from(path, "joblib") <= known
