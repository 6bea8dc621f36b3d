"""Executes a pipeline's graph: when each pass ends, for a vector of uncertainty draws at once."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulate.schedule import Graph

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Timeline:
    """Ends of the passes of one step; times in the unit of the durations given."""

    end: Array  # (stages, draws): when each stage's last pass ends
    last_start: Array  # (stages, draws): when each stage's last pass could begin
    busy: Array  # (stages, draws): time each stage spends in passes


def execute(graph: Graph, duration: Array, delay: Array) -> Timeline:
    """Run `graph` with each pass starting as soon as its stage and its input are ready.

    duration: (stages * chunks * 2, draws), indexed by `Graph.kind`.
    delay: (draws,) or (stages * chunks * 2, draws), time an activation or gradient needs to reach
    the pass that waits for it, by the kind of that pass.
    """
    draws = duration.shape[1]
    end = np.zeros((len(graph.kind), draws))
    took = duration[graph.kind]
    arrives = np.where(graph.crosses[:, None], delay if delay.ndim == 1 else delay[graph.kind], 0.0)
    before, sender = graph.before, graph.sender
    for rows in graph.levels:
        ready = end[sender[rows]]
        ready += arrives[rows]
        np.maximum(ready, end[before[rows]], out=ready)
        ready += took[rows]
        end[rows] = ready
    last = end[graph.last_row]
    busy = np.zeros((graph.stages, draws))
    counts = np.bincount(graph.kind[1:], minlength=duration.shape[0])
    per_stage = (duration * counts[:, None]).reshape(graph.stages, -1, draws)
    busy += per_stage.sum(axis=1)
    return Timeline(last, end[graph.last_backward_start], busy)
