"""Steady work for a device: what the telemetry checks watch."""

import time
from typing import Any


def load(message: dict[str, Any], timer: Any) -> dict[str, Any]:
    """In a worker: matrix products and launch-bound sums, each piece timed to its end."""
    import torch

    gpu = timer.device.type == "cuda"
    size, count = (4096, 8) if gpu else (256, 20)
    a = torch.randn(size, size, dtype=torch.bfloat16, device=timer.device)
    small = torch.randn(64, dtype=torch.bfloat16, device=timer.device)
    times: list[float] = []
    end = time.monotonic() + message["seconds"]
    while len(times) < 5 or time.monotonic() < end:
        begin = time.perf_counter()
        for _ in range(count):
            torch.matmul(a, a)
            for _ in range(20):
                torch.add(small, small)
        timer.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return {"times_us": times}
