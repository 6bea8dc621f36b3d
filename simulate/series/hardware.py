"""The node and the fabric of a published row, from the words its source prints."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from simulate.inputs import usual_fabric
from simulate.series.rows import TooLittle
from spec.hardware import Fabric, Node
from topologies import load_fabric, load_node

# Of families whose data-centre GPUs are known, but with other chips, memory or links
# `H1000` is no H100
UNKNOWN = (
    r"rtx|geforce|quadro|\bgb10\b|\ba(10|16|30|40)\b|\bl4\b|jetson|thor\b"
    r"|(?<![a-z\d])(g?[bh]|a|mi)\d{4}(?!\d)"
)
# (pattern, node file, what differs from it): datasheets of H100 PCIe and NVL, GH200 (four of a
# board), GB200 NVL4 (four of a board, each joined to each), H20, H200 NVL, L40S, A100 40GB and
# PCIe, A800 and H800 (NVLink of 400 GB/s; PCIe as H100's and A100's), AMD Instinct MI325X and
# MI350X. What they do not print is the node file's.
VARIANTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (r"gb300|blackwell ultra gpu \(gb|blackwell ultra g\b", "gb300-nvl72", {}),
    (
        r"gb200.{0,20}nvl[- ]?4\b",
        "gb200-nvl72",
        {"gpus": 4, "nics": 4, "mesh": True, "overhead_w": 33600 / 18},
    ),
    (r"gb200|blackwell gpu \(gb", "gb200-nvl72", {}),
    (r"b300|blackwell ultra", "hgx-b300", {}),
    (r"b200|blackwell", "hgx-b200", {}),
    (  # before `h200`, which it holds
        r"gh200",
        "hgx-h100",
        {
            "memory_gib": 94.0,
            "memory_gbytes_per_s": 4000.0,
            "gpus": 4,
            "nics": 4,
            "mesh": True,
        },
    ),
    (
        r"h200[- ]?nvl\b",
        "hgx-h200",
        {
            "peak_bf16_tflops": 835.5,
            "power_limit_w": 600.0,
            "gpus": 4,
            "nics": 4,
            "mesh": True,
        },
    ),
    (r"h200", "hgx-h200", {}),
    (
        r"h[18]00.{0,8}pcie",
        "hgx-h100",
        {
            "peak_bf16_tflops": 756.0,
            "memory_gbytes_per_s": 2000.0,
            "multiprocessors": 114,
            "power_limit_w": 350.0,
            "scale_up_gbytes_per_s": 64.0,
        },
    ),
    (r"h800", "hgx-h100", {"scale_up_gbytes_per_s": 200.0}),
    (
        r"h100[- ]?nvl\b",
        "hgx-h100",
        {
            "peak_bf16_tflops": 835.5,
            "memory_gib": 92.0,
            "memory_gbytes_per_s": 3900.0,
            "power_limit_w": 400.0,
            "scale_up_gbytes_per_s": 64.0,
        },
    ),
    (
        r"\bh20\b",
        "hgx-h100",
        {
            "peak_bf16_tflops": 148.0,
            "memory_gib": 89.0,
            "memory_gbytes_per_s": 4000.0,
            "multiprocessors": 78,
            "power_limit_w": 400.0,
        },
    ),
    (r"h100|hopper", "hgx-h100", {}),
    (
        r"a[18]00.{0,8}pcie",
        "dgx-a100",
        {
            "memory_gbytes_per_s": 1935.0,
            "power_limit_w": 300.0,
            "scale_up_gbytes_per_s": 32.0,
        },
    ),
    (r"a800", "dgx-a100", {"scale_up_gbytes_per_s": 200.0}),
    (r"a100|ampere", "dgx-a100", {}),
    (r"mi355x?(?!\w)", "mi355x-node", {}),
    (
        r"mi350x?(?!\w)",
        "mi355x-node",
        {"peak_bf16_tflops": 2306.9, "max_clock_mhz": 2200.0, "power_limit_w": 1000.0},
    ),
    (
        r"mi325x?(?!\w)",
        "mi300x-node",
        {"memory_gib": 256.0, "memory_gbytes_per_s": 6000.0, "power_limit_w": 1000.0},
    ),
    (r"mi300x?(?!\w)", "mi300x-node", {}),
    (
        r"l40s",
        "hgx-h200",
        {
            "peak_bf16_tflops": 362.0,
            "memory_gib": 44.0,
            "memory_gbytes_per_s": 864.0,
            "multiprocessors": 142,
            "max_clock_mhz": 2520.0,
            "power_limit_w": 350.0,
            "scale_up_gbytes_per_s": 32.0,
        },
    ),
)
_CHIP = re.compile(r"(?<![a-z\d])(?:g?[bh]|[av]|mi)\d{2,3}(?!\d)")
_FORM_FIRST = re.compile(r"\b(pcie|nvl)[- ]+((?:nvidia )?[ah]\d{3})\b")  # `PCIe H100`
_A100_40GB = {"memory_gib": 39.4, "memory_gbytes_per_s": 1555.0}
# `4 per node`, `4 GPUs per node`, `8x H100 80GB per node`; no name's digits, nor gigabytes
_PER_NODE = re.compile(
    r"(?<![\w.])(\d+) ?(?:x ?)?(?:(?!gi?b?\b)[a-z]\w*(?:[- ]\w+){0,2})? ?(?:per |/ ?)node"
)
RACK = 72  # GPUs of an NVL72, the most that a node has
TRAY = 4  # of them in what its users call a node
_RATES = (25, 40, 50, 56, 100, 200, 400, 800)
SLOW_ETHERNET = 10.0  # read where a cell has nothing else: beside others it is for management
# `400Gb/s`, `200G`, `400GbE`, `1.6 Tb/s`, in bytes `50 GB/s`; no memory (`96GB`)
_RATE = (
    r"(?<![\d.])(\d+(?:\.\d+)?)\s?([GgTt])"
    r"(?:(B)(?:/[Ss]|ps)|(?!B\b)[Bb]?(?:its?)?(?:/s|/sec|/Sec|ps|[eE])?)(?![A-Za-z])"
)
_BARE = re.compile(rf"(?i:ethernet)?\s*{_RATE}\s*(?i:ethernet)?")
_NAMED = re.compile(r"(?<![A-WYZa-wyz])[EHNX]DR-?([1248]00)(?!\s?[Gg]|\d)")  # `HDR100`, `NDR200`
_GENERATION = re.compile(r"(?<![A-Za-z])(QDR|FDR|EDR|HDR|NDR|XDR)(?![A-Za-z]|\s?-?\d)")
_OF_GENERATION = {"QDR": 40, "FDR": 56, "EDR": 100, "HDR": 200, "NDR": 400, "XDR": 800}
_A_NODE = r"(?:per |/ ?)(?:(\d+)[- ]?(?:gpu|GPU)[- ])?node"
_TOTAL = re.compile(rf"{_RATE}(?:(?!\bper\b)[^\d,;(])*{_A_NODE}")  # of all ports together
_GPU = r"\s?(?:nvidia |amd )?(?:[abhlv]|gb|mi)\d{2,3}"  # `8x H100` are no ports
# What a port is called between their number and their noun: `2 HDR HCAs`, `8 NDR200 NICs`
_KIND = (
    r"(?:(?:[ehnx]dr(?:-?\d+)?|infiniband|ib|roce|connectx(?:-\d)?|cx-?\d"
    r"|\d+\s?g(?:b(?:it)?/s|bps|be|b)?)\s)"
)
_PORTS = re.compile(
    rf"(?<![\d.])(\d+)\s?(?:[x\u00d7](?!{_GPU})\s?(\d+)?(?![a-z])"
    rf"|{_KIND}{{0,3}}(?:ports?|nics?|hcas?|adapters)\b)"
)
_COUNTS = {"one": "1x", "single": "1x", "two": "2x", "four": "4x", "six": "6x", "eight": "8x"}
_COUNTED = re.compile(
    rf"\b({'|'.join(_COUNTS)})(?=\s+(?:\d|[ehnx]dr|connectx|infiniband|ports?\b|nics?\b|hcas?\b))",
    re.IGNORECASE,
)
_OTHER_PORTS = re.compile(r"[,;]\s*(?:management|mgmt|admin|storage)[\w+&]*:", re.IGNORECASE)
_INSIDE = re.compile(r"nvlink|nvswitch|xgmi|infinity fabric", re.IGNORECASE)


@lru_cache(maxsize=512)
def node_of(gpu_type: str) -> Node | None:
    """The node of a row; None where its GPU is not known, TooLittle where it names several."""
    words = _FORM_FIRST.sub(r"\2 \1", gpu_type.lower().replace("_", " "))
    if re.search(UNKNOWN, words):
        return None
    chips = {one.replace("gb", "b") for one in _CHIP.findall(words)}  # a GB200 has two B200
    if len(chips - {"h100", "h200"} if "gh200" in chips else chips) > 1:
        raise TooLittle(f"gpu_type {gpu_type!r} names several GPUs, and a row is of one kind")
    for pattern, base, changes in VARIANTS:
        if not re.search(pattern, words):
            continue
        node = load_node(base)
        named = re.search(pattern, words)
        update = dict(changes)
        if changes and named:
            update |= {"gpu": named.group().upper(), "calibration": None, "name": "published"}
        update |= _printed(words, node)
        return node.model_copy(update=update)
    return None


def _printed(words: str, base: Node) -> dict[str, Any]:
    """What a `gpu_type` cell says beside the GPU's name: memory, power limit, GPUs per node."""
    found: dict[str, Any] = {}
    gigabytes = re.search(r"\b(\d{2,3}) ?g(?:i?b)?\b", words)
    if gigabytes and base.name == "dgx-a100" and gigabytes.group(1) == "40":
        found |= _A100_40GB
    elif gigabytes and base.name == "hgx-h100" and gigabytes.group(1) in ("94", "96", "141", "144"):
        found["memory_gib"] = int(gigabytes.group(1)) * 0.98
    watts = re.search(r"\b(\d{3,4}) ?w\b", words)
    if watts:
        found["power_limit_w"] = float(watts.group(1))
    per_node = _PER_NODE.search(words)
    # a rack's trays of four are what its users call nodes: NVLink joins them all the same
    tray = base.gpus == RACK and per_node is not None and int(per_node.group(1)) == TRAY
    if per_node and 0 < int(per_node.group(1)) <= RACK and not tray:
        found["gpus"] = found["nics"] = int(per_node.group(1))
        # SXM GPUs in fours are on boards whose NVLinks join them in pairs, without a switch
        if found["gpus"] == 4 and base.gpus == 8:
            found |= {"mesh": True, "calibration": None}
    return found


