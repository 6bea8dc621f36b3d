"""Durations of a pipeline stage's passes on its own device, transformer layers told apart.

Megatron-Core's schedules call `forward_step` and `backward_step` for each microbatch; these and the
optimizer's step are wrapped here, in this process, and the layers' beginning and end are marked by
hooks on the decoder.
On a GPU a mark is an event in the stream, so that waiting for messages, which comes before a pass,
is not counted.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules

_schedules: Any = schedules  # patched below, which the type checker would refuse
_cuda: Any = torch.cuda

UPDATE = "update_s"  # of a whole step
# (label of a mark, label of the next): which span counts as what
_SPANS = {
    ("forward", "layers"): "other_forward_s",
    ("layers", "head"): "layers_forward_s",
    ("layers", "end"): "layers_forward_s",
    ("head", "end"): "other_forward_s",
    ("backward", "layers back"): "other_backward_s",
    ("backward", "embedding back"): "layers_backward_s",
    ("backward", "end"): "layers_backward_s",
    ("layers back", "embedding back"): "layers_backward_s",
    ("layers back", "end"): "layers_backward_s",
    ("embedding back", "end"): "other_backward_s",
    ("update", "end"): UPDATE,
}
NAMES = tuple(dict.fromkeys(_SPANS.values()))


class PassTimes:
    """Marks every pass of this rank from now on; `read` sums them up."""

    def __init__(self, trainer: Any, gpu: bool) -> None:
        self._gpu = gpu
        self._marks: list[tuple[str, Any]] = []
        model = trainer.chunks[0].module.module  # in DistributedDataParallel and Float16Module
        self._first, self._last = model.pre_process, model.post_process
        model.decoder.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.decoder.register_forward_hook(self._leave)
        for name in ("forward_step", "backward_step"):
            setattr(_schedules, name, self._wrapped(getattr(_schedules, name), name[:-5]))
        trainer.optimizer.step = self._wrapped(trainer.optimizer.step, "update")

    def _mark(self, label: str) -> None:
        moment: Any = time.perf_counter()
        if self._gpu:
            moment = _cuda.Event(enable_timing=True)
            moment.record()
        self._marks.append((label, moment))

    def _wrapped(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*arguments: Any, **named: Any) -> Any:
            self._mark(label)
            found = function(*arguments, **named)
            self._mark("end")
            return found

        return run

    def _enter(self, module: Any, arguments: Any, named: Any) -> None:
        del module
        self._mark("layers")
        hidden = named.get("hidden_states", arguments[0] if arguments else None)
        if self._first and hidden is not None and hidden.requires_grad:
            hidden.register_hook(lambda _: self._mark("embedding back"))

    def _leave(self, module: Any, arguments: Any, output: Any) -> None:
        del module, arguments
        self._mark("head")
        if self._last and output.requires_grad:
            output.register_hook(lambda _: self._mark("layers back"))

    def read(self) -> dict[str, float]:
        """Seconds of each kind since the last reading; the device must be idle."""
        found = dict.fromkeys(NAMES, 0.0)
        for (label, begin), (after, end) in zip(self._marks, self._marks[1:], strict=False):
            kind = _SPANS.get((label, after))
            if kind is not None:
                found[kind] += begin.elapsed_time(end) / 1e3 if self._gpu else end - begin
        self._marks.clear()
        return found
