"""Reports: everything of their JSON is on the page, nothing from a stranger runs."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from reports.bars import Bar, bars, ticks
from reports.brief import MOST_LETTERS, brief
from reports.page import Detail, Section, Table, new_figure, page, svg
from reports.projection import render as render_projection
from reports.validation import render as render_validation
from simulate.project import main
from spec.files import write_json
from tests.made_up import calibration_json

HOSTILE = "<script>alert('&')</script>"


class Page(HTMLParser):
    """Collects tags and text, and refuses what is not closed."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "hr", "path", "use", "rect"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for _, value in attrs:
            assert "://" not in (value or "") or "www.w3.org" in value

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def projection(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("projection")
    write_json(folder / "calibration.json", calibration_json())
    words = ["--calibration", str(folder / "calibration.json"), "--gpus", "64", "--tp", "8"]
    words += ["--engine", "timeline", "--scaling", "1,8,64", "--out", str(folder / "out")]
    assert main([*words, "--json", str(folder / "value.json")]) == 0
    assert (folder / "out" / "report.html").read_text().startswith("<!doctype html>")
    value: dict[str, Any] = json.loads((folder / "value.json").read_text())
    return value


def test_projection_page(projection: dict[str, Any]) -> None:
    page = Page(render_projection(projection))
    assert not page.open
    text = " ".join(page.words)
    for parameter in projection["provenance"]:
        assert parameter["name"] in text
    for words in (*projection["warnings"], "does not fit 8 GPUs", "simulated", "assumed"):
        assert words in text
    assert page.tags.count("svg") >= 4
    assert "script" not in page.tags


def test_a_projection_loads_nothing_slow(tmp_path: Path) -> None:
    """What takes longer to import than a projection takes."""
    write_json(tmp_path / "calibration.json", calibration_json())
    words = ["--calibration", str(tmp_path / "calibration.json"), "--gpus", "64", "--tp", "8"]
    code = (
        "import sys; from simulate.project import main; main(sys.argv[1:]); "
        "print(*{'matplotlib', 'networkx', 'spec.records'} & sys.modules.keys(), file=sys.stderr)"
    )
    words = [sys.executable, "-c", code, *words, "--engine", "timeline", "--out", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stderr.split() == []


def test_strangers_words_are_only_words(projection: dict[str, Any]) -> None:
    value = json.loads(json.dumps(projection))
    value["warnings"].append(HOSTILE)
    value["inputs"]["model"]["name"] = HOSTILE
    value["provenance"][0]["detail"] = HOSTILE
    value["sensitivity"][0]["factor"] = HOSTILE
    page = Page(render_projection(value))
    assert "script" not in page.tags
    assert HOSTILE in " ".join(page.words)


def case(name: str, real: float, predicted: float, **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "kind": "TP",
        "model": "m",
        "gpus": 4,
        "real_s": real,
        "predicted_s": {
            "median": predicted,
            "low": predicted * 0.9,
            "high": predicted * 1.1,
        },
        "error": predicted / real - 1,
        "inside_interval": True,
        "breakdown_s": {"compute": predicted},
        "modelled_share": 0.5,
        **more,
    }


def test_validation_page() -> None:
    from simulate.validation.scores import summarise

    cases = [case(HOSTILE, 1.0, 1.05, baseline_s=1.3), case("b", 2.0, 1.9)]
    summary = summarise(cases)
    value = {"cases": cases, "summary": {"all": summary, "TP": summary}}
    page = Page(render_validation(value))
    text = " ".join(page.words)
    assert "script" not in page.tags
    assert HOSTILE in text
    for words in ("5.0%", "30.0%", "Clopper-Pearson", "simulated", "measured"):
        assert words in text


def test_sections_of_one_group_are_listed_once() -> None:
    """Under its name, which leads to the first of them; escaped as any other text."""
    sections = [Section("Systems"), Section("<a>: Errors", group="<a>")]
    sections += [Section("<a>: Memory", group="<a>"), Section("Numbers")]
    html = page("Many", sections)
    listed = html[html.index("<nav") : html.index("</nav>")]
    assert listed.count("<li>") == 3
    assert '<a href="#a-errors">&lt;a&gt;</a>' in listed
    assert "<h2>&lt;a&gt;: Memory</h2>" in html


def test_a_step_that_waited_is_known_by_its_power() -> None:
    from simulate.validation.scores import summarise

    def words(real_s: float, real_w: float) -> str:
        power = {"median": 500.0, "low": 480.0, "high": 520.0}
        cases = [case("a", real_s, 1.0, real_power_w=real_w, predicted_power_w=power)]
        summary = summarise(cases)
        value = {"cases": cases, "summary": {"all": summary, "TP": summary}}
        return " ".join(Page(render_validation(value)).words)

    assert "GPUs drew 20% less than simulated, as where they wait" in words(1.3, 400.0)
    assert "less than simulated" not in words(1.3, 480.0)  # as far as power is off anyway
    assert "less than simulated" not in words(0.8, 400.0)  # nothing waited


def test_judged_forecast_says_when_and_from_what() -> None:
    from simulate.validation.scores import summarise

    cases = [case("a", 1.0, 1.05)]
    forecast = {
        "created": "2026-01-01T00:00:00Z",
        "calibration": {"path": "c.json", "sha256": "0" * 64},
        "forecast_cases": 2,
        "never_measured": ["b"],
        "repeats": "2 repeats on other devices not counted",
    }
    value = {"cases": cases, "summary": {"all": summarise(cases)}, "forecast": forecast}
    text = " ".join(Page(render_validation(value)).words)
    assert "2026-01-01T00:00:00Z" in text
    assert "1 never measured: b. 2 repeats on other devices not counted." in text


RUNS = ", ".join(f"{system}/2026112{day}-083154/kernels.csv" for system in "ab" for day in range(9))


def test_lists_of_files_are_counted() -> None:
    assert brief(f"spread; {RUNS} (9 rows): gemm") == (
        "spread; kernels.csv of 18 runs on a and b (9 rows): gemm"
    )
    two = "a/20261121-083154/kernels.csv, a/20261122-083154/kernels.csv (2 rows)"
    assert brief(two) == two


def test_long_texts_are_cut_at_a_word() -> None:
    words = "word, " * 100
    cut = brief(words)
    assert len(cut) <= MOST_LETTERS + 2
    assert cut.endswith("word\u00a0…")
    assert brief("x" * 500).startswith("x" * 100)


def test_a_detail_folds_and_loses_nothing() -> None:
    rows = [("long", 1.0, Detail(f"{RUNS} {HOSTILE}")), ("short", None, Detail("a datasheet"))]
    html = page("Details", [Section("All", [Table(("name", "value", "from"), rows)])])
    read = Page(html)
    assert not read.open
    assert read.tags.count("details") == read.tags.count("summary") == 1
    assert "script" not in read.tags
    assert f"kernels.csv of 18 runs on a and b {HOSTILE}" in read.words
    assert f"{RUNS} {HOSTILE}" in " ".join(read.words)
    assert " ".join(read.words).count("a datasheet") == 1


def test_every_parameter_s_origin_is_whole(projection: dict[str, Any]) -> None:
    text = " ".join(" ".join(Page(render_projection(projection)).words).split())
    for parameter in projection["provenance"]:
        assert " ".join(parameter["detail"].split()) in text


def test_a_header_is_set_as_its_column() -> None:
    """Shares in percent like numbers, and the dash that stands for one; words are not."""
    rows = [("a", 1.5, 2, "-3.5%", "4 % of it"), ("b", None, 3, "-", "-")]
    columns = ("name", "low", "count", "share", "words")
    html = page("Set", [Section("All", [Table(columns, rows)])])
    assert re.findall(r"<th scope=\"col\"([^>]*)>(\w+)", html) == [
        ("", "name"),
        (' class="number"', "low"),
        (' class="number"', "count"),
        (' class="number"', "share"),
        ("", "words"),
    ]


def test_a_wide_figure_is_not_shrunk_until_it_cannot_be_read() -> None:
    """On a phone: text of 9 points takes 10 pixels at least, and the figure scrolls sideways."""
    for width in (5.0, 10.0):
        drawn = svg(new_figure(width)[0], "wide")
        least = re.match(r'<svg style="min-width:(\d+)px"', drawn)
        assert least
        assert int(least[1]) * 9 / (72 * width) >= 10


def test_drawn_text_follows_the_page() -> None:
    """Legends and annotations too, which matplotlib by itself draws black, on white frames."""
    figure, (axes,) = new_figure()
    axes.plot([0, 1], [0, 1], label="a line")
    axes.annotate("a point", (0, 0))
    axes.legend(title="lines")
    drawn = svg(figure, "drawn")
    texts = re.findall(r"<text style=\"([^\"]*)\"[^>]*>([^<]*)", drawn)
    assert {"a line", "a point", "lines", "0.6"} <= {words for _, words in texts}
    assert all("fill: currentColor" in style for style, _ in texts)
    assert "#ffffff" not in drawn


def drawn_bars(drawn: str) -> list[tuple[float, float]]:
    """Left end and width of each bar."""
    found = re.findall(r'<rect x="([0-9.]+)" y="[0-9.]+" width="([0-9.]+)"', drawn)
    return [(float(x), float(width)) for x, width in found]


def test_bars_are_to_scale() -> None:
    rows = [
        Bar("longest", 0, 4),
        Bar("range", 3, 1),
        Bar("below", 0, -2, mark=2),
        Bar(HOSTILE, 0, 0),
    ]
    drawn = bars(rows, "seconds", line=2)
    (zero, four), (one, two), (below, less), (none, nothing) = drawn_bars(drawn)
    assert two == less == pytest.approx(four / 2, abs=0.2)
    assert one == pytest.approx(zero + four / 4, abs=0.2)
    assert below + less == pytest.approx(zero, abs=0.2)
    assert (none, nothing) == (zero, 0)
    middles = re.findall(r'<circle cx="([0-9.]+)"|M([0-9.]+) 4V[0-9.]+" stroke="#', drawn)
    assert [float(mark or line) for mark, line in middles] == [
        pytest.approx(zero + four / 2, abs=0.2)
    ] * 2
    page = Page(drawn)
    assert not page.open
    assert {"longest", "below", HOSTILE, "seconds", "-2", "0", "4"} <= set(page.words)


def test_bars_of_anything() -> None:
    """Nothing, one point, more rows than fit: a drawing all the same."""
    for rows in ([], [Bar("a", 0, 0)], [Bar("a", 5, 5)], [Bar("a", -3, 0)], [Bar("a", 0, 1e-15)]):
        assert len(drawn_bars(bars(rows, "s"))) == len(rows)
    many = bars([Bar(f"stage {stage}", 0, stage) for stage in range(1, 129)], "GiB")
    assert len(drawn_bars(many)) == 128
    assert 20 <= len(re.findall(">stage ", many)) <= 24


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (1.7, 3.3, [1.8, 2.0, 2.2, 2.4, 2.6, 2.8, 3.0, 3.2]),
        (-30, 140, [-20, 0, 20, 40, 60, 80, 100, 120, 140]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_every_report_is_one_file() -> None:
    template = (Path(__file__).parent.parent / "reports" / "page.html").read_text()
    assert "http" not in template
    assert "src=" not in template
