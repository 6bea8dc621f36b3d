"""The model of a published row: from its cells, its name's published shape, its parameters."""

import re
from typing import Any

from pydantic import ValidationError

from simulate.series.choices import Filling
from simulate.series.models import TOO_FAR, Shape, is_mixture, named_shape, usual_ffn
from simulate.series.rows import SeriesRow, TooLittle
from spec.files import first_problem
from spec.model import ModelSpec

SLOTS = 1.15  # of a model's layers, for the stages of a pipeline to have as many each
MANY_WORDS = 262_144  # of a vocabulary that is not printed
WIDEST = 16  # MLP over the hidden size, without gates: Gemma's and LaMDA's have 12 and 14
HEADS = (128, 96, 64)  # values of a head, where none are known
EXPERTS = ("ep", "experts", "num_experts", "n_experts", "moe_experts")  # columns


def model_of(fill: Filling) -> ModelSpec:
    """The model of a row; raises TooLittle where its shape is not known."""
    row, shape = fill.row, named_shape(fill.row.text("model"))
    if shape and row.whole("hidden") not in (None, shape.hidden):
        shape = None  # the name's shape is another model's
    mixture = is_mixture(row.text("model")) or any((row.whole(one) or 1) > 1 for one in EXPERTS)
    distilled = "distill" in row.text("model").lower()  # DeepSeek-R1's are other models' shapes
    if mixture and not distilled and (shape is None or not shape.experts):
        raise TooLittle(f"the experts of model {row.text('model')!r} are not known")
    hidden = row.whole("hidden") or (shape.hidden if shape else None)
    if hidden is None:
        raise TooLittle(f"the shape of model {row.text('model')!r} is neither printed nor known")
    seq_len = row.whole("seq_len") or int(fill.choose("seq_len"))
    if shape and not row.whole("hidden"):
        fill.assumed.append(f"shape of {row.text('model')} from {shape.source}")
    gated = shape.gated if shape else _gated(row, hidden)
    heads, kv_heads = _heads(fill, shape, hidden)
    vocab = row.whole("vocab") or (shape.vocab if shape else None)
    if vocab is None:
        vocab = 128256 if gated else 51200
        fill.assumed.append(f"vocabulary {vocab} assumed")
    fields: dict[str, Any] = {
        "name": "published model",  # a source's words are no name that files could bear
        "layers": row.whole("layers") or (shape.layers if shape else None) or 1,
        "hidden": hidden,
        "ffn_hidden": row.whole("ffn_hidden") or (shape.ffn_hidden if shape else None) or 1,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": (shape.head_dim if shape else None) or hidden // heads,
        "vocab": vocab,
        "seq_len": seq_len,
        "gated": gated,
        "norm": "rmsnorm" if gated else "layernorm",
        "position": "rope" if gated else "learned",
        "qk_norm": bool(shape and shape.qk_norm),
        "linear_bias": not gated and "mpt" not in row.words,
        "tied_embeddings": not gated and "nemotron" not in row.words,
        "experts": shape.experts if shape else 0,
        "top_k": shape.top_k if shape else 0,
        **(shape.more if shape else {}),
    }
    if fields.get("kv_lora_rank"):
        fields["kv_heads"] = heads  # whatever is printed of what they share
    try:
        _own_width(fill, fields, shape)
        model = _solved(fill, ModelSpec.model_validate(fields), shape)
        if shape is not None:
            _check_parameters(row, model, shape)
        else:
            _check_cells(row, model)
        return model
    except ValidationError as error:
        raise TooLittle(first_problem(error)) from None


def _own_width(fill: Filling, fields: dict[str, Any], shape: Shape | None) -> None:
    """Take a mixture's published width where a cell has another MLP's: the dense layers' one.

    Qwen3's configurations have an `intermediate_size` beside their `moe_intermediate_size`.
    """
    if shape is None or not shape.experts or fields["ffn_hidden"] == shape.ffn_hidden:
        return
    total, printed = fill.row.parameters, ModelSpec.model_validate(fields).parameters()
    published = ModelSpec.model_validate(fields | {"ffn_hidden": shape.ffn_hidden}).parameters()
    far = abs(printed / published - 1) > TOO_FAR
    if far and (total is None or abs(total / printed - 1) > TOO_FAR):
        fill.assumed.append(f"experts of width {shape.ffn_hidden}, not {fields['ffn_hidden']}")
        fields["ffn_hidden"] = shape.ffn_hidden


