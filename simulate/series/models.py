"""Shapes of models that published tables name without printing them.

Each with where its shape is published. A row's own cells always win over these.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from spec.model import ModelSpec, load_model, model_names


@dataclass(frozen=True)
class Shape:
    """A transformer's shape as a paper or a released configuration gives it."""

    layers: int
    hidden: int
    ffn_hidden: int
    heads: int
    kv_heads: int
    vocab: int
    gated: bool
    source: str
    experts: int = 0
    top_k: int = 0
    head_dim: int | None = None
    qk_norm: bool = False
    more: Mapping[str, int] = field(default_factory=dict)  # fields of a model that these lack


TOO_FAR = 0.2  # of a printed number of parameters: the named shape is another model's
_LLAMA2, _LLAMA3 = "arXiv 2307.09288", "arXiv 2407.21783, table 3"
_GPT3 = "arXiv 2005.14165, table 2.1"
_NARAYANAN = "arXiv 2104.04473, table 1"
_QWEN = "Hugging Face config.json"


def _gpt(layers: int, hidden: int, heads: int) -> Shape:
    """A GPT of Megatron-LM's weak scaling in 2021: names are parameter counts."""
    return Shape(layers, hidden, 4 * hidden, heads, heads, 51200, False, _NARAYANAN)


# Pattern of the name (lower case, blanks and underscores as -), most particular first.
SHAPES: tuple[tuple[str, Shape], ...] = (
    (r"llama-?3\S*[- ]405b", Shape(126, 16384, 53248, 128, 8, 128256, True, _LLAMA3)),
    (r"llama-?3\S*[- ]70b", Shape(80, 8192, 28672, 64, 8, 128256, True, _LLAMA3)),
    (r"llama-?3\S*[- ]8b", Shape(32, 4096, 14336, 32, 8, 128256, True, _LLAMA3)),
    (r"code-?llama-?34b|llama-?2?-34b", Shape(48, 8192, 22016, 64, 8, 32000, True, _LLAMA2)),
    (r"llama-?2?-?(style-)?70b", Shape(80, 8192, 28672, 64, 8, 32000, True, _LLAMA2)),
    (r"llama-?(1|2)?-?65b", Shape(80, 8192, 22016, 64, 64, 32000, True, "arXiv 2302.13971")),
    (r"llama-?2?-?13b", Shape(40, 5120, 13824, 40, 40, 32000, True, _LLAMA2)),
    (r"llama-?2?-?7b", Shape(32, 4096, 11008, 32, 32, 32000, True, _LLAMA2)),
    (
        r"nemotron-?4?-340b",
        Shape(96, 18432, 73728, 96, 8, 256000, False, "arXiv 2406.11704, table 1"),
    ),
    (
        r"nemotron-?4?-15b",
        Shape(32, 6144, 24576, 48, 8, 256000, False, "arXiv 2402.16819, table 1"),
    ),
    (
        r"grok-?1(?!\.?\d)",
        Shape(64, 6144, 32768, 48, 8, 131072, True, "xai-org/grok-1 run.py", 8, 2, 128),
    ),
    (
        r"mixtral-8x22b",
        Shape(56, 6144, 16384, 48, 8, 32768, True, "Hugging Face config.json", 8, 2),
    ),
    (r"mistral-7b", Shape(32, 4096, 14336, 32, 8, 32000, True, "arXiv 2310.06825, table 1")),
    (r"qwen-?2(\.5)?-7b", Shape(28, 3584, 18944, 28, 4, 152064, True, _QWEN)),
    (r"qwen-?2\.5-14b", Shape(48, 5120, 13824, 40, 8, 152064, True, _QWEN)),
    (r"qwen-?2\.5-32b", Shape(64, 5120, 27648, 40, 8, 152064, True, _QWEN)),
    (r"qwen-?2(\.5)?-72b", Shape(80, 8192, 29568, 64, 8, 152064, True, _QWEN)),
    (r"qwen-?3-8b", Shape(36, 4096, 12288, 32, 8, 151936, True, _QWEN, qk_norm=True)),
    (r"qwen-?3-14b", Shape(40, 5120, 17408, 40, 8, 151936, True, _QWEN, qk_norm=True)),
    (
        r"qwen-?3-32b",
        Shape(64, 5120, 25600, 64, 8, 151936, True, _QWEN, head_dim=128, qk_norm=True),
    ),
    (
        r"qwen-?3-235b-a22b",
        Shape(94, 4096, 1536, 64, 4, 151936, True, _QWEN, 128, 8, 128, qk_norm=True),
    ),
    (r"mixtral-8x7b", Shape(32, 4096, 14336, 32, 8, 32000, True, "arXiv 2401.04088", 8, 2)),
    (
        r"qwen3-30b-a3b",
        Shape(48, 2048, 768, 32, 4, 151936, True, _QWEN, 128, 8, 128, qk_norm=True),
    ),
    (
        r"gpt-oss-120b",
        Shape(36, 2880, 2880, 64, 8, 201088, True, "Hugging Face config.json", 128, 4, 64),
    ),
    (
        r"bloom(?!z?-?(560m|1b\d|3b|7b\d))",
        Shape(70, 14336, 57344, 112, 112, 250880, False, "arXiv 2211.05100, table 3"),
    ),
    (
        r"gpt-?3?-?175b|nemo-megatron(?!.*(?<!\d)(?!175b)\d+(\.\d+)?b\b)",
        Shape(96, 12288, 49152, 96, 96, 51200, False, _GPT3),
    ),
    (
        r"gpt-?(3-)?5b",
        Shape(24, 4096, 16384, 32, 32, 51200, False, "NeMo recipe gpt3/5b, launcher_scripts"),
    ),
    (r"^gpt-1\.7b$", _gpt(24, 2304, 24)),
    (r"^gpt-3\.6b$", _gpt(30, 3072, 32)),
    (r"^gpt-7\.5b$", _gpt(36, 4096, 32)),
    (r"^gpt-18\.4b$", _gpt(40, 6144, 48)),
    (r"^gpt-39\.1b$", _gpt(48, 8192, 64)),
    (r"^gpt-76\.1b$", _gpt(60, 10240, 80)),
    (r"^gpt-145\.6b$", _gpt(80, 12288, 96)),
    (r"^gpt-310\.1b$", _gpt(96, 16384, 128)),
    (r"^gpt-529\.6b$", _gpt(105, 20480, 128)),
    (r"^gpt-1008(\.0)?b$|^gpt-1t$", _gpt(128, 25600, 160)),
)


