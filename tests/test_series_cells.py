"""Cells as people write them: numbers, metrics, words and names of published rows."""

import pytest

from simulate.series_plan import TooLittle, plan
from simulate.series_rows import metric_kind, metric_of, number, whole
from tests.test_series import WHOLE, row


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("5600 (5450)", 5600),
        ("~5600", 5600),
        ("\u2248 5,600*", 5600),
        ("38.5%", 38.5),
        ("10.0s", 10),
        ("10.0 \u00b1 0.2", 10),
        ("10.0 +/- 0.2 s", 10),
        ("5600 tokens/s/GPU", 5600),
        ("<70 billion params", 7e10),
        ("8.03B", 8.03e9),
        ("2k", 2000),
        ("3,0", None),
        ("12,34", None),
        ("1/2", None),
        ("10-12", None),
        ("10 minutes", None),
        ("8 nodes", None),
        ("fp8", None),
    ],
)
def test_the_first_number_of_a_cell_counts(cell: str, value: float | None) -> None:
    """What stands around it is dropped where it cannot change it, else the cell is not read."""
    assert number(cell) == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    ("name", "cell", "value"),
    [
        ("tp", "TP8", 8),
        ("tp", "tp=8", 8),
        ("tp", "8 (intra-node)", 8),
        ("tp", "PP8", None),
        ("global_batch", "768 seqs", 768),
        ("gpus", "1024 GPUs", 1024),
        ("gpus", "128x8", 1024),
        ("tp", "128x8", None),
        ("seq_len", "4k", 4096),
        ("global_batch", "4k", 4000),
        ("layers", "3.5", None),
    ],
)
def test_whole_numbers_go_by_their_column(name: str, cell: str, value: int | None) -> None:
    """Its name may stand before them, a k is 1,024 in a length, GPUs may be a product."""
    assert whole(cell, name) == value
    assert row(**{name: cell}).whole(name) == value


def test_what_is_not_understood_is_said() -> None:
    """Among what is assumed, or in the reason; not of what counts as not printed."""
    said = "vpp 'xyz' not understood, taken as not printed"
    assert said in plan(row(vpp="xyz")).assumed
    assert not any("understood" in one for one in plan(row(vpp="n/a", cp="-1", ep="0")).assumed)
    with pytest.raises(TooLittle, match="gpus '3,0' not understood"):
        plan(row(gpus="3,0"))


def test_a_batch_in_tokens_is_divided_by_the_length() -> None:
    """Where its cell says tokens, or as many sequences would be too much for any step."""
    for text in ("4194304", "131072 tokens"):
        one = plan(row(global_batch=text, value="60"))
        assert one.parallelism.global_batch == int(text.split()[0]) // int(WHOLE["seq_len"])
        assert any("is in tokens" in said for said in one.assumed)
    assert plan(row(global_batch="4096", value="60")).parallelism.global_batch == 4096


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("TFLOPS per GPU", "model"),
        ("TFLOP/s per device", "model"),
        ("elapsed time per iteration (ms)", "step"),
        ("avg step time (s)", "step"),
        ("sec/iter", "step"),
        ("tokens/sec/device", "tokens"),
        ("tok/s/GPU", "tokens"),
        ("TGS", "tokens"),
        ("tokens/GPU/s", "tokens"),
        ("tokens per second per GPU", "tokens"),
        ("total tokens/s", "tokens_total"),
        ("samples/s/GPU", "samples_gpu"),
        ("tokens/s total (k)", None),
        ("tokens/s/GPU (k)", None),
        ("block_step_time_s", None),
        ("step time (min)", None),
        ("aggregate TFLOP/s", None),
    ],
)
def test_metrics_by_the_names_that_logs_give_them(name: str, kind: str | None) -> None:
    """Thousands, minutes and a block's time are other metrics."""
    assert metric_kind(name) == kind


def test_a_metrics_unit_may_stand_in_its_cell() -> None:
    """Milliseconds and per cent, and a GPU's samples are its share of the batch."""
    found = metric_of(row(value="850 ms"))
    assert found is not None
    assert found.value * found.unit == pytest.approx(0.85)
    found = metric_of(row(metric="MFU", value="0.5%"))
    assert found is not None
    assert found.unit == 0.01
    log = row(metric="elapsed time per iteration (ms)", value="1000.0")
    assert plan(log).real_s == pytest.approx(1.0)
    each = plan(row(metric="samples/s/GPU", value="8"))
    assert each.real_s == pytest.approx(1.0)
