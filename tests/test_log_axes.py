"""Logarithmic axes: few round labels that do not lie over each other, wide or narrow."""

import re
from itertools import pairwise
from math import log10

import pytest

from reports.log_axes import MOST, label_log_axes, labels, log_ticks, spaced
from reports.page import new_figure, svg


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (4e3, 2e10, [1e4, 1e6, 1e8, 1e10]),
        (5, 2e4, [10, 100, 1000, 10000]),
        (0.03, 4, [0.03, 0.1, 0.3, 1, 3]),
        (4, 30, [5, 10, 20]),
        (5.5, 18, [10, 15]),
        (32.5, 35.4, [33, 34, 35]),
        (0.9, 110, [1, 10, 100]),
    ],
)
def test_marks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert log_ticks(low, high) == pytest.approx(expected)


def test_marks_are_few_and_apart() -> None:
    for start in range(100, 1000, 37):
        for decades in (0.02, 0.1, 0.3, 0.7, 1, 1.5, 1.99, 2, 2.7, 4, 9):
            low, high = start / 100, start / 100 * 10**decades
            marks = log_ticks(low, high)
            assert 2 <= len(marks) <= MOST, (low, high)
            assert low <= marks[0]
            assert marks[-1] <= high
            assert all(log10(b / a) > decades / 15 for a, b in pairwise(marks)), (low, high)


def test_marks_are_written_in_one_way() -> None:
    assert labels([0.05, 1, 20000]) == ["0.05", "1", "20,000"]
    assert labels([100, 1e5]) == ["$10^{2}$", "$10^{5}$"]
    assert labels([5e7, 1e8]) == [r"$5\times10^{7}$", "$10^{8}$"]


def test_what_is_drawn_is_labelled_once() -> None:
    figure, (axes,) = new_figure()
    axes.plot([13, 36], [13, 36])
    label_log_axes(axes, "xy")
    words = re.findall(r"<text[^>]*>([^<]*)</text>", svg(figure, "narrow"))
    assert sorted(words) == ["20", "20", "30", "30"]


def test_sizes_of_a_series_are_named_where_there_is_room() -> None:
    assert spaced([8]) == [8]
    assert spaced([1, 8, 64, 512]) == [1, 8, 64, 512]
    assert spaced([8192, 1000, 1008, 64]) == [64, 1000, 8192]
    powers_of_two = [2**power for power in range(3, 15)]
    assert spaced(powers_of_two) == [8, 64, 512, 16384]
    assert len(spaced(powers_of_two, 11)) == len(powers_of_two)
