"""Hybrid sharding: gradients summed between copies of a model.

Each group of replicas shares one copy and is simulated as ZeRO-3 (`Plan.parallelism`). A GPU then
sums its shard's gradients with those that hold the same shard in other groups, once a step: PyTorch
(torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_reduce`) behind each unit's
reduce-scatter, JAX wherever its scheduler puts it.
"""

import numpy as np
from numpy.typing import NDArray

from simulate.cost.groups import Layout
from simulate.series.plan import Plan
from simulate.step.estimate import StepEstimate
from spec.collective import Collective
from spec.step import trained_parameters
from topologies.placement import group_path

BACKWARD = 2 / 3  # of a microbatch's passes


def waited_s(one: Plan, estimate: StepEstimate) -> NDArray[np.float64]:
    """What a step waits for of the sums between several copies, seconds, (draws,).

    With overlap they go beside the last microbatch's backward pass, as far as this has time beside
    what it sends itself; those of its last layer come behind it.
    """
    p, costs = one.parallelism, estimate.priced.costs
    path = group_path(one.node, one.fabric, one.gpus, one.copies, p.gpus // p.pp)
    between = costs.with_(layout=Layout({"dp": path}), _sent={})
    nbytes = 4.0 * sum(trained_parameters(one.model, p, 0)) / (p.dp * p.cp)
    summed = Collective("all_reduce", "dp", nbytes)
    sent_s: NDArray[np.float64] = between.collective_us(summed) / 1e6
    if not p.overlap:
        return sent_s
    busy_s = estimate.traffic["dp"].total_s if "dp" in estimate.traffic else 0.0
    beside_s = BACKWARD / p.microbatches * max(estimate.breakdown_s["compute"] - busy_s, 0.0)
    return np.maximum(sent_s / one.model.layers, sent_s - beside_s)
