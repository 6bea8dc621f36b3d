"""Nodes and fabrics as published rows write them."""

import pytest

from simulate.series.hardware import fabric_of, node_of
from simulate.series.plan import plan
from simulate.series.rows import TooLittle
from tests.made_up_series import row
from topologies import load_node


@pytest.mark.parametrize(
    ("words", "gpu", "gpus", "gib"),
    [
        ("GH200 96GB", "GH200", 4, 94.08),
        ("H200", "NVIDIA H200", 8, None),
        ("H100 per node", "NVIDIA H100 80GB HBM3", 8, None),
        ("8x H100 80GB per node", "NVIDIA H100 80GB HBM3", 8, None),
        ("4x H100 per node", "NVIDIA H100 80GB HBM3", 4, None),
        ("4xH100 SXM 80GB per node", "NVIDIA H100 80GB HBM3", 4, None),
        ("H200 141GB (4 per node)", "NVIDIA H200", 4, None),
        ("A100, 4 GPUs per node", "NVIDIA A100-SXM4-80GB", 4, None),
        ("H100, 4 GPUs/node", "NVIDIA H100 80GB HBM3", 4, None),
        ("A100 40 GB per node", "NVIDIA A100-SXM4-80GB", 8, 39.4),
        ("A100 40G", "NVIDIA A100-SXM4-80GB", 8, 39.4),
        ("H100, 100 per node", "NVIDIA H100 80GB HBM3", 8, None),
        ("GB200 NVL72, 4 GPUs per node", "NVIDIA GB200", 72, None),  # trays of one NVLink domain
        ("4x GB300 per node", "NVIDIA GB300", 72, None),
        ("GB200 NVL4, 4 GPUs per node", "GB200 NVL4", 4, None),
        ("PCIe H100", "H100 PCIE", 8, None),
        ("H800 PCIe", "H800 PCIE", 8, None),
        ("PCIe A800", "A800 PCIE", 8, None),
        ("GB200 NVL4", "GB200 NVL4", 4, None),
        ("GB200 NVL72 (B200)", "NVIDIA GB200", 72, None),
        ("GH200 (H100 96GB)", "GH200", 4, 94.08),
    ],
)
def test_what_a_gpus_cell_says_beside_its_name(
    words: str, gpu: str, gpus: int, gib: float | None
) -> None:
    """Its memory and how many a node has, in either order."""
    node = node_of(words)
    assert node is not None
    assert (node.gpu, node.gpus) == (gpu, gpus)
    assert gib is None or node.memory_gib == pytest.approx(gib)


@pytest.mark.parametrize(
    ("words", "gbits", "ports"),
    [
        *(("8x400Gb/s per node", 400, 8), ("8x 50 GB/s per node", 400, 8), ("50GB/s", 400, None)),
        *(("400Gb/s", 400, None), ("8x 400GbE", 400, None), ("12.5 GB/s", 100, None)),
        *(("800 Gbps per node (4x200)", 200, 4), ("4x 200 Gb/s per node", 200, 4)),
        *(("3200 Gbps EFA per node", 400, None), ("400 GB/s per node (8x50)", 400, 8)),
        *(("NVLink 50 GB/s, InfiniBand 200 Gb/s", 200, None), ("4 NICs of 200G per node", 200, 4)),
        *(
            ("NVLINK 400Gb/s; 4x 25 GB/s per node", 200, 4),
            ("400Gb/s per GPU, 8 per node", 400, None),
        ),
        *(("400 Gb/s per 8-GPU node", 50, None), ("8x 400 Gb/s per 8-GPU node", 400, 8)),
        *(("two 200Gb/s HCAs per node", 200, 2), ("Four NDR HCAs of 400G per node", 400, 4)),
        *(("eight GPUs per node, 400Gb/s", 400, None), ("1.6 Tb/s RoCE per node", 200, None)),
        *(("3.2Tb/s per node (8x400)", 400, 8), ("HDR100", 100, None), ("NDR200", 200, None)),
        *(("InfiniBand HDR", 200, None), ("ConnectX-7 NDR", 400, None)),
        *(("4x HDR100 per node", 100, 4), ("10GbE", 10, None), ("10 Gb/s Ethernet", 10, None)),
        # what most ports have is the GPUs' network, and what stands behind another word is not
        ("8x ConnectX-7 IB NDR 400Gb/s + 200Gb/s Ethernet NIC; | 18x 5th Gen NVLink", 400, None),
        ("Compute: 8x BlueField-3 200Gb/s, Management: 2x100Gb/s Ethernet NIC", 200, None),
        ("8x 200Gb/s, 2x 100Gb/s", 200, None),
        ("4x 200Gb/s, 1x 100Gb/s", 200, None),
        ("NVLink: 900GB/s; InfiniBand: 8x NDR400", 400, None),
        ("Intranode: NVLink 4, internode: 8x 400Gb/s", 400, None),
        ("8x 400Gb/s; Storage: 2x 100Gb/s", 400, None),
    ],
)
def test_rates_of_ports(words: str, gbits: float, ports: int | None) -> None:
    """Bytes and bits as they are spelt; a node's rate is that of all its ports (8 of an HGX)."""
    fabric, printed = fabric_of(words, load_node("hgx-h100"))
    assert (fabric.nic_gbits_per_s, fabric.ports_per_node, printed) == (gbits, ports, True)


