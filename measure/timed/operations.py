"""What each operation of `spec.kernel.OPS` runs: the PyTorch calls of Megatron-Core's local path.

Without Transformer Engine or Apex, Megatron-Core 0.16 runs plain PyTorch here; each function below
builds one call at one shape, on normally distributed data, and says in `implementation` what ran.
Sources, all in megatron/core: tensor_parallel/layers.py (products), fusions/fused_bias_dropout.py,
transformer/mlp.py (gated activation), models/common/embeddings/rope_utils.py,
tensor_parallel/cross_entropy.py, optimizer/ and utils.py (Adam, gradient norm).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from measure.timed.attention import choose, first_backend
from measure.timed.products import Call, Products, Tensor
from spec.errors import WorkError
from spec.kernel import Kernel

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Of a unit that FSDP gathers, all tensors but the last: a layer of Llama 3 8B without its norms.
TENSORS = (0.12, 0.08, 0.53)
ALIGNED = 128  # elements of a shard, as matrices' are
PARAMETER = 2**26  # elements of one parameter tensor that an optimizer step is split into

# memory an instance takes, as a multiple of `Kernel.bytes`: inputs, outputs, and what is kept
_FOOTPRINT = {
    "cross_entropy": 2.2,
    "embedding": 2.0,
    "vocab_parallel_embedding": 2.0,
    "router": 4.0,
    "adam": 0.7,  # of 30 B an element, 18 stay: master, gradient, two moments, weight
    "grad_norm": 1.2,
    "grad_accumulate": 0.8,
    "copy": 1.1,
    "gather_copy_out": 1.1,
    "scatter_copy_in": 1.1,
}


def footprint(kernel: Kernel) -> float:
    """Bytes of memory that timing this kernel may take, roughly."""
    size = _FOOTPRINT.get(kernel.op, 3.0) * kernel.bytes
    if "vocab" in kernel.named and "width" in kernel.named:  # the table and its gradient
        size += 4.0 * kernel.named["width"] * kernel.named["vocab"] * 2
    if kernel.op == "attention" and kernel.dtype == "fp32":
        named = kernel.named
        size += 8.0 * named["batch"] * named["heads"] * named["seq"] ** 2
    return size


class Maker(Products):
    """Builds calls on one device."""

    def build(self, kernel: Kernel) -> tuple[Call, str]:
        """The call that runs `kernel` once, and what it runs on, such as `torch/cublas`."""
        self.fed = None
        if kernel.dtype == "fp8":
            return self.fp8(kernel)
        if kernel.dtype not in DTYPES:
            raise WorkError(f"{kernel.dtype} kernels are not measured by this version")
        maker = getattr(self, f"_{kernel.op}", None)
        if maker is None:
            raise WorkError(f"no implementation of {kernel.op} is known here")
        result: Call | tuple[Call, str] = maker(kernel, DTYPES[kernel.dtype])
        return result if isinstance(result, tuple) else (result, "torch/eager")

    def _indices(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, device=self.device)

    def _differentiable(
        self, kernel: Kernel, function: Callable[..., Tensor], *inputs: Tensor
    ) -> Call:
        """Forward as it is; backward through autograd over a graph that is kept."""
        wanted = [one.requires_grad_() for one in inputs if one.is_floating_point()]
        self.fed = inputs[0]
        if kernel.direction == "forward":
            return lambda: function(*inputs)
        out = function(*inputs)
        self.fed = gradient = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, wanted, gradient, retain_graph=True)

    def _attention(self, kernel: Kernel, dtype: torch.dtype) -> tuple[Call, str]:
        """Causal attention over tensors laid out [seq, batch, heads, head_dim], as Megatron's."""
        from torch.nn.attention import sdpa_kernel

        d = kernel.named
        kv_heads = d.get("kv_heads", d["heads"])
        keys, values = (d.get(f"{of}_dim") or d["head_dim"] for of in ("query", "value"))
        sizes = ((d["heads"], keys), (kv_heads, keys), (kv_heads, values))
        q, k, v = (
            self._normal(d["seq"], d["batch"], *size, dtype=dtype).requires_grad_()
            for size in sizes
        )
        grouped = d["heads"] != kv_heads

        def forward(backend: Any) -> Tensor:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(
                    q.permute(1, 2, 0, 3),
                    k.permute(1, 2, 0, 3),
                    v.permute(1, 2, 0, 3),
                    is_causal=True,
                    enable_gqa=grouped,
                )
            # what follows in Megatron is laid out [seq, batch, heads * head_dim]
            return out.permute(2, 0, 1, 3).reshape(d["seq"], d["batch"], -1)

        self.fed = q
        backend, short, out = first_backend(self.device, kernel.shape, forward)
        name = f"torch/sdpa-{short}"
        if kernel.direction == "forward":
            del out
            return (lambda: forward(backend)), name
        self.fed = gradient = torch.randn_like(out)
        return (lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)), name

    _ragged_attention = _latent_attention = _attention

    def _attention_block(self, kernel: Kernel, dtype: torch.dtype) -> tuple[Call, str]:
        """All queries to all keys, laid out [batch, heads, seq, head_dim] as the ring has them."""
        batch, queries, keys, heads, kv_heads, dim = kernel.dims
        shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
        q, k, v = (self._normal(batch, *shape, dim, dtype=dtype) for shape in shapes)
        fused = choose(heads, kv_heads, dim, queries, batch, self.device)
        name = f"torch/sdpa-{fused.name}"
        self.fed = q
        if kernel.direction == "forward":
            return (lambda: fused.forward(q, k, v, False)), name
        out, sums = fused.forward(q, k, v, False)
        self.fed = gradient = torch.randn_like(out)
        return (lambda: fused.backward(gradient, q, k, v, out, sums, False)), name

    def _rmsnorm(self, kernel: Kernel, dtype: torch.dtype) -> Call:
        rows, width = kernel.dims
        x = self._normal(rows, width, dtype=dtype)
        w = torch.ones(width, dtype=dtype, device=self.device)
        return self._differentiable(kernel, lambda a, b: F.rms_norm(a, (width,), b, 1e-5), x, w)

    def _layernorm(self, kernel: Kernel, dtype: torch.dtype) -> Call:
        rows, width = kernel.dims
        x = self._normal(rows, width, dtype=dtype)
        w = torch.ones(width, dtype=dtype, device=self.device)
        b = torch.zeros(width, dtype=dtype, device=self.device)
        return self._differentiable(
            kernel, lambda x_, w_, b_: F.layer_norm(x_, (width,), w_, b_, 1e-5), x, w, b
        )

    _head_rmsnorm, _head_layernorm = _rmsnorm, _layernorm

    def _rope(self, kernel: Kernel, dtype: torch.dtype) -> Call:
        """Queries and keys in one call each; a fifth of the heads stand for the keys."""
        rows, heads, dim = kernel.dims
        keys = max(heads // 5, 1)
        freqs = torch.randn(rows, 1, 1, dim, device=self.device)
        q = self._normal(rows, 1, max(heads - keys, 1), dim, dtype=dtype)
        k = self._normal(rows, 1, keys, dim, dtype=dtype)
        self.fed = q

        def rotate(t: Tensor) -> Tensor:
            cos, sin = torch.cos(freqs).to(t.dtype), torch.sin(freqs).to(t.dtype)
            t, rest = t[..., :dim], t[..., dim:]
            first, second = torch.chunk(t, 2, dim=-1)
            t = (t * cos) + (torch.cat((-second, first), dim=-1) * sin)
            return torch.cat((t, rest), dim=-1)  # copies, though nothing is left to join

        if kernel.direction == "forward":
            return lambda: (rotate(q), rotate(k))
        q.requires_grad_()
        k.requires_grad_()
        out = (rotate(q), rotate(k))
        gradient = tuple(torch.randn_like(one) for one in out)
        self.fed = gradient[0]
        return lambda: torch.autograd.grad(out, (q, k), gradient, retain_graph=True)

    def _swiglu(self, kernel: Kernel, dtype: torch.dtype) -> Call:
        rows, width = kernel.dims
        x = self._normal(rows, 2 * width, dtype=dtype)

        def gated(y: Tensor) -> Tensor:
            gate, linear = torch.chunk(y, 2, dim=-1)
            return F.silu(gate) * (linear + 0.0)  # Megatron adds glu_linear_offset, 0 by default

        return self._differentiable(kernel, gated, x)

    def _gelu(self, kernel: Kernel, dtype: torch.dtype) -> Call:
        rows, width = kernel.dims
        return self._differentiable(kernel, F.gelu, self._normal(rows, width, dtype=dtype))

    def _residual(self, kernel: Kernel, dtype: torch.dtype) -> Call:
        """Forward: dropout of probability 0 runs nothing, then the sum. Backward: two gradients
        summed out of place, as a step sums none (see `_gradient_sum`)."""
        self.fed = a = self._normal(*kernel.dims, dtype=dtype)
        b = self._normal(*kernel.dims, dtype=dtype)
        if kernel.direction == "backward":
            return lambda: a + b
        return lambda: b + F.dropout(a, p=0.0, training=True)

    def _gradient_sum(self, kernel: Kernel, dtype: torch.dtype) -> Call:
        """Gradients of both branches meet in the one that came first: torch's
        autograd/input_buffer.cpp, `accumulate`, where nothing else holds that one."""
        kept = self._normal(*kernel.dims, dtype=dtype)
        self.fed = other = self._normal(*kernel.dims, dtype=dtype)
        return lambda: kept.add_(other)

    def _bias(self, kernel: Kernel, dtype: torch.dtype) -> Call:
        self.fed = rows = self._normal(*kernel.dims, dtype=dtype)
        if kernel.direction == "backward":
            return lambda: rows.sum(dim=0)
        bias = self._normal(kernel.dims[1], dtype=dtype)
        return lambda: rows + bias

    def _embedding(self, kernel: Kernel, dtype: torch.dtype) -> Call:
        rows, width, vocab = kernel.dims
        tokens = self._indices(vocab, rows)
        table = self._normal(vocab, width, dtype=dtype, scale=0.02)
        return self._looked_up(kernel, lambda w: F.embedding(tokens, w), table)

    def _looked_up(self, kernel: Kernel, look_up: Callable[..., Tensor], table: Tensor) -> Call:
        """What is before a forward look-up writes its tokens only, not the table."""
        call = self._differentiable(kernel, look_up, table)
        if kernel.direction == "forward":
            self.fed = None
        return call

    def _vocab_parallel_embedding(self, kernel: Kernel, dtype: torch.dtype) -> Call:
        """VocabParallelEmbedding's of the first rank, its all-reduce left out."""
        rows, width, vocab, ranks = kernel.dims
        start = 0  # of this rank's words
        tokens = self._indices(vocab * ranks, rows)
        table = self._normal(vocab, width, dtype=dtype, scale=0.02)

        def look_up(w: Tensor) -> Tensor:
            mask = (tokens < start) | (tokens >= start + vocab)
            mine = tokens.clone() - start
            mine[mask] = 0
            out = F.embedding(mine, w)
            out[mask, :] = 0.0
            return out

        return self._looked_up(kernel, look_up, table)

    def _cross_entropy(self, kernel: Kernel, dtype: torch.dtype) -> Call:
        """VocabParallelCrossEntropy's steps, its three all-reduces left out."""
        rows, vocab = kernel.dims
        self.fed = logits = self._normal(rows, vocab, dtype=dtype)
        target = self._indices(vocab, rows)
        every = torch.arange(rows, device=self.device)
        if kernel.direction == "backward":
            self.fed = softmax = torch.softmax(logits.float(), dim=-1)
            del logits
            scale = torch.full((rows,), 1.0, device=self.device)

            def backward() -> Tensor:
                softmax[torch.arange(rows, device=self.device), target] -= 1.0
                softmax.mul_(scale.unsqueeze(dim=-1))
                return softmax.to(dtype)

            return backward

        def forward() -> Tensor:
            x = logits.float()
            x -= torch.max(x, dim=-1)[0].unsqueeze(dim=-1)
            mask = (target < 0) | (target >= vocab)
            masked = target.clone()
            masked[mask] = 0
            predicted = x[every, masked].clone()
            predicted[mask] = 0.0
            torch.exp(x, out=x)
            total = x.sum(dim=-1)
            loss = torch.log(total) - predicted
            x.div_(total.unsqueeze(dim=-1))
            return loss

        return forward

    def _router(self, kernel: Kernel, dtype: torch.dtype) -> Call:
        """Softmax in fp32, top-k, and the map of tokens to experts."""
        rows, experts, top_k = kernel.dims
        logits = self._normal(rows, experts, dtype=dtype)

        def route(x: Tensor) -> Tensor:
            scores = torch.softmax(x, dim=-1, dtype=torch.float32)
            best, index = torch.topk(scores, k=top_k, dim=1)
            probabilities = torch.zeros_like(scores).scatter(1, index, best)
            torch.zeros_like(scores).int().scatter(1, index, 1).bool()
            return probabilities

        return self._differentiable(kernel, route, logits)

    def _permute(self, kernel: Kernel, dtype: torch.dtype) -> Call:
        """Rows gathered into expert order; backward scatters them back."""
        rows, width = kernel.dims
        x = self._normal(rows, width, dtype=dtype)
        order = torch.randperm(rows, device=self.device)
        return self._differentiable(kernel, lambda t: t.index_select(0, order), x)

    def _unpermute(self, kernel: Kernel, dtype: torch.dtype) -> Call:
        """Rows of two experts a token added to it; backward gathers the token's gradient twice."""
        rows, width = kernel.dims
        x = self._normal(rows, width, dtype=dtype)
        tokens = max(rows // 2, 1)
        order = torch.randperm(rows, device=self.device) % tokens

        def add_up(t: Tensor) -> Tensor:
            out = torch.zeros((tokens, width), dtype=t.dtype, device=t.device)
            return out.scatter_add_(0, order.unsqueeze(1).expand(-1, width), t)

        return self._differentiable(kernel, add_up, x)

    def _weigh(self, kernel: Kernel, dtype: torch.dtype) -> Call:
        """Both inputs learn: a row's factor is its token's probability of that expert."""
        rows, width = kernel.dims
        x = self._normal(rows, width, dtype=dtype)
        factors = torch.rand(rows, 1, device=self.device).to(dtype)
        return self._differentiable(kernel, torch.mul, x, factors)

    def _grad_accumulate(self, kernel: Kernel, dtype: torch.dtype) -> Call:
        (elements,) = kernel.dims
        main = self._normal(elements, dtype=torch.float32)
        self.fed = gradient = self._normal(elements, dtype=dtype)
        return lambda: main.add_(gradient)

    _accumulate = _grad_accumulate

    def _reorder(self, kernel: Kernel, dtype: torch.dtype) -> Call:
        """[seq, batch, heads, dim], as layers have it, to the ring's [batch, heads, seq, dim]."""
        rows, heads, dim = kernel.dims
        self.fed = by_token = self._normal(rows, 1, heads, dim, dtype=dtype)
        return lambda: by_token.permute(1, 2, 0, 3).contiguous()

    def _widen(self, kernel: Kernel, dtype: torch.dtype) -> Call:
        self.fed = piece = self._normal(*kernel.dims, dtype=dtype)
        return piece.float

    def _rescale(self, kernel: Kernel, dtype: torch.dtype) -> Call:
        """By ones: what is multiplied again and again must stay a normal number."""
        del dtype
        self.fed = joined = self._normal(*kernel.dims, dtype=torch.float32)
        factors = torch.ones(kernel.dims[0], device=self.device)
        return lambda: joined.mul_(factors[..., None])

    def _pieces(self, elements: int, dtype: torch.dtype) -> list[Tensor]:
        whole, rest = divmod(elements, PARAMETER)
        sizes = [PARAMETER] * whole + ([rest] if rest else [])
        return [self._normal(size, dtype=dtype, scale=0.02) for size in sizes]

    def _adam(self, kernel: Kernel, dtype: torch.dtype) -> tuple[Call, str]:
        """AdamW over fp32 shards, then the copy into the model's weights."""
        (elements,) = kernel.dims
        masters = self._pieces(elements, torch.float32)
        weights = [torch.empty_like(one, dtype=dtype) for one in masters]
        for one in masters:
            one.grad = torch.randn_like(one)
        fused = self.device.type == "cuda"
        optimizer = torch.optim.AdamW(masters, lr=1e-6, fused=fused or None)

        def step() -> None:
            optimizer.step()
            for master, weight in zip(masters, weights, strict=True):
                weight.copy_(master)

        return step, "torch/adamw-fused" if fused else "torch/adamw"

    def _grad_norm(self, kernel: Kernel, dtype: torch.dtype) -> tuple[Call, str]:
        """A norm per tensor, combined. That clipping reads it is the host's, and not timed here.

        The scaling that clips is a kernel of its own in `spec.step`, a copy.
        """
        del dtype
        pieces = self._pieces(kernel.dims[0], torch.float32)

        def norm() -> Tensor:
            together: Tensor = torch.norm(torch.stack([torch.norm(one) for one in pieces]))
            return together

        return norm, "torch/norm"

    def _copy(self, kernel: Kernel, dtype: torch.dtype) -> Call:
        (elements,) = kernel.dims
        self.fed = source = self._normal(elements, dtype=dtype)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def _shards(self, kernel: Kernel) -> tuple[int, list[int]]:
        """GPUs that shards lie on, and elements of each tensor's shard."""
        elements, ranks = kernel.dims
        left = max(elements // ranks, len(TENSORS) + 1)
        sizes = [max(int(left * share) // ALIGNED * ALIGNED, 1) for share in TENSORS]
        return ranks, [*sizes, left - sum(sizes)]

    def _gather_copy_out(self, kernel: Kernel, dtype: torch.dtype) -> Call:
        """`torch.distributed.fsdp`'s foreach_all_gather_copy_out."""
        ranks, sizes = self._shards(kernel)
        self.fed = message = self._normal(ranks, sum(sizes), dtype=dtype)
        weights = [torch.empty(ranks, size, dtype=dtype, device=self.device) for size in sizes]

        def copy_out() -> list[Tensor]:
            torch.split_with_sizes_copy(message, sizes, dim=1, out=weights)
            return weights

        return copy_out

    def _scatter_copy_in(self, kernel: Kernel, dtype: torch.dtype) -> Call:
        """`torch.distributed.fsdp`'s foreach_reduce_scatter_copy_in; the message is fp32."""
        ranks, sizes = self._shards(kernel)
        gradients = [self._normal(ranks, size, dtype=dtype) for size in sizes]
        message = torch.empty(ranks, sum(sizes), dtype=torch.float32, device=self.device)
        return lambda: torch._chunk_cat(gradients, 0, ranks, out=message)
