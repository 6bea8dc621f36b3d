"""LoRA adapters for Megatron-Core, which has none: low-rank products beside frozen linear layers.

Every linear layer of attention and MLP gets one: `y = W x + B (A x)`, A of [rank, in], B of
[out, rank], alpha equal to the rank (Hu et al. 2021, arXiv 2106.09685). Where W is split over
tensor-parallel ranks, so is the adapter's matrix on that side; the other one is whole on every
rank and works on the tokens that the rank has (a tp-th of them under sequence parallelism). The
activations between the two, `rank` wide, are what ranks exchange:

- column-parallel W: A whole, B split. Under sequence parallelism `A x` is gathered (its gradient
  scattered); else the gradient of `A x` is all-reduced.
- row-parallel W: A split, B whole. Under sequence parallelism `A x` is reduce-scattered (its
  gradient gathered); else `A x` is all-reduced.

On Transformer Engine the first product of each block has the norm in it, and hands what it
normalised to its adapter (`return_layernorm_output`). Adapters stay in bf16 there, in FP8 steps
too, as those of NeMo and Megatron Bridge do. Under sequence parallelism these gather what was
normalised in bf16, once for product and adapter (`return_layernorm_output_gathered`), and keep all
tokens of it; ours gather `A x`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import mappings

Tensor = torch.Tensor
STD = 0.02  # of A's initial values; B begins at zero


def _adapter(layer: Any, rank: int, split: str) -> None:
    """Give `layer` its two matrices; `split` names the one that tensor parallelism splits."""
    rows, columns = layer.weight.shape
    shapes = {"lora_a": (rank, columns), "lora_b": (rows, rank)}
    like = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    for name, shape in shapes.items():
        values = (
            torch.randn(shape, **like) * STD if name == "lora_a" else torch.zeros(shape, **like)
        )
        parameter: Any = torch.nn.Parameter(values)
        axis = 0 if name == "lora_b" else 1
        stride = getattr(layer.weight, "partition_stride", 1)  # 2 where gate and input lie in one
        tensor_parallel.set_tensor_model_parallel_attributes(parameter, name == split, axis, stride)
        # a whole matrix that saw only this rank's tokens: its gradient is summed over ranks
        parameter.sequence_parallel = layer.sequence_parallel and name != split
        layer.register_parameter(name, parameter)


class _Adapted(torch.nn.Module):
    """What a frozen layer has beside its adapter; the class behind it is the layer's own."""

    lora_rank = 0
    lora_a: Tensor
    lora_b: Tensor
    sequence_parallel: bool
    tp_group: Any


class _Column(_Adapted):
    """A frozen column-parallel layer with an adapter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _adapter(self, self.lora_rank, "lora_b")
        if hasattr(self, "return_layernorm_output"):  # a product with the norm in it
            self.return_layernorm_output = True

    def forward(self, input_: Tensor) -> Any:
        """As the layer itself, its low-rank update added."""
        output, bias, taken = self._frozen(input_)
        narrow = F.linear(taken, self.lora_a)
        if self.sequence_parallel:
            narrow = mappings.gather_from_sequence_parallel_region(
                narrow, tensor_parallel_output_grad=True, group=self.tp_group
            )
        else:
            narrow = mappings.copy_to_tensor_model_parallel_region(narrow, group=self.tp_group)
        return output + F.linear(narrow, self.lora_b), bias

    def _frozen(self, input_: Tensor) -> tuple[Tensor, Any, Tensor]:
        """The layer's output, its bias and what its product takes, which it may normalise first."""
        found = super().forward(input_)
        if len(found) == 3:  # Transformer Engine's, where its bias is added later
            output, bias, taken = found
        else:
            output, bias = found
            taken = input_
            if isinstance(output, tuple):
                output, taken = output
        return output, bias, taken


class _Row(_Adapted):
    """A frozen row-parallel layer with an adapter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _adapter(self, self.lora_rank, "lora_a")

    def forward(self, input_: Tensor) -> Any:
        """As the layer itself, its low-rank update added."""
        output, bias = super().forward(input_)
        narrow = F.linear(input_, self.lora_a)
        if self.sequence_parallel:
            narrow = mappings.reduce_scatter_to_sequence_parallel_region(
                narrow, group=self.tp_group
            )
        else:
            narrow = mappings.reduce_from_tensor_model_parallel_region(narrow, group=self.tp_group)
        return output + F.linear(narrow, self.lora_b), bias


def adapt(layer: Any, rank: int) -> None:
    """Give the linear layers of a layer spec of Megatron-Core adapters of `rank`."""
    attention = layer.submodules.self_attention.submodules
    mlp = layer.submodules.mlp.submodules
    for block, column, row in (
        (attention, "linear_qkv", "linear_proj"),
        (mlp, "linear_fc1", "linear_fc2"),
    ):
        for name, kind in ((column, _Column), (row, _Row)):
            own = getattr(block, name)
            adapted = type(f"Lora{own.__name__}", (kind, own), {"lora_rank": rank})
            setattr(block, name, adapted)


def freeze(chunk: Any) -> None:
    """Leave only adapters to be trained; every layer still hands a gradient to the one before."""
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_("lora_" in name)
    if chunk.pre_process:
        # recomputation runs no backward pass where no input needs a gradient
        chunk.embedding.register_forward_hook(lambda *seen: seen[-1].requires_grad_())
