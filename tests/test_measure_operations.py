"""Every operation of a step has an implementation, and it computes what its name says."""

import pytest

torch = pytest.importorskip("torch")

from measure.suites.interference import overlapping  # noqa: E402
from measure.timed.operations import Maker, footprint  # noqa: E402
from measure.timed.products import Refused, tried  # noqa: E402
from measure.timed.timing import CpuTimer, quantiles  # noqa: E402
from spec.kernel import OPS, PACED, STREAMED, Kernel  # noqa: E402
from spec.records import KernelRow  # noqa: E402

SMALL = {"groups": 2, "batch": 1, "experts": 4, "top_k": 2, "kv_heads": 2, "heads": 4}


@pytest.mark.parametrize("op", [one for one in OPS if one not in (PACED, STREAMED)])
def test_every_operation_runs_in_every_direction(op: str) -> None:
    names, directions = OPS[op]
    dims = tuple(SMALL.get(name, 16) for name in names)
    for direction in directions:
        call, implementation = Maker(torch.device("cpu")).build(Kernel(op, direction, dims))
        call()
        call()  # a backward pass can be repeated
        assert implementation.startswith("torch/")


def test_a_norm_of_several_tensors_is_that_of_all_and_is_not_read_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    maker = Maker(torch.device("cpu"))
    pieces = [torch.full((16,), 3.0), torch.full((9,), 4.0)]
    monkeypatch.setattr(maker, "_pieces", lambda *_: pieces)
    call, implementation = maker.build(Kernel("grad_norm", "forward", (25,)))
    found = call()
    assert isinstance(found, torch.Tensor)
    assert float(found) == pytest.approx((16 * 9 + 9 * 16) ** 0.5)
    row = {"op": "grad_norm", "implementation": implementation}
    assert not KernelRow.model_construct(**row).superseded
    assert KernelRow.model_construct(**row | {"implementation": "torch/eager"}).superseded


def test_products_have_the_shapes_of_their_direction() -> None:
    maker = Maker(torch.device("cpu"))
    shapes = {
        way: tuple(maker.build(Kernel("gemm", way, (3, 5, 7)))[0]().shape)
        for way in ("forward", "dgrad", "wgrad")
    }
    assert shapes == {"forward": (3, 5), "dgrad": (3, 7), "wgrad": (5, 7)}


def test_attention_is_causal_and_grouped() -> None:
    call, name = Maker(torch.device("cpu")).build(
        Kernel("attention", "forward", (1, 8, 4, 2, 16), "fp32")
    )
    out = call()
    assert tuple(out.shape) == (8, 1, 64)
    heads = out.view(8, 4, 16)
    assert name.startswith("torch/sdpa-")
    # the first query sees the first key only: heads that share a key-value head agree there
    assert torch.allclose(heads[0, 0], heads[0, 1])
    assert not torch.allclose(heads[0, 1], heads[0, 2])


def test_a_block_of_the_ring_sees_every_key() -> None:
    from measure.timed.attention import plain_forward

    kernel = Kernel("attention_block", "forward", (2, 16, 8, 4, 2, 16))
    call, name = Maker(torch.device("cpu")).build(kernel)
    assert name == "torch/sdpa-flash"
    out = call()[0]
    assert tuple(out.shape) == (2, 4, 16, 16)
    torch.manual_seed(1234)  # what the maker drew
    shapes = ((4, 16), (2, 8), (2, 8))
    q, k, v = (torch.randn(2, *one, 16, dtype=torch.bfloat16) for one in shapes)
    expected = plain_forward(q, k, v, False)[0]
    assert torch.allclose(out.float(), expected.float(), atol=0.02)
    back, _ = Maker(torch.device("cpu")).build(Kernel("attention_block", "backward", kernel.dims))
    assert [tuple(one.shape[1:]) for one in back()] == [(4, 16, 16), (2, 8, 16), (2, 8, 16)]


def test_what_is_around_a_rings_pieces_is_what_the_ring_does() -> None:
    """Heads before tokens, in fp32, rows by their factors, added up."""

    def run(op: str, *dims: int) -> torch.Tensor:
        out = Maker(torch.device("cpu")).build(Kernel(op, "forward", dims))[0]()
        torch.manual_seed(1234)  # what the maker drew
        assert isinstance(out, torch.Tensor)
        return out

    by_head = run("reorder", 16, 4, 8)
    by_token = torch.randn(16, 1, 4, 8, dtype=torch.bfloat16)
    assert by_head.is_contiguous()
    assert torch.equal(by_head, by_token.permute(1, 2, 0, 3))
    wide = run("widen", 64)
    assert wide.dtype == torch.float32
    assert torch.equal(wide, torch.randn(64, dtype=torch.bfloat16).float())
    assert torch.equal(run("rescale", 64, 8), torch.randn(64, 8))  # by ones
    total = run("accumulate", 64)
    assert torch.equal(total, torch.randn(64) + torch.randn(64, dtype=torch.bfloat16))


