"""kill -9 at any moment, again and again: --resume completes the plan and nothing stays behind."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from spec.records import KernelRow
from spec.results import read_result_set
from spec.training_records import StepRow, TrainingRow

KILLS = 10


@pytest.mark.skipif(sys.platform != "linux", reason="waiting for orphans needs Linux")
def test_ten_kills_in_a_row_lose_at_most_the_case_in_flight(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.killed_runs", str(tmp_path), "7", str(KILLS)]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["signal"] for one in found["runs"]] == [9] * KILLS
    assert found["last"] == 0

    result = read_result_set(Path(found["path"]))
    assert result.manifest.status == "complete"
    kernels = [row.case_id for row in result.table(KernelRow)]
    training = [row.case_id for row in result.table(TrainingRow)]
    assert (len(kernels), len(training)) == (12, 4)
    assert len({*kernels, *training}) == result.manifest.finished == result.manifest.planned
    assert set(Counter(row.case_id for row in result.table(StepRow)).values()) == {3}
    # what was said to be on disk before a kill was never measured again
    said = Counter((tmp_path / "said").read_text().split("\n"))
    del said[""]
    assert {
        line for line, count in said.items() if count > 1 and not line.startswith("steps")
    } == set()
    # and nothing half-written, nor any part, is left
    names = {path.name for path in result.path.iterdir()}
    tables = {"kernels.csv", "training.csv", "steps.csv"}
    assert names == tables | {"manifest.json", "telemetry.parquet"}