@lru_cache(maxsize=512)
def fabric_of(interconnect: str, node: Node) -> tuple[Fabric, bool]:
    """The fabric of a row, and whether its rate was printed.

    Only a rate that stands with ports per node, or as the row's only one, is taken: MLPerf's lists
    name storage and management ports too.
    """
    usual = load_fabric(usual_fabric(node))
    compute = re.split("compute:", interconnect, flags=re.IGNORECASE)[-1]
    compute = _OTHER_PORTS.split(compute)[0]
    changes = _ports(compute, node)
    printed = bool(changes)
    ethernet = re.search(
        r"roce|ethernet|efa" + r"|\dgbe" * printed, compute.lower()
    ) and not re.search(r"infiniband|\bib\b", interconnect.lower())
    if ethernet:
        changes["protocol"] = "roce"
    return usual.model_copy(update=changes), printed


def gpus_of_a_node(node: Node) -> int:
    """GPUs of what figures `per node` are of: a compute tray's in a rack."""
    return min(TRAY, node.gpus) if node.name.endswith("nvl72") else node.gpus


def _ports(words: str, node: Node) -> dict[str, Any]:
    """The rate of a port and how many a node has, as far as printed; GB and Gb as they are spelt.

    A rate per node without its ports is all of theirs together.
    """
    if (bare := _BARE.fullmatch(words.strip())) and _gbits(bare) == SLOW_ETHERNET:
        return {"nic_gbits_per_s": SLOW_ETHERNET}
    words = _COUNTED.sub(lambda one: _COUNTS[one[1].lower()], _NAMED.sub(r"\1Gb/s", words))
    phrases = re.split(r"[;,|+&]| / |\b(?:and|with)\b", words)
    phrases = [one for one in phrases if not _INSIDE.search(one)]
    words = ";".join(phrases)
    a_node = re.search(_A_NODE, words)
    found = _PORTS.search(words.lower()) if a_node else None
    count, each = (int(one or 0) for one in found.groups()) if found else (0, 0)
    of = int(a_node[1] or 0) if a_node else 0  # GPUs that `per node` is of
    of = of or gpus_of_a_node(node)
    if found and _of_a_gpu(words.lower(), found, count):
        of = 1
    nics = round(count * node.gpus / of)
    ports = {"ports_per_node": max(nics, 1)} if 1 <= count <= 16 else {}
    if total := _TOTAL.search(words):
        spelt = bool(ports) and _gbits(total) == count * each * (8 if total[3] else 1)
        usual = of if of != node.gpus else node.nics or node.gpus
        rate = _gbits(total) / (count if spelt else usual)  # `800 Gbps per node (4x200)`
        if (spelt or not found) and 0 < rate <= max(_RATES):
            return {"nic_gbits_per_s": rate, **ports}
    rates = {_gbits(one) for one in re.finditer(_RATE, words)} & set(_RATES)
    if len(rates) > 1:  # `8x 400Gb/s + 200Gb/s Ethernet NIC`
        most = _most_ports(phrases, gpus_of_a_node(node))
        return _ports(most, node) if most else {}
    rates = rates or {float(_OF_GENERATION[one]) for one in _GENERATION.findall(words)}
    return {"nic_gbits_per_s": rates.pop(), **ports} if len(rates) == 1 else {}


def _most_ports(phrases: Sequence[str], gpus: int) -> str | None:
    """The one of several phrases that names the most ports, at least one for two GPUs."""
    found = [_PORTS.search(one.lower()) for one in phrases]
    counts = [int(one[1] or 0) if one else 0 for one in found]
    first, *others = sorted(counts, reverse=True)
    alone = others and first > others[0] and 2 * first >= gpus
    return phrases[counts.index(first)] if alone else None


def _of_a_gpu(words: str, ports: re.Match[str], count: int) -> bool:
    """Whether ports are each GPU's, by what stands right behind them, not the node's."""
    behind = re.split(rf"[;(\[]|{_A_NODE}", words[ports.end() :])[0]
    return bool(
        re.search(r"(?:per |/ ?)gpu\b", behind) or (count == 1 and re.search(r"\beach\b", behind))
    )


def _gbits(rate: re.Match[str]) -> float:
    return float(rate[1]) * (1000 if rate[2] in "Tt" else 1) * (8 if rate[3] else 1)
