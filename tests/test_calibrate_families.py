"""Whole (model, TP) families left out: what is left out is not seen, and errors are listed."""

from pathlib import Path

from calibrate.fit import fit, systems
from calibrate.kernels.families import MODELS, _left_out
from spec.calibration import HeldOut
from spec.files import read_table, write_table
from spec.model import load_model
from spec.records import KernelRow
from tests.test_calibrate_fit import run_folder, write_small


def listed(results: Path) -> dict[str, HeldOut]:
    calibration = fit(systems(results)[0])
    return {one.split: one for one in calibration.held_out if one.model.startswith("kernel, all")}


def test_a_family_is_what_a_model_and_its_degree_set_at_any_number_of_tokens() -> None:
    out = _left_out(load_model("llama3-8b"), 2)
    assert ("gemm", "forward", (14336 * 2 // 2, 4096)) in out
    assert ("gemm", "forward", (14336 * 2, 4096)) not in out
    assert ("attention", "backward", (16, 4, 128)) in out
    assert ("rmsnorm", "forward", (4096,)) in out


def test_families_left_out_are_not_seen(tmp_path: Path) -> None:
    results = tmp_path / "results"
    write_small(results, ("gemm",))
    before = listed(results)
    assert len(before) == len(MODELS) + 1
    whole = before["whole (model, TP) families, each left out"]
    assert whole.rows == sum(one.rows for one in before.values()) - whole.rows
    assert whole.median_error < 0.05
    # one family alone made slower: nothing else can tell, so its own error shows all of it
    path = run_folder(results) / "kernels.csv"
    rows = read_table(path, KernelRow)
    slow = []
    for row in rows:
        kernel = row.kernel
        if kernel.dims[1:] == (28672, 4096):  # of Llama 3 8B at TP 1
            times = {
                name: getattr(row, name) * 1.5
                for name in ("median_us", "p10_us", "p90_us", "min_us", "mean_us")
            }
            row = row.model_copy(update=times)
        slow.append(row)
    write_table(path, KernelRow, slow)
    after = listed(results)
    small = next(split for split in before if split.startswith("llama3-8b"))
    assert after[small].p90_error > before[small].p90_error + 0.02
