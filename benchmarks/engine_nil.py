"""Nil steps by local layers, on Transformer Engine and there in FP8: part of its benchmark.

See `benchmarks.transformer_engine`.
"""

from collections.abc import Iterator
from statistics import median

from spec.nil import ON_GPU, nil_model
from spec.parallelism import Parallelism

MICROBATCHES = 5
NIL = ({"layers": 3}, {"layers": 12}, {"layers": 3, "recompute": "full"})


def nil_steps() -> Iterator[tuple[str, str, str, str, float]]:
    """Passes of nil layers, by each, in turn: (what, way, shape, by, us)."""
    from measure.training.plan import WARM_UP, TrainingCase
    from measure.training.steps import step_times

    engine = {"transformer_impl": "transformer_engine"}
    for case in NIL:
        again = case.get("recompute", "none")
        layers = int(str(case["layers"]))
        model = nil_model(ON_GPU).resized(layers=layers)
        split = {"global_batch": MICROBATCHES, "recompute": again}
        for by, more in (
            ("local", {}),
            ("engine", engine),
            ("engine_fp8", engine | {"fp8": True}),
        ):
            p = Parallelism(**split, **more)  # type: ignore[arg-type]
            steps = TrainingCase(model, p, 10, WARM_UP, 12.0, f"nil-{by}")
            (found,) = step_times(steps, (MICROBATCHES,), 3, device_kind="nvidia")
            shape = f"layers={layers},recompute={again}"
            for way in ("forward", "backward"):
                took = median(one[f"layers_{way}_s"] for one in found.passes)
                yield "nil", way, shape, by, 1e6 * took / (layers * MICROBATCHES)
            yield "nil", "update", shape, by, 1e6 * min(found.updates_s)