def test_shards_are_copied_between_weights_and_messages() -> None:
    """Rank after rank, and of each tensor after tensor; a gradient becomes fp32."""
    weights = Maker(torch.device("cpu")).build(Kernel("gather_copy_out", "forward", (4000, 4)))[0]()
    torch.manual_seed(1234)  # what the maker drew
    message = torch.randn(4, 1000, dtype=torch.bfloat16)
    assert torch.equal(torch.cat(weights, dim=1), message)
    message = Maker(torch.device("cpu")).build(Kernel("scatter_copy_in", "forward", (4000, 4)))[0]()
    torch.manual_seed(1234)
    gradients = [torch.randn(4, one.shape[1], dtype=torch.bfloat16) for one in weights]
    assert message.dtype == torch.float32
    assert torch.equal(message, torch.cat(gradients, dim=1).float())


def test_the_loss_is_the_cross_entropy() -> None:
    torch.manual_seed(1234)
    logits = torch.randn(6, 11)
    target = torch.randint(11, (6,))
    call, _ = Maker(torch.device("cpu")).build(Kernel("cross_entropy", "forward", (6, 11), "fp32"))
    expected = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    assert torch.allclose(call(), expected, atol=1e-5)


@pytest.mark.parametrize("way", ["forward", "dgrad", "wgrad"])
def test_grouped_products_in_one_kernel_are_the_experts_one_by_one(way: str) -> None:
    kernel = Kernel("fused_grouped_gemm", way, (2, 32, 24, 16))
    call, name = Maker(torch.device("cpu")).build(kernel)
    assert name == "torch/grouped_mm"
    shape = {"forward": (32, 24), "dgrad": (32, 16), "wgrad": (2, 24, 16)}[way]
    assert tuple(call().shape) == shape
    maker = Maker(torch.device("cpu"))  # draws the same numbers in the same order
    if way == "wgrad":
        g = maker._normal(32, 24, dtype=torch.bfloat16)
        x = maker._normal(32, 16, dtype=torch.bfloat16)
        expected = torch.stack([g[:16].t() @ x[:16], g[16:].t() @ x[16:]])
        torch.testing.assert_close(call(), expected)


@pytest.mark.parametrize(
    ("way", "shape"), [("forward", (16, 32)), ("dgrad", (16, 48)), ("wgrad", (32, 48))]
)
def test_fp8_products_have_the_shapes_of_their_direction(way: str, shape: tuple[int, int]) -> None:
    call, name = Maker(torch.device("cpu")).build(Kernel("gemm", way, (16, 32, 48), "fp8"))
    out = call()
    assert tuple(out.shape) == shape
    assert out.dtype == torch.bfloat16
    assert name.endswith("tensorwise-fast" if way == "forward" else "tensorwise")


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (Kernel("gemm", "forward", (8, 8, 8), "fp8"), "multiples of 16"),
        (Kernel("attention", "forward", (1, 8, 2, 2, 8), "fp8"), "gemm only"),
    ],
)
def test_what_fp8_cannot_do_is_refused_in_words(kernel: Kernel, words: str) -> None:
    with pytest.raises(Refused, match=words):
        Maker(torch.device("cpu")).build(kernel)


def test_what_this_torch_lacks_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.functional, "grouped_mm", raising=False)
    monkeypatch.delattr(torch, "_grouped_mm", raising=False)
    monkeypatch.delattr(torch, "_scaled_mm", raising=False)
    for kernel in (
        Kernel("fused_grouped_gemm", "forward", (2, 32, 16, 16)),
        Kernel("gemm", "forward", (16, 16, 16), "fp8"),
    ):
        with pytest.raises(Refused, match=r"has no _?(grouped|scaled)_mm"):
            Maker(torch.device("cpu")).build(kernel)


def test_what_torch_does_not_run_here_is_refused_and_what_fails_is_not() -> None:
    def absent() -> None:
        raise NotImplementedError("not compiled for this device")

    def faulted() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(Refused, match="not compiled for this device"):
        tried(absent)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        tried(faulted)


def test_a_burst_keeps_its_repeats() -> None:
    from measure.devices.fake import FakeDevice

    timing = CpuTimer(FakeDevice(0)).burst(lambda: None, 0)
    assert len(timing.times_us) >= 20
    assert timing.state.clock_median_mhz == pytest.approx(1880, abs=100)


def test_quantiles_of_known_numbers() -> None:
    found = quantiles([float(value) for value in range(1, 102)])
    assert found["repeats"] == 101
    assert found["median_us"] == 51
    assert found["p10_us"] == pytest.approx(11)
    assert found["p90_us"] == pytest.approx(91)
    assert found["min_us"] == 1
    assert quantiles([5.0])["std_us"] == 0


def test_only_overlapping_spans_count() -> None:
    kernels = [(0.0, 2.0), (2.0, 4.0), (4.0, 6.0), (9.0, 11.0)]
    collectives = [(1.0, 5.0), (5.0, 8.0), (8.0, 12.0)]
    assert overlapping(kernels, collectives) == ([2.0, 2.0, 2.0], [4.0, 3.0])


def test_what_cannot_fit_a_device_is_known_before_it_is_tried() -> None:
    assert footprint(Kernel("adam", "forward", (8_030_261_248,))) > 40 * 2**30
    assert footprint(Kernel("gemm", "forward", (8192, 128256, 8192))) < 40 * 2**30
