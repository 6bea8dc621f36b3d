"""Rows of published series as they stand in a CSV: cells cleaned.

The columns are those of `training.csv`; unknown ones are ignored, missing ones and cells that are
no number (`SeriesRow.unread`) count as not printed. Nothing is filled in here, see
`simulate.series.plan`.
"""

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

from simulate.series.metric_names import metric_kind
from spec.errors import UserError
from spec.files import read_text
from spec.model import MOST_LAYERS

NEEDED = ("row_id", "metric", "value")
METRICS = (("metric", "value"), ("metric2", "value2"), ("metric3", "value3"))
USES = ("anchor", "test")
NOTHING = {"", "-", "?", "n/a", "na", "nan", "none", "null", "unknown", "not stated"}
# Beyond these a misprint is likelier than a model or a cluster.
LARGEST = {
    "gpus": 2**20,
    "layers": MOST_LAYERS,
    "hidden": 2**18,
    "ffn_hidden": 2**20,
    "heads": 2**12,
    "vocab": 2**23,
    "seq_len": 2**24,
    "global_batch": 2**28,  # tokens, perhaps: `.choices.in_sequences`
    "micro_batch": 2**16,
    "grad_accum": 2**16,
    "tp": 2**10,
    "pp": 2**10,
    "vpp": 2**10,
    "cp": 2**10,
    "ep": 2**12,
}
_FP8 = r"fp8|float8|e4m3|e5m2"
# Megatron-LM's papers and README tables of 2021 and 2022, and the DeepSpeed branches of it.
_EARLY = re.compile(
    r"megatron-deepspeed|2104\.04473|2205\.05198|cases_april2021|bigscience-workshop|tr11-"
)
_CONFIGURATION = re.compile(r"_(\d+)x(\d+)x(\d+)xtp([1-9]\d*)pp([1-9]\d*)cp([1-9]\d*)(?!\d)")
FEW_PARAMETERS = 1e6  # no model of a published step has so few
SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
SUFFIXES |= {"million": 1e6, "billion": 1e9, "trillion": 1e12}
# Where a number with a suffix is a power of two that is rounded so, off by at most so much.
_POWERS = {("gpus", "k"), ("global_batch", "m"), ("global_batch", "million")}
_ROUNDED = 0.05
# What may stand behind a number without changing it; a cell with any other word is not understood.
_UNIT = re.compile(
    r"%|per|m?s|m?secs?|(milli)?seconds?|gpus?|devices?|ranks?|layers?|heads?|seqs?|sequences?"
    r"|samples?|tok|tokens?|params?|parameters?|steps?|it|iter|iterations?|stages?|chunks?|way"
    r"|tflops?|[mg]i?b"
)
_NUMBER = re.compile(
    r"(?P<digits>\d{1,3}(?:(?:,\d{3})+|(?:[ \u00a0\u2009\u202f]\d{3})+)(?:\.\d+)?"
    r"|(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)"
    r"\s*(?P<suffix>(?:[kmbt]|million|billion|trillion)(?![a-z]))?(?P<unit>[a-z%/.\s-]*)"
)
_NEGATIVE = re.compile(r"-\s*[\d.,]+\D*|[-\u2013\u2014]+|[+-]?0+(\.0*)?")


def number(cell: str, name: str = "") -> float | None:
    """The first positive number of a cell such as `1,024`, `1 024`, `8.03B` or `~5600 (5450)`.

    A `k` of `seq_len` is 1,024, and `16k` GPUs or `4M` tokens of a batch are the power of two that
    is rounded so; the column's own name may stand before its number. None for anything else.
    """
    text = re.sub(
        r"\(.*?\)|\[.*?\]|(\u00b1|\+/?-).*|[*\u2020\u2021<>~=\u2248\u2264\u2265:]",
        " ",
        cell.lower(),
    )
    own = re.escape(name.lower()) or "$"
    text = re.sub(
        rf"^\s*((about|around|approx(\.|imately)?|ca\.)\s|{own}[\s-]*(?=\d)|\+(?=\d))", "", text
    )
    found = _NUMBER.fullmatch(text.strip())
    if found is None or not all(map(_UNIT.fullmatch, re.findall(r"[a-z]+|%", found["unit"]))):
        return None
    if name in LARGEST and re.search(r"/|\bper\b", found["unit"]):
        return None  # of each GPU or node, not of all
    suffix = found["suffix"] or ""
    factor = 1024 if name == "seq_len" and suffix == "k" else SUFFIXES[suffix]
    value = float(re.sub(r"[,\s]", "", found["digits"])) * factor
    if (name, suffix) in _POWERS and 0 < value < 2**60:
        power = 2.0 ** round(math.log2(value))
        value = power if abs(value / power - 1) < _ROUNDED else value
    return value if math.isfinite(value) and value > 0 else None