@pytest.mark.parametrize(
    ("words", "gbits", "ports"),
    [
        *(("4x ConnectX-7 400 Gb/s per node", 400, 72), ("1.6 Tb/s per node", 400, None)),
        *(("800 Gb/s per node", 200, None), ("800 Gb/s per node (4x200)", 200, 72)),
        *(("8x 400 Gb/s per 8-GPU node", 400, 72), ("4x ConnectX-7 400 Gb/s", 400, None)),
    ],
)
def test_a_node_of_a_rack_is_a_tray(words: str, gbits: float, ports: int | None) -> None:
    """Its users call so what has four of the 72 GPUs, and as few in the parts of racks."""
    node = load_node("gb200-nvl72")
    fabric, printed = fabric_of(words, node)
    assert (fabric.nic_gbits_per_s, fabric.ports_per_node, printed) == (gbits, ports, True)
    part, _ = fabric_of(words, node.model_copy(update={"gpus": 16, "nics": 16}))
    assert (part.nic_gbits_per_s, part.ports_per_node) == (gbits, ports and 16)


@pytest.mark.parametrize(
    "words",
    [
        "0 Gb/s per node",
        "96GB",
        "H100 80 GB",
        "NVLink 400 GB/s",
        "1x Intel X710 10GbE",
        "14.4 TB/s",
        "8x 200Gb/s, 8x 100Gb/s",
        "Compute: 8x ConnectX, Management: 100Gb/s",
    ],
)
def test_what_is_no_rate_of_a_port(words: str) -> None:
    node = load_node("hgx-h100")
    assert fabric_of(words, node) == (fabric_of("", node)[0], False)


@pytest.mark.parametrize("words", ["A100 + H100 mixed", "H100/H200", "MI300X and MI325X"])
def test_rows_of_several_gpus_are_refused(words: str) -> None:
    with pytest.raises(TooLittle, match="names several GPUs, and a row is of one kind"):
        plan(row(gpu_type=words))


def test_pcie_cards_are_slower_whatever_their_name() -> None:
    cards = [node_of(words) for words in ("H100 PCIe", "PCIe H100", "H800 PCIe", "PCIe H800")]
    assert {one and one.peak_bf16_tflops for one in cards} == {756.0}


def test_an_apu_is_no_accelerator_of_its_family() -> None:
    """MI300A has other memory, links and compute units than MI300X."""
    assert node_of("AMD Instinct MI300A") is None
    assert node_of("MI300X_192GB") == node_of("mi300") == load_node("mi300x-node")
    with pytest.raises(TooLittle, match="'MI300A' is no known GPU"):
        plan(row(gpu_type="MI300A"))


@pytest.mark.parametrize(
    ("words", "rate", "ports"),
    [
        ("1x 400Gb/s per GPU, 8 per node", 400, 8),
        ("8 GPUs per node, 1x 400 Gb/s NIC each", 400, 8),
        ("2 HDR HCAs per node", 200, 2),
        ("2 HDR200 HCAs per node", 200, 2),
        ("8 NDR ports per node", 400, 8),
        ("one HDR port per node", 200, 1),
        ("4 ConnectX-6 HDR NICs per node", 200, 4),
        ("4 NICs per node (200 Gb/s each)", 200, 4),
        ("4x 200Gb/s per node (1 per GPU)", 200, 4),
        ("8x 400Gb/s NICs per node (one per GPU)", 400, 8),
        ("2x HDR per node (0.5 NIC per GPU)", 200, 2),
        ("4 ports 100 Gb/s per GPU; 8 GPUs per node", 100, 32),
    ],
)
def test_ports_of_a_gpu_and_of_a_node(words: str, rate: float, ports: int) -> None:
    fabric, printed = fabric_of(words, load_node("hgx-h100"))
    assert (fabric.nic_gbits_per_s, fabric.ports_per_node, printed) == (rate, ports, True)
