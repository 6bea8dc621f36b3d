"""Steady or stepped work for a device: what the telemetry checks watch."""

import time
from typing import Any


def load(message: dict[str, Any], timer: Any) -> dict[str, Any]:
    """In a worker: work for `seconds`, each piece timed to its end, us.

    A piece is matrix products, and launch-bound sums between them unless `products` asks for
    products alone. With `cycles`, that many times `idle_s` of nothing and then `seconds` of work:
    `spans` are the begin and end of each, monotonic seconds, which all processes of a host share.
    """
    import torch

    gpu = timer.device.type == "cuda"
    size, count = (4096, 8) if gpu else (256, 20)
    sums = 0 if message.get("products") else 20
    a = torch.randn(size, size, dtype=torch.bfloat16, device=timer.device)
    small = torch.randn(64, dtype=torch.bfloat16, device=timer.device)
    times: list[float] = []
    spans: list[tuple[float, float]] = []

    def piece() -> None:
        for _ in range(count):
            torch.matmul(a, a)
            for _ in range(sums):
                torch.add(small, small)
        timer.synchronize()

    piece()  # the first one also loads libraries
    for _ in range(message.get("cycles", 1)):
        time.sleep(message.get("idle_s", 0.0))
        start = time.monotonic()
        least = len(times) + (1 if "cycles" in message else 5)
        while len(times) < least or time.monotonic() - start < message["seconds"]:
            begin = time.perf_counter()
            piece()
            times.append((time.perf_counter() - begin) * 1e6)
        spans.append((start, time.monotonic()))
    found: dict[str, Any] = {"times_us": times, "spans": spans}
    found["flops"] = 2.0 * size**3 * count * len(times)
    if gpu:
        properties: Any = torch.cuda.get_device_properties(timer.device)
        found["multiprocessors"] = properties.multi_processor_count
        found["capability"] = [properties.major, properties.minor]
    return found