def whole(cell: str, name: str = "") -> int | None:
    """A positive whole number, or GPUs as nodes times each one's, `128x8`; None for else."""
    product = re.fullmatch(r"(\d+)\s*[x\u00d7*]\s*(\d+)( gpus)?", cell.strip().lower())
    if name == "gpus" and product:
        return int(product[1]) * int(product[2]) or None
    value = number(cell, name)
    if value is None or value >= 1e15 or not math.isclose(value, round(value), rel_tol=1e-12):
        return None
    return round(value)


_DENIED = re.compile(
    r"\b(no|non|not|without|w/o|than|vs\.?|instead of|disabled?|never)[\s_-]+[\w-]*$"
)
_SET_OFF = re.compile(
    r"[\w.-]*\s*([=:]\s*(0(?![.\d])|(false|off|none|disabled)\b|no\s*($|[;,)])"
    r"|not\s+(in use|used|enabled|set|supported)\b)"
    r"|\s((is|are|was|were)\s+)?(off|disabled|unused|not\s+(in use|used|enabled|supported))\b"
    r"(?!\s+by\s+default))"
)


def says(pattern: str, text: str) -> bool:
    """Whether a pattern stands in a lower-case text, not denied (`no`, `than`) nor set off."""
    return any(
        not _DENIED.search(text[: found.start()]) and not _SET_OFF.match(text[found.end() :])
        for found in re.finditer(pattern, text)
    )


def not_understood(name: str, text: str) -> str:
    """A sentence for a cell that counts as not printed though something stands in it."""
    return f"{name} {text!r} not understood, taken as not printed"


class TooLittle(Exception):
    """A row that cannot be simulated; its message says why."""


