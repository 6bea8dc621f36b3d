"""What `measure` found on each GPU of a pipeline, for `simulate.place` to place layers by."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from spec.fitted import NonNegative, Positive

SCHEMA = "placement-probe/1"
PROBE, PREDICTION = "placement-probe.json", "placement-prediction.json"  # in a run's folder


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StageProbe(_Form):
    """One stage of the pipeline that was measured; times per microbatch, s."""

    device: NonNegativeInt = Field(description="index of the GPU that holds it")
    layers: Annotated[int, Field(ge=1, le=10_000)]
    layers_forward_s: Positive = Field(description="forward pass of its transformer layers")
    layers_backward_s: Positive
    other_forward_s: NonNegative = Field(description="beside them: embedding; head and loss")
    other_backward_s: NonNegative
    step_cv: NonNegative = Field(description="spread of its layers' time, step to step, a share")
    clock_mhz: Positive | None = None
    power_w: Positive | None = None


class PlacedStages(_Form):
    """A placement: layers of each stage, and the GPU that holds it, first stage to last."""

    layers: tuple[PositiveInt, ...]
    devices: tuple[NonNegativeInt, ...]


class PlacementProbe(_Form):
    """placement-probe.json: the pipeline with as many layers on every stage, as it ran."""

    schema_version: Literal["placement-probe/1"] = Field(alias="schema")
    written: str = Field(description="ISO 8601, UTC")
    model: str
    microbatches: PositiveInt
    steps: PositiveInt = Field(description="steps behind the medians")
    step_time_s: Positive = Field(description="median")
    stages: Annotated[tuple[StageProbe, ...], Field(min_length=1, max_length=1024)]
    others: dict[str, PlacedStages] = Field(
        default_factory=dict, description="further placements to predict"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        devices = sorted(one.device for one in self.stages)
        if len(set(devices)) != len(devices):
            raise ValueError(f"devices are {devices}; every stage must have a GPU of its own")
        layers = sum(one.layers for one in self.stages)
        for name, other in self.others.items():
            if sorted(other.devices) != devices or sum(other.layers) != layers:
                raise ValueError(
                    f"{name}: {other.layers} on {other.devices}; its layers must add up to "
                    f"{layers}, on the devices {devices}"
                )
        return self