_MIXTURES = re.compile(
    r"moe|expert(?!-tuned)|\be\d+-?t\d\b|\d+x\d+b|-a\d+b\b|deepseek-?(v[2-9]|r1)|qwen-?3-(30b|235b|480b)|llama-?4"
    r"|mixtral|gpt-?oss|grok|kimi-?k|dbrx"
)


# Models that come with the project, by names that others give them, most particular first.
NAMED: tuple[tuple[str, str], ...] = (
    (r"deepseek-?(coder-?)?v2-?lite", "deepseek-v2-lite"),
    (r"deepseek-?(coder-?)?v2(\.5)?", "deepseek-v2"),
    (r"deepseek-?(v3(\.1)?|r1)", "deepseek-v3"),
    (r"kimi-?k2", "kimi-k2"),
    (r"moonlight", "moonlight-16b-a3b"),
)
# behind a name: other shapes
_DERIVED = re.compile(r"distill|\b(lite|mini|tiny|small|proxy|reduced|debug\w*)\b")
_SIZE = re.compile(r"(?<![\w.])(\d{1,6}(?:\.\d{1,6})?)([bt])\b")
_MORE = {"kv_lora_rank", "q_lora_rank", "rope_head_dim", "v_head_dim"}
_MORE |= {"shared_ffn_hidden", "dense_layers", "dense_ffn_hidden"}


PLAIN_WORDS = {"small", "tiny"}  # models of this project whose names stand in others' names, too


