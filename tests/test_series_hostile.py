"""Files of series that nobody prepared: projected with what was assumed, or refused in words."""

import csv
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulate import validate
from simulate.series.validation import series_validation
from spec.calibration import Calibration
from spec.command import run
from spec.errors import UserError
from tests.made_up import write_calibration

BASE = {
    "row_id": "a",
    "pair_id": "p",
    "source": "some/where README.md",
    "model": "Llama 3 8B",
    "seq_len": "4096",
    "global_batch": "128",
    "micro_batch": "1",
    "gpus": "8",
    "gpu_type": "H100 80GB SXM",
    "tp": "2",
    "pp": "1",
    "precision": "bf16",
    "metric": "tokens/s/GPU",
    "value": "9000",
}
LARGER = {"row_id": "b", "gpus": "64", "global_batch": "1024"}
DEEPSEEK = {"model": "DeepSeek-V3.2 671B", "layers": "61", "hidden": "7168", "ep": "8", "pp": "1"}
LONG = {"seq_len": "131072", "cp": "8", "tp": "4", "gpus": "32", "global_batch": "4"}
LONG |= {"value": "2000", "recompute": "full"}
ODD = ("", "0", "-1", "3", "7", "64", "1,024", "3.2k", "1e9", "nan", "inf", "1/2", "\uff18", "many")
ODD += ("~8 (4)", "TP8", "128x8")
WORDS = {
    "gpu_type": ("A100 40GB", "H20", "GB200", "MI300X (4 per node)", "V100", "H100 1W"),
    "interconnect": ("8x 400Gb/s per node", "EFA 3200 Gbps", "TCP", "0 Gb/s", "8x 800G"),
    "precision": ("fp8", "nvfp4", "fp32", ""),
    "sharding": ("FSDP FULL_SHARD", "ZeRO-2", "DDP", "HSDP"),
    "metric": ("step_time_s", "step time (ms)", "MFU_%", "samples/s", "speed"),
    "model": ("GPT-3 175B", "Mixtral 8x22B", "nobody's 3B", ""),
    "source": ("mlcommons/training_results_v5.0", "alibaba/Megatron-LLaMA", "NeMo"),
}
INTS = ("gpus", "tp", "pp", "vpp", "cp", "ep", "global_batch", "micro_batch", "layers", "heads")


def judge(tmp_path: Path, rows: list[dict[str, str]], capsys: Any) -> tuple[int, str, str]:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as out:
        lines = csv.DictWriter(out, list(dict.fromkeys(k for one in rows for k in one)), "")
        lines.writeheader()
        lines.writerows(rows)
    code = run(validate.main, ["--series", str(path), "--json"])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture(autouse=True)
def _calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_calibration(tmp_path / "results" / "4x-h200" / "calibration.json")


@pytest.mark.parametrize(
    ("both", "larger", "assumed"),
    [
        ({"model": "meta-llama/Meta-Llama-3.1-8B-Instruct"}, {}, "shape of meta-llama"),
        (dict.fromkeys(("tp", "cp", "vpp", "layers", "recompute"), "NaN"), {}, "recompute"),
        (dict.fromkeys(("seq_len", "global_batch", "micro_batch"), ""), {}, "global batch"),
        ({"tp": "", "pp": "", "micro_batch": ""}, {}, "searched"),
        ({"precision": "fp8", "gpu_type": "A100 80GB", "value": "3000"}, {}, "no 8-bit"),
        ({"precision": "nvfp4", "gpu_type": "GB300"}, {}, "recompute"),
        ({"precision": "nvfp4"}, {}, "no 4-bit"),
        ({"precision": "nvfp4", "gpu_type": "B200", "value": "40000"}, {}, "recompute"),
        ({"model": "Qwen2.5-72B", "tp": "8", "value": "900"}, {}, "shape of Qwen2.5-72B"),
        ({"gpu_type": "H800"}, {}, "fabric"),
        (LONG, {"gpus": "256", "global_batch": "32"}, "fabric"),
        ({"pp": "2", "vpp": "5"}, {}, "vpp"),
        ({"model": "Mixtral 8x7B", "ep": "7", "value": "4000"}, {}, "ep"),
        ({}, {"gpus": "98304", "global_batch": "98304"}, "fabric"),
        ({}, {"micro_batch": "1024", "global_batch": "1", "value": "200"}, "global batch is"),
    ],
)
def test_projected_with_what_was_assumed(
    tmp_path: Path, capsys: Any, both: dict[str, str], larger: dict[str, str], assumed: str
) -> None:
    rows = [BASE | both, BASE | LARGER | both | larger]
    code, out, err = judge(tmp_path, rows, capsys)
    assert code == 0, err
    (case,) = json.loads(out)["cases"]
    assert any(assumed in sentence for sentence in case["assumed"])
    time = case["predicted_s"]
    assert 0 < time["low"] < time["median"] / 1.03 < time["high"] < 20 * time["median"]


