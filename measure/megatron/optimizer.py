"""Megatron-Core's optimizer, around torch's Adam or on Transformer Engine around its own."""

from typing import Any

import torch
from megatron.core import optimizer as built
from megatron.core import utils
from megatron.core.optimizer import (
    OptimizerConfig,
    clip_grads,
    distrib_optimizer,
    get_megatron_optimizer,
)
from megatron.core.optimizer import optimizer as mixed_precision

from spec.errors import WorkError
from spec.parallelism import Parallelism

# On random tokens a model learns to say the same of all of them, within ten steps without gates and
# within forty with. Its steps were up to 3.8 % faster under a power cap then, presumably because
# products of like rows draw less. So on GPUs steps change the optimizer's fp32 weights, and hardly
# a bf16 one; on a CPU models learn, which tests of their splits look at.
LEARNING_RATE = {"cuda": 1e-7, "cpu": 1e-4}
CLIP_GRADIENT = 1.0


def of_torch(optimizer: Any) -> list[Any]:
    """The optimizers of torch in one of Megatron-Core's; a part without parameters has none."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in parts if part.optimizer is not None]


def update_by_torch() -> None:
    """Have Megatron-Core update, in this process, as where there is no Transformer Engine.

    Where it or Apex is installed, Megatron-Core takes its Adam, norm and clipping for local layers
    too, and the same step would be another from one machine to the next.
    """
    patched: dict[Any, dict[str, Any]] = {
        built: {"Adam": torch.optim.AdamW, "USING_PYTORCH_OPTIMIZER": True},
        distrib_optimizer: {
            "Adam": torch.optim.Adam,
            "HAVE_APEX_OR_TE": False,
            "USING_TE_OPTIMIZER": False,
            "USING_APEX_OPTIMIZER": False,
        },
        clip_grads: {
            "l2_norm_impl": utils.local_multi_tensor_l2_norm,
            "multi_tensor_applier": utils.local_multi_tensor_applier,
            "multi_tensor_scale_impl": utils.local_multi_tensor_scale,
        },
        mixed_precision: {
            "multi_tensor_applier": utils.local_multi_tensor_applier,
            "multi_tensor_scale_impl": utils.local_multi_tensor_scale,
        },
    }
    for module, names in patched.items():
        for name, value in names.items():
            if not hasattr(module, name):
                raise WorkError(f"Megatron-Core's {module.__name__} has no {name}; 0.16 has")
            setattr(module, name, value)


def build_optimizer(chunks: list[Any], p: Parallelism, device: torch.device) -> tuple[Any, str]:
    """Megatron-Core's optimizer around torch's AdamW, fused on GPUs, or on Transformer Engine
    around its own; and the name of what it is around."""
    if not p.on_engine:
        update_by_torch()
    config = OptimizerConfig(
        optimizer="adam",
        lr=LEARNING_RATE[device.type],
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=p.zero == 1,
        overlap_param_gather=p.overlap and p.zero == 1,
        clip_grad=CLIP_GRADIENT,
    )
    optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    kind = "nothing to update"
    for inner in of_torch(optimizer):
        kind = f"{type(inner).__module__.partition('.')[0]} {type(inner).__name__}"
        if isinstance(inner, torch.optim.Adam | torch.optim.AdamW) and device.type == "cuda":
            kind = "torch fused AdamW"
            for group in inner.param_groups:  # before the first step, which makes its state so
                group["fused"], group["foreach"] = True, False
    return optimizer, kind