# vision encoders in front of a language model, by their billions of parameters
_ENCODER = re.compile(
    r"(?:vit|intern-?vit|eva|siglip|clip)-?(\d{1,3}(?:\.\d{1,3})?)b-?\+-?(?!.*\+)"
)


def named_shape(name: str) -> Shape | None:
    """The shape of a model by its printed name; None where it is not known, or names two.

    A vision encoder in front of a language model counts as more of that one's layers, by its
    parameters: as many FLOPs, and about as many messages.
    """
    plain = _plain(name)
    if "+" in plain:
        encoder = _ENCODER.match(plain)
        rest = named_shape(plain[encoder.end() :]) if encoder else None
        return _behind(float(encoder[1]), rest) if encoder and rest else None
    known = next((shape for pattern, shape in SHAPES if re.search(pattern, plain)), None)
    return known or _called(plain) or _own(plain)


def _behind(billions: float, shape: Shape) -> Shape | None:
    """A language model's shape with layers for an encoder of so many parameters in front of it."""
    head_dim = shape.head_dim or shape.hidden // shape.heads
    attention = 2 * shape.hidden * head_dim * (shape.heads + shape.kv_heads)
    layer = attention + (3 if shape.gated else 2) * shape.hidden * shape.ffn_hidden
    more = round(billions * 1e9 / layer)
    if shape.experts or not more:
        return None
    source = f"{shape.source}, and {more} layers for its encoder of {billions:g} billion parameters"
    return replace(shape, layers=shape.layers + more, source=source)


def _called(plain: str) -> Shape | None:
    """The shape of a model of `NAMED`, unless the name has another size, or is of a derived one."""
    for pattern, name in NAMED:
        if found := re.search(rf"{pattern}(?![\w.])", plain):
            total = load_model(name).parameters()
            sizes = [float(one) * {"b": 1e9, "t": 1e12}[unit] for one, unit in _SIZE.findall(plain)]
            other = sizes and abs(max(sizes) / total - 1) > TOO_FAR
            derived = _DERIVED.search(plain, found.end())
            return None if other or derived else _shape_of(name)
    return None


def _own(plain: str) -> Shape | None:
    """The shape of a model that comes with the project, where its whole name stands in this one."""
    called = {name for _, name in NAMED}
    names = sorted(set(model_names()) - PLAIN_WORDS - called, key=len, reverse=True)
    plain = _undashed(plain)
    whole = r"(?<![\w.]){}(?![\w.])"
    found = (one for one in names if re.search(whole.format(re.escape(_undashed(one))), plain))
    name = next(found, None)
    return _shape_of(name) if name else None


def _shape_of(name: str) -> Shape:
    """The shape of a model that comes with the project."""
    m = load_model(name)
    return Shape(
        m.layers,
        m.hidden,
        m.ffn_hidden,
        m.heads,
        m.kv_heads,
        m.vocab,
        m.gated,
        f"spec/models/{name}.yaml",
        m.experts,
        m.top_k,
        m.head_dim,
        m.qk_norm,
        m.model_dump(include=_MORE),
    )


def _undashed(plain: str) -> str:
    """Families as people write them: `llama-3.2` is `llama3.2`."""
    return re.sub(r"(?<=[a-z])-(?=\d)", "", plain)


def _plain(name: str) -> str:
    return re.sub(r"[\s_\u2010-\u2015\u2212]+", "-", name.lower())


def is_mixture(name: str) -> bool:
    """Whether a name says that the model has experts, itself or as a family's known one.

    Not what is dense or `expert-tuned`.
    """
    return not re.search(r"\bdense\b", name.lower()) and bool(_MIXTURES.search(_plain(name)))


def usual_ffn(model: ModelSpec) -> int:
    """MLP width where none is printed (1): 8/3 of the hidden size if gated, else 4 times it."""
    if model.ffn_hidden > 1:
        return model.ffn_hidden
    return round(8 / 3 * model.hidden / 256) * 256 if model.gated else 4 * model.hidden