@dataclass(frozen=True)
class SeriesRow:
    """One row; `cells` holds every column that it prints."""

    cells: Mapping[str, str]

    def text(self, name: str) -> str:
        """A cell's words, empty where the row prints nothing."""
        cell = self.cells.get(name, "").strip()
        return "" if cell.lower() in NOTHING else cell

    def whole(self, name: str) -> int | None:
        """A cell's positive whole number."""
        return whole(self.cells.get(name, ""), name)

    def number(self, name: str) -> float | None:
        """A cell's positive number."""
        return number(self.cells.get(name, ""), name)

    @property
    def parameters(self) -> float | None:
        """The model's printed parameters; a few of them are billions without their unit."""
        printed = self.number("params")
        return printed * 1e9 if printed is not None and printed < FEW_PARAMETERS else printed

    @cached_property
    def unread(self) -> tuple[str, ...]:
        """A sentence for each number that is printed but not understood; negative ones are not.

        And one for the metrics of a row that is marked test, where none of them is, and for FLOP/s
        that count recomputation.
        """
        names = [text for metric, _ in METRICS if (text := self.text(metric))]
        odd = names[:1] if self.use == "test" and not any(map(metric_kind, names)) else []
        return (
            *filter(None, [self.text("counted"), self.text("named")]),
            *(not_understood("metric", text) for text in odd),
            *(
                not_understood(name, text)
                for name in (*LARGEST, "kv_heads", "params", "value")
                if (text := self.text(name)) and not _NEGATIVE.fullmatch(text)
                if (self.number if name in ("params", "value") else self.whole)(name) is None
            ),
        )

    @property
    def row_id(self) -> str:
        """The case's id."""
        return self.cells["row_id"].strip()

    @property
    def pair_id(self) -> str:
        """The series; empty where the row belongs to none."""
        return self.text("pair_id")

    @property
    def use(self) -> str:
        """`anchor`, `test` or empty."""
        return self.text("use").lower()

    @property
    def blind(self) -> bool:
        """Whether it is to be projected, though it prints no speed to judge that by.

        As it is marked so, or leaves the value of its metric empty in a file that marks nothing.
        """
        if self.use == "test":
            return not any(
                metric_kind(self.text(name)) and self.number(value) for name, value in METRICS
            )
        printed = self.cells.get("value", "").strip().lower()
        return not self.use and printed in NOTHING - {"nan"}  # which is a speed gone wrong

    @cached_property
    def words(self) -> str:
        """Everything that may name software or sharding, in lower case."""
        names = ("source", "model", "sharding", "flags", "notes")
        return " ".join(self.text(name) for name in names).lower()

    @property
    def source(self) -> str:
        """Who published it: `owner/repository`, or the words before a citation."""
        first = self.text("source")
        if not first:
            return "unnamed source"
        if "mlcommons/training_results" in first:
            return "mlcommons/training_results"
        token = first.split()[0]
        if "/" in token:
            return token
        return re.split(r"\s*\(|\s+arXiv", first)[0][:60]

    @property
    def precision(self) -> str:
        """The words of that cell; empty where none is understood, such as `int8`."""
        text = self.text("precision").lower()
        return text if re.search(rf"16|32|{_FP8}|fp4|half|mixed|amp", text) else ""

    @property
    def fp8(self) -> bool:
        """Whether linear layers run in 8 (or 4) bits."""
        text = f"{self.text('precision')} {self.text('flags')}".lower()
        return says(rf"{_FP8}|fp4", text)

    @property
    def fp4(self) -> bool:
        """Whether linear layers run in 4 bits; a cell that names both formats leaves it open."""
        text = f"{self.text('precision')} {self.text('flags')}".lower().replace("fp8/fp4", "")
        return says("fp4", text)

    @property
    def vendor_expected(self) -> bool:
        """A vendor's own expected performance, not a measurement: NVIDIA's dgxc-benchmarking."""
        return "dgxc" in self.source.lower() or self.pair_id.lower().startswith("dgxc")

    @property
    def early(self) -> bool:
        """Software of 2021 and 2022: attention not fused, and little overlap by default.

        By its name, or as the source is an arXiv paper of May 2022 or before, on GPUs of its time.
        """
        if _EARLY.search(self.words):
            return True
        paper = re.search(r"arxiv\D{0,9}(\d{4})\.\d{4,5}", self.text("source").lower())
        return paper is not None and paper[1] <= "2205" and not self.has_fp8

    @property
    def mlperf(self) -> float:
        """The release of MLPerf Training that it was submitted to; 0 for anything else."""
        found = re.search(r"mlcommons/training_results_v(\d+\.\d+)", self.words)
        return float(found.group(1)) if found else 0.0

    @property
    def graphs(self) -> bool:
        """Kernels replayed from captured graphs, so that the host issues next to nothing.

        NVIDIA's MLPerf submissions have no option for it until v4.0, one that rows print in v4.1
        (`LAYER_CUDA_GRAPH`), and since v5.0 another that they do not: assumed from then on. Of v4.1
        all that run over several nodes print it; so it is assumed there of those whose
        configuration is not known.
        """
        named = r"cuda[-_ ]?graph"
        if re.search(named, self.words):
            return says(named, self.words)
        if self.mlperf == 4.1 and self.lora and not (self.text("flags") or self.text("tp")):
            return (self.whole("gpus") or 0) > 8 and not self.amd
        return self.mlperf >= 5.0 and not self.amd

    @property
    def named_split(self) -> dict[str, int]:
        """tp, pp and cp by the name of an MLPerf configuration, where it is this row's.

        `18x4x1xtp1pp1cp8` is of 18 nodes of 4 GPUs, whose replicas have one sequence each.
        """
        found = _CONFIGURATION.search(self.text("source_locator").lower())
        if not found or any(self.text(name) for name in ("tp", "pp", "cp")):
            return {}
        nodes, gpus, share, *sizes = map(int, found.groups())
        replicas, left = divmod(nodes * gpus, prod(sizes))
        mine = (nodes * gpus, replicas * share) == (self.whole("gpus"), self.whole("global_batch"))
        if left or not mine or share % (self.whole("grad_accum") or 1):
            return {}
        return dict(zip(("tp", "pp", "cp"), sizes, strict=True))

    @property
    def has_fp8(self) -> bool:
        """Whether its GPU multiplies in 8 bits: those since 2022."""
        return not re.search(r"a[18]00|ampere|v100|volta|mi2\d\d", self.text("gpu_type").lower())

    @property
    def amd(self) -> bool:
        """Whether its GPUs are AMD's."""
        return re.search(r"\bamd\b|\bmi\d", self.text("gpu_type").lower()) is not None

    @property
    def recompute_counted(self) -> bool:
        """Whether the source says that its FLOPs hold the recomputation, whatever the metric.

        In the row's notes; or in the paper: the tables of arXiv 2104.04473 count by its eq. 3; or
        by the time beside them (`simulate.series.metrics.counts_recomputation`).
        """
        said = re.search(r"includes recompute|2104\.04473", self.words)
        return bool(said or self.text("counted"))

    @property
    def one_stage(self) -> bool:
        """Whether its software has no pipeline: MLPerf's LoRA, all of whose configs name pp1."""
        return self.mlperf > 0 and self.lora

    @property
    def lora(self) -> bool:
        """Whether only low-rank adapters are trained."""
        return says(r"(?<![a-z])q?lora(?![a-z])", f"{self.words} {self.pair_id.lower()}")