def _heads(fill: Filling, shape: Shape | None, hidden: int) -> tuple[int, int]:
    """Heads and key heads: printed or published, else of a usual size that TP divides."""
    row = fill.row
    heads = row.whole("heads") or (shape.heads if shape else None)
    if heads is None or hidden % heads:
        why = f", as {heads} do not divide the hidden size {hidden}" if heads else ""
        tp = row.whole("tp") or 1
        sizes = [size for size in HEADS if hidden % size == 0]
        split = (size for size in sizes if hidden // size % tp == 0)
        heads = hidden // next(split, sizes[0] if sizes else hidden)
        fill.assumed.append(f"{heads} heads assumed{why}")
    kv_heads = row.whole("kv_heads") or (shape.kv_heads if shape else heads)
    return heads, heads if heads % kv_heads else kv_heads


def _check_parameters(row: SeriesRow, model: ModelSpec, shape: Shape) -> None:
    """Refuse a name whose model has not the printed parameters, as published nor as cells say."""
    total = row.parameters or 0.0
    published = model.resized(layers=shape.layers, ffn_hidden=shape.ffn_hidden).parameters()
    far = all(abs(total / one - 1) > TOO_FAR for one in (published, model.parameters()))
    if total and far:
        raise TooLittle(
            f"params {row.text('params')} is not the {published / 1e9:.3g} billion of model "
            f"{row.text('model')!r}: the shape is another one's"
        )


def _check_cells(row: SeriesRow, model: ModelSpec) -> None:
    """Refuse layers and a hidden size that have not the printed parameters, whatever is open.

    That is whether embeddings count, and the head apart; key heads and vocabulary where they are
    not printed, and how many matrices a printed MLP width is of.
    """
    total = row.parameters or 0.0
    least: dict[str, Any] = {}
    most: dict[str, Any] = {"tied_embeddings": False}
    if not row.whole("kv_heads"):
        least["kv_heads"], most["kv_heads"] = 1, model.heads
    if not row.whole("vocab"):
        most["vocab"] = max(model.vocab, MANY_WORDS)
    if row.whole("ffn_hidden"):
        least["gated"], most["gated"] = False, True
    low = model.layers * model.resized(**least).layer_parameters()
    high = model.resized(**most).parameters()
    if total and not low * (1 - TOO_FAR) <= total <= high * (1 + TOO_FAR):
        raise TooLittle(
            f"params {row.text('params')} is not the {model.parameters() / 1e9:.3g} billion of "
            f"{model.layers} layers with hidden size {model.hidden}: they are another model's, or "
            "a mixture's, whose experts are not known"
        )


_GATED = r"llama|mistral|mixtral|qwen|grok|deepseek"
# Families whose gates are known where the width does not tell: some are four times as wide.
_WIDE_GATED = r"gemma|olmo|smollm|granite[- ]?3|phi[- ]?3|internlm|\byi\b"


def _gated(row: SeriesRow, hidden: int) -> bool:
    """SwiGLU or not, by the MLP's width, else by the model's family.

    Four times the hidden size has it in Llama 3.2 1B, Gemma 2, OLMo, SmolLM2 and Granite, too.
    """
    ffn = row.whole("ffn_hidden")
    if ffn is not None and ffn != 4 * hidden:
        return True
    if ffn is None:
        return re.search(_GATED, row.words) is not None
    name = re.split(r"\(|\bvs\b", row.text("model").lower())[0]  # not its tokenizer's family
    return re.search(rf"{_GATED}|{_WIDE_GATED}", name) is not None


def _solved(fill: Filling, model: ModelSpec, shape: Shape | None) -> ModelSpec:
    """Layers or MLP width from the printed number of parameters, where these are not printed."""
    row = fill.row
    total = row.parameters
    outside = model.embedding_parameters() + model.head_parameters()
    unfinished = "prequel" in row.text("model").lower()  # other depths than the published one
    if not row.whole("layers") and (shape is None or unfinished):
        if total is None:
            raise TooLittle("the number of layers is not printed, nor the parameters")
        wide = model.resized(ffn_hidden=usual_ffn(model))
        layers = max(round((total - outside) / wide.layer_parameters()), 1)
        fill.assumed.append(f"{layers} layers from {total:.4g} parameters")
        return wide.resized(layers=layers)
    if row.whole("ffn_hidden") or shape is not None:
        return model
    ffn = usual_ffn(model)
    if total:
        usual, least = (model.resized(ffn_hidden=width) for width in (ffn, 1))
        far = abs(total / usual.parameters() - 1) > TOO_FAR
        each = (model.resized(ffn_hidden=2).layer_parameters() - least.layer_parameters()) or 1
        solved = ((total - outside) / model.layers - least.layer_parameters()) / each
        narrowest = 1 if model.gated else 4
        widest = WIDEST if far else 8 if model.gated else 0  # without gates the usual one, if near
        if narrowest < solved / model.hidden < widest:
            ffn = max(round(solved / 256), 1) * 256
    fill.assumed.append(f"MLP width {ffn} assumed")
    return model.resized(ffn_hidden=ffn)


def layer_slots(model: ModelSpec, pp: int) -> int | None:
    """Layers that fill `pp` stages evenly; None where that takes too many.

    An embedding or a head takes a layer's place: Megatron's
    account_for_embedding_in_pipeline_split, or fewer layers on the outer stages.
    """
    slots = -(-model.layers // pp) * pp
    return slots if slots <= model.layers * SLOTS else None
