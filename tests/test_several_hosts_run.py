"""Runs over two hosts that are processes of this machine, as torchrun starts them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from measure.hosts.workers import free_port
from spec.model import load_model
from spec.parallelism import Parallelism
from spec.records import CollectiveRow
from spec.results import find_result_sets
from spec.training_records import StepRow, TrainingConfig, TrainingRow

ROOT = Path(__file__).parent.parent


def launch(tmp_path: Path, words: list[str]) -> list["subprocess.Popen[str]"]:
    """Two hosts, as torchrun with one process on each starts them, a device more than needed."""
    port = str(free_port())
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "measure.run",
                "--kind",
                "cpu:2",
                "--out",
                str(tmp_path),
                *words,
            ],
            cwd=ROOT,
            env=os.environ
            | {"RANK": str(node), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]


def test_two_hosts_measure_collectives_and_steps_over_gloo(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    split = Parallelism(tp=2, dp=2, sequence_parallel=True, global_batch=2)
    model = load_model("tiny").resized(layers=2, seq_len=64)
    step = TrainingConfig.of("step", model, split, nodes=2)
    plan = {
        "kernels": [{"op": "gemm", "shape": "m=64 n=64 k=64"}],
        "collectives": [
            {"collective": "all_reduce", "ranks": 4, "bytes": 4096},
            {"collective": "send_recv", "ranks": 2, "bytes": 4096, "groups": 2},
        ],
        "training": [step.model_dump(mode="json")],
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    suites = "kernels,collectives,training"
    first, second = launch(
        tmp_path / "out", ["--suite", suites, "--quick", "--plan", str(tmp_path / "plan.yaml")]
    )
    for process in (first, second):
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
    (result,) = find_result_sets(tmp_path / "out")
    assert result.manifest.system == "2x-cpu-2-core"
    assert [len(host.devices) for host in result.manifest.hosts] == [2, 2]
    assert (result.manifest.status, result.manifest.finished) == ("complete", 4)
    assert [(row.ranks, row.nodes) for row in result.table(CollectiveRow)] == [(4, 2), (2, 1)]
    (row,) = result.table(TrainingRow)
    assert (row.status, row.nodes, row.tp, row.dp) == ("done", 2, 2, 2)
    assert len(result.table(StepRow)) == row.steps
    sampled = pq.read_table(result.path / "telemetry.parquet", columns=["device"]).to_pydict()
    assert set(sampled["device"]) >= {0, 1, 2, 3}
    assert sorted(path.name for path in result.path.iterdir()) == [
        "collectives.csv",
        "kernels.csv",
        "links.json",
        "manifest.json",
        "steps.csv",
        "telemetry.parquet",
        "training.csv",
    ]


def test_the_first_host_goes_on_when_the_other_is_killed(tmp_path: Path) -> None:
    plan = {
        "collectives": [
            {"collective": "all_reduce", "ranks": ranks, "bytes": 2**size}
            for size in (26, 25, 24, 23)
            for ranks in (4,)
        ]
        + [{"collective": "all_reduce", "ranks": 2, "bytes": 4096}]
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    words = ["--suite", "collectives", "--plan", str(tmp_path / "plan.yaml"), "--progress"]
    first, second = launch(tmp_path / "out", words)
    assert first.stderr is not None
    for line in iter(lambda: first.stderr.read(1), ""):  # type: ignore[union-attr]
        if line == "%":  # the bar: cases begin
            break
    second.send_signal(signal.SIGKILL)
    second.communicate()
    _, said = first.communicate(timeout=300)
    assert first.returncode == 0, said
    (result,) = find_result_sets(tmp_path / "out")
    assert [row.ranks for row in result.table(CollectiveRow)][-1] == 2
    assert any("host 1 was lost" in note for note in result.manifest.notes)
    reasons = set(result.manifest.skipped.values())
    assert "needs 4 devices; 2 are left after a host was lost" in reasons
