"""The model whose arithmetic is nil: its steps show what the host takes to issue one.

Both `measure` (which steps to time) and `calibrate` (what they issue) read it from here.
"""

from spec.model import ModelSpec, load_model
from spec.parallelism import Parallelism
from spec.records import MOST_TP
from spec.step import layer
from spec.step_ends import embedding, head
from spec.step_parts import Part

# As many layers as between the smallest models' two and four, so that what the ends of a model cost
# is shared among about as many parts.
LAYERS = 3
# Llama 3's layer at sizes that take no time. GPUs want heads that 8 of them can share, and that
# their attention kernels take.
ON_CPU = {"hidden": 32, "ffn_hidden": 64, "heads": 2, "kv_heads": 1, "vocab": 128, "seq_len": 16}
ON_GPU = {
    "hidden": 128,
    "ffn_hidden": 256,
    "heads": MOST_TP,
    "kv_heads": MOST_TP,
    "vocab": 1024,
    "seq_len": 1024,
}
MORE = {"name": "nil", "layers": LAYERS, "head_dim": 16}
TOP_K = 2


def nil_model(sizes: dict[str, int], experts: int = 0, lora_rank: int = 0) -> ModelSpec:
    """The model, with so many experts in a layer, or frozen with adapters of that rank."""
    mixture = {"experts": experts, "top_k": TOP_K} if experts else {}
    lora = {"lora_rank": lora_rank}
    return ModelSpec(**load_model("small").model_dump() | sizes | MORE | mixture | lora)


def one_pass(model: ModelSpec, p: Parallelism) -> tuple[Part, ...]:
    """All parts of one microbatch, forward and backward, where one stage has all layers."""
    pairs = (*[layer(model, p)] * model.layers, embedding(model, p), head(model, p))
    return tuple(part for pair in pairs for segment in pair for part in segment)