@pytest.mark.parametrize(
    ("both", "larger", "words"),
    [
        ({"gpu_type": "TPU v5p"}, {}, "gpu_type 'TPU v5p' is no known GPU"),
        ({"gpu_type": ""}, {}, "gpu_type is not printed"),
        ({"gpus": "-8"}, {"gpus": "-9"}, "gpus '-8' is no number of GPUs"),
        ({"value": "inf"}, {}, "value 'inf' gives no step time"),
        ({"metric": "speed"}, {}, "metric 'speed'"),
        ({"metric": "MFU"}, {}, "of the GPU's bf16 peak"),
        ({"value": "1e12"}, {}, "of the GPU's bf16 peak"),
        ({"value": "1e-9"}, {}, "of the GPU's bf16 peak"),
        (DEEPSEEK, {}, "the experts of model 'DeepSeek-V3.2 671B' are not known"),
        ({"model": "bigscience/bloom-7b1"}, {}, "shape of model"),
        ({"tp": "64", "gpus": "64"}, {"gpus": "128"}, "tp 64 does not divide heads 32"),
        ({}, {"gpus": "8"}, "an anchor whose series has no row to project; add one on more"),
        ({}, {"pair_id": "q"}, "in a column use, or give --anchor none"),
        ({"use": "anchor"}, {}, "mark those that are to be projected test in the column use"),
        ({"pair_id": ""}, {}, "no pair_id"),
        ({}, {"value": "NaN"}, "value 'NaN' gives no step time"),
    ],
)
def test_refused_in_one_sentence(
    tmp_path: Path, capsys: Any, both: dict[str, str], larger: dict[str, str], words: str
) -> None:
    code, out, err = judge(tmp_path, [BASE | both, BASE | LARGER | both | larger], capsys)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_an_anchor_that_is_another_run_is_left_out(tmp_path: Path, capsys: Any) -> None:
    """Its time is a hundred times that of the other one: half the rows, not half of both."""
    odd = BASE | {"row_id": "odd", "value": "90"}
    code, out, err = judge(tmp_path, [BASE, odd, BASE | LARGER], capsys)
    assert code == 0, err
    judged = json.loads(out)
    (case,) = judged["cases"]
    assert [one["id"] for one in judged["skipped"]] == ["odd"]
    assert case["anchored"]
    assert case["predicted_s"]["high"] < 2 * case["predicted_s"]["median"]
    code, out, err = judge(tmp_path, [odd, BASE | LARGER], capsys)
    assert code == 0, err
    assert not json.loads(out)["cases"][0]["anchored"]


@st.composite
def misprinted(draw: st.DrawFn) -> dict[str, str]:
    """Cells that a source might have printed otherwise, or wrong."""
    names = draw(st.lists(st.sampled_from((*INTS, *WORDS, "value")), max_size=3, unique=True))
    return {name: draw(st.sampled_from(WORDS.get(name, ODD))) for name in names}


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(misprinted(), misprinted(), st.integers(1, 10))
def test_every_row_is_projected_or_refused(
    tmp_path: Path, both: dict[str, str], later: dict[str, str], doublings: int
) -> None:
    """Weak scaling to 8,192 GPUs with whatever was misprinted; never a traceback."""
    larger = {"row_id": "b", "gpus": str(8 * 2**doublings), "global_batch": str(128 * 2**doublings)}
    rows = [BASE | both, BASE | larger | both | later]
    names = list(dict.fromkeys(name for one in rows for name in one))
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as out:
        lines = csv.DictWriter(out, names, "")
        lines.writeheader()
        lines.writerows(rows)
    text = (tmp_path / "results" / "4x-h200" / "calibration.json").read_text()
    try:
        judged = series_validation(path, Calibration.model_validate_json(text))
    except UserError:
        return
    fitted = [one["id"] for series in judged["series"].values() for one in series["anchors"]]
    listed = [one["id"] for one in (*judged["cases"], *judged["skipped"])]
    assert {*fitted, *listed} == {"a", "b"}
    for case in judged["cases"]:
        time = case["predicted_s"]
        assert 0 < time["low"] < time["median"] < time["high"] < 50 * time["median"]


def test_weak_scaling_gets_no_faster(tmp_path: Path, capsys: Any) -> None:
    """As much work for each GPU: no step of more of them is shorter, up to 8,192."""
    scales = [2**doublings for doublings in range(1, 11)]
    rows = [
        BASE | {"row_id": str(k), "gpus": str(8 * k), "global_batch": str(128 * k)} for k in scales
    ]
    code, out, err = judge(tmp_path, [BASE, *rows], capsys)
    assert code == 0, err
    cases = sorted(json.loads(out)["cases"], key=lambda case: case["gpus"])
    times = [case["predicted_s"] for case in cases]
    assert [case["gpus"] for case in cases] == [8 * k for k in scales]
    for near, far in itertools.pairwise(times):
        assert near["median"] * 0.999 < far["median"] < 1.2 * near["median"]
        assert far["high"] / far["low"] > near["high"] / near["low"]


def test_what_is_held_at_the_peak_is_above_it(tmp_path: Path, capsys: Any) -> None:
    """Three sequences on eight GPUs ask for more than the peak of thirty-two: no time is at it."""
    few = {"global_batch": "3", "tp": "", "vpp": ""}
    code, out, err = judge(
        tmp_path, [BASE | few, BASE | few | {"row_id": "b", "gpus": "32"}], capsys
    )
    assert code == 0, err
    (case,) = json.loads(out)["cases"]
    time = case["predicted_s"]
    assert time["low"] < time["median"] < time["high"]
    # of a half normal, 50 and 95 % lie at 0.674 and 1.960 sd above it
    logs = [math.log(time[name] / time["low"]) for name in ("median", "high")]
    assert logs[0] / logs[1] == pytest.approx(0.6745 / 1.9600, rel=1e-3)