def read_rows(path: Path) -> list[SeriesRow]:
    """The rows of a CSV; UserError names file and line of the first thing that makes it none."""
    text = read_text(path, "a table of published series").removeprefix("\ufeff")
    if "\0" in text:
        raise UserError(f"{path}: has NUL bytes; a CSV with training.csv's columns is expected")
    lines = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [name.strip() for name in lines.fieldnames or ()]
        lines.fieldnames = header
        missing = [name for name in NEEDED if name not in header]
        if len(header) == 1 and re.search(r"[;\t|]", header[0]):
            raise UserError(f"{path}: columns must be separated by commas, not as in {header[0]!r}")
        if missing:
            found = "is missing from the header" if header else "is missing: the file is empty"
            raise UserError(
                f"{path}: the column {missing[0]!r} {found}; give a CSV with row_id, metric, value "
                "and what of each step is known (docs/series.md)"
            )
        doubled = [name for name, count in Counter(header).items() if count > 1 and name]
        if doubled:
            raise UserError(f"{path}: the column {doubled[0]!r} stands in the header twice")
        rows = []
        for cells in lines:
            if None in cells or None in cells.values():
                raise UserError(
                    f"{path}: line {lines.line_num} does not have the header's {len(header)} "
                    "columns; the file may be half-written"
                )
            if not any(cells.values()):  # separators alone, as a spreadsheet's last lines are
                continue
            rows.append(SeriesRow(cells))
            _check(path, lines.line_num, rows[-1])
    except csv.Error as error:
        raise UserError(f"{path}: not valid CSV ({error})") from None
    if not rows:
        raise UserError(
            f"{path}: has a header and no row; give one for each published step (docs/series.md)"
        )
    ids = Counter(row.row_id for row in rows)
    row_id, count = ids.most_common(1)[0]
    if count > 1:
        raise UserError(f"{path}: row_id {row_id} stands there {count} times; keep one")
    return rows


def _check(path: Path, line: int, row: SeriesRow) -> None:
    if not row.row_id:
        raise UserError(f"{path}: line {line} has no row_id")
    if row.use not in ("", *USES):
        raise UserError(f"{path}: line {line}: use is {row.use!r}; it must be anchor or test")


def refused(row: SeriesRow) -> str | None:
    """Why no row like that is simulated: products in 32 bits, or a size that is a misprint."""
    precision = row.text("precision").lower()
    if says(r"\b(fp32|float32|tf32|single)\b", precision) and not says(
        rf"16|{_FP8}|fp4|mixed|amp", precision
    ):
        return f"precision {row.text('precision')!r}: products in 32 bits are not simulated"
    for name, most in LARGEST.items():
        if (row.whole(name) or 0) > most:
            return f"{name} is {row.text(name)}, more than {most}"
    return None
