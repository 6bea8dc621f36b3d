"""Hybrid sharding: gradients summed between copies of a model.

Each group of replicas shares one copy and is simulated as ZeRO-3 (`Plan.parallelism`). A GPU then
sums its shard's gradients with those that hold the same shard in other groups. PyTorch does so
behind each unit's reduce-scatter of every microbatch, as `all_reduce_grads` is on by default
(torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, `foreach_reduce`); elsewhere it is taken
to be once a step.
"""

import numpy as np
from numpy.typing import NDArray

from simulate.cost.groups import Layout
from simulate.series.choices import of_pytorch
from simulate.series.plan import Plan
from simulate.step.estimate import StepEstimate
from spec.collective import Collective
from spec.step import trained_parameters
from topologies.placement import group_path

BACKWARD = 2 / 3  # of a microbatch's passes


def waited_s(one: Plan, estimate: StepEstimate) -> NDArray[np.float64]:
    """What a step waits for of the sums between several copies, seconds, (draws,).

    With overlap they go beside a microbatch's backward pass, as far as this has time beside what
    leaves the node anyway; those of a stage's last layer come behind it.
    """
    p, costs, model = one.parallelism, estimate.priced.costs, one.model
    path = group_path(one.node, one.fabric, one.gpus, one.copies, p.gpus // p.pp)
    between = costs.with_(layout=Layout({"dp": path}), _sent={})
    dense, experts = trained_parameters(model, p, 0)
    nbytes = 4.0 * (dense + experts * p.ep) / (p.dp * p.cp)
    summed = Collective("all_reduce", "dp", nbytes)
    sent_s: NDArray[np.float64] = between.collective_us(summed) / 1e6
    times = p.microbatches if of_pytorch(one.row) else 1
    if not p.overlap:
        return times * sent_s
    sharing = estimate.traffic.get("dp")
    busy_s = sharing.total_s if sharing is not None and sharing.outside_bytes else 0.0
    beside_s = BACKWARD / p.microbatches * max(estimate.breakdown_s["compute"] - busy_s, 0.0)
    return times * np.maximum(sent_s / p.stage_layers(model)[0], sent_s - beside_s)
