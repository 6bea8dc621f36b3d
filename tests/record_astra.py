"""Runs real Astra-Sim on every case of `tests/astra_cases.py` and records what it printed.

    ASTRA_SIM=<binary> python -m tests.record_astra [CASE ...]

Without names, all cases that are not recorded yet or whose files have changed; `--all` reruns
every one. Under tests/data/astra, per case: `<case>.log.xz`, the raw log; `<case>.sha256.xz`, the
hash of each file that Astra-Sim read, as sha256sum prints them; and one line of `runs.json` with
version, binary, command, seconds and memory.
"""

import argparse
import hashlib
import json
import lzma
import sys
import tempfile
from pathlib import Path
from typing import Any

from simulate.astra import Files, find_binary, run
from simulate.astra.configs import read_network
from tests.astra_cases import CASES

DATA = Path(__file__).parent / "data" / "astra"
RUNS = DATA / "runs.json"
CHAKRA, NETWORK = "f37c2bb", "599a047"  # what 518bd51 was built with; it pins 0e3cd40 and e8c5119


def hashes(directory: Path) -> str:
    """sha256sum's lines for every file that Astra-Sim reads, in order."""
    files = Files(directory)
    paths = [files.network, files.system, files.memory]
    paths += [files.trace(rank) for rank in range(read_network(files.network).npus)]
    return "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(directory)}\n"
        for path in paths
    )


def unpack(path: Path) -> str:
    """The text of an .xz file."""
    return lzma.decompress(path.read_bytes()).decode()


def recorded() -> dict[str, dict[str, Any]]:
    """The recorded runs by case."""
    runs: dict[str, dict[str, Any]] = json.loads(RUNS.read_text()) if RUNS.exists() else {}
    return runs


def _record(name: str, runs: dict[str, dict[str, Any]], force: bool) -> str:
    binary = find_binary()
    if binary is None:
        raise SystemExit("set ASTRA_SIM to the analytical binary")
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "case"
        CASES[name](directory)
        lines = hashes(directory)
        kept = DATA / f"{name}.sha256.xz"
        if not force and name in runs and kept.exists() and unpack(kept) == lines:
            return "unchanged"
        log = Path(scratch) / "log"
        result = run(directory, binary, timeout_s=900, keep_log=log)
        (DATA / f"{name}.log.xz").write_bytes(lzma.compress(log.read_bytes(), preset=9))
        kept.write_bytes(lzma.compress(lines.encode(), preset=9))
        command = Files(directory).arguments()
    runs[name] = {
        "astra_sim": binary.commit,
        "chakra": CHAKRA,
        "astra_network_analytical": NETWORK,
        "binary_sha256": binary.sha256,
        "command": [binary.path.name, *command],
        "npus": len(result.cycles),
        "cycles": result.step_ns,
        "wall_s": round(result.wall_s, 2),
        "peak_gb": round(result.peak_bytes / 1e9, 2),
    }
    RUNS.write_text(json.dumps(dict(sorted(runs.items())), indent=1) + "\n")
    return f"{result.step_ns} cycles on {len(result.cycles)} ranks in {result.wall_s:.1f} s"


def main() -> None:
    """Record the named cases, or all that need it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--all", action="store_true", help="rerun what is recorded, too")
    options = parser.parse_args()
    unknown = set(options.cases) - set(CASES)
    if unknown:
        sys.exit(f"unknown case {min(unknown)}; known are {', '.join(CASES)}")
    DATA.mkdir(parents=True, exist_ok=True)
    runs = recorded()
    for name in options.cases or CASES:
        print(f"{name}: {_record(name, runs, options.all)}", flush=True)


if __name__ == "__main__":
    main()
