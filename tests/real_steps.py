"""Steps of real Megatron-Core on a CPU, watched from within each rank."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism

LLAMA = load_model("tiny").resized(layers=2)
GPT = LLAMA.resized(
    name="tiny-gpt", gated=False, norm="layernorm", position="learned",
    linear_bias=True, tied_embeddings=True, kv_heads=4,
)  # fmt: skip
NORMED = LLAMA.resized(name="tiny-qwen3", qk_norm=True)
LATENT = LLAMA.resized(
    name="tiny-deepseek", kv_heads=4, kv_lora_rank=48, q_lora_rank=64, rope_head_dim=16,
    v_head_dim=24,
)  # fmt: skip
SHARED = LLAMA.resized(name="tiny-shared", experts=4, top_k=2, shared_ffn_hidden=96)

Watch = Callable[[list[Any]], AbstractContextManager[None]]


@contextmanager
def noted(log: list[Any], ran: Callable[[str, Any, Any], list[Any]]) -> Iterator[None]:
    """Notes what `ran` makes of each operation of torch: its name, arguments and result."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Noting(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            log.extend(ran(str(func).split(".")[1], args, out))
            return out

    with Noting():
        yield


def _rank(model: ModelSpec, p: Parallelism, rank: int, pipe: Connection, watch: Watch) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    log: list[Any] = []
    from measure.training.rank import Ranks, build

    def meet(port: int) -> int:
        pipe.send(port)
        return int(pipe.recv())

    about = {"device_kind": "cpu", "gpus": p.gpus, "device": rank, "address": "127.0.0.1"}
    ranks = Ranks(about, rank, meet)
    trainer = build(model, p, ranks.device, seeded=True)
    trainer.step(trainer.batches(0))
    batches = trainer.batches(1)
    with watch(log):
        trainer.step(batches)
    pipe.send(log)
    pipe.recv()
    os._exit(0)


@lru_cache
def logged(model: ModelSpec, p: Parallelism, watch: Watch) -> tuple[list[Any], ...]:
    """What `watch` notes of the second of two steps on each rank, in a process of its own.

    `watch` is a function of a module: a context in which it appends to the list it is given.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["measure.training.rank"])
    pairs = [context.Pipe() for _ in range(p.gpus)]
    processes = [
        context.Process(target=_rank, args=(model, p, rank, theirs, watch), daemon=True)
        for rank, (_, theirs) in enumerate(pairs)
    ]
    for process in processes:
        process.start()
    for _, theirs in pairs:
        theirs.close()  # so that a dead rank is the end of its pipe
    try:
        ports = [mine.recv() for mine, _ in pairs]
        for mine, _ in pairs:
            mine.send(max(ports))
        found = []
        for mine, _ in pairs:
            assert mine.poll(60), "a rank said nothing"
            found.append(mine.recv())
        for mine, _ in pairs:
            mine.send("done")
        return tuple(found)
    finally:
        for process in processes:
            process.join(timeout=2)
            process.kill()
