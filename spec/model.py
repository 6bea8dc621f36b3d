"""A transformer model: its shape, parameters and FLOPs. Named models are YAML files of it."""

from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from spec.errors import UserError
from spec.files import parse, read_json, read_yaml
from spec.hugging_face import hugging_face_fields
from spec.kernel import MOST_OF_HEAD

MODELS = Path(__file__).parent / "models"
# beyond any model; a typing error is likelier
MOST_LAYERS, MOST_EXPERTS = 2000, 4096
Size = Annotated[int, Field(ge=1, le=100_000_000)]
Width = Annotated[int, Field(ge=0, le=100_000_000)]  # 0: there is none
ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$", max_length=80)]


class ModelSpec(BaseModel):
    """A decoder-only transformer, dense or mixture-of-experts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ModelName
    layers: Annotated[int, Field(ge=1, le=MOST_LAYERS)]
    hidden: Size
    ffn_hidden: Size = Field(description="width of one MLP (of one expert, if there are)")
    heads: Size
    kv_heads: Size
    head_dim: Size
    vocab: Size
    seq_len: Size = Field(description="tokens per sequence in training")
    gated: bool = Field(description="SwiGLU: two input projections in the MLP, not one")
    norm: Literal["rmsnorm", "layernorm"]
    position: Literal["rope", "learned"]
    linear_bias: bool = False
    qk_norm: bool = Field(default=False, description="norms over each head's queries and keys")
    kv_lora_rank: Width = Field(
        default=0, description="of the latent that keys and values are made of; 0: of none"
    )
    q_lora_rank: Width = Field(default=0, description="of that of queries; 0: of none")
    rope_head_dim: Width = Field(
        default=0, description="values of a head that are rotated, beside head_dim, with latents"
    )
    v_head_dim: Width = Field(default=0, description="values of a head's values, with latents")
    tied_embeddings: bool = False
    experts: int = Field(
        default=0, ge=0, le=MOST_EXPERTS, description="experts per layer; 0 for a dense model"
    )
    top_k: int = Field(default=0, ge=0, description="experts each token is sent to")
    shared_ffn_hidden: Width = Field(
        default=0, description="width of the expert that all tokens go through, too"
    )
    dense_layers: int = Field(
        default=0, ge=0, le=MOST_LAYERS, description="first layers of a mixture without experts"
    )
    dense_ffn_hidden: Width = Field(default=0, description="width of their MLP")
    expert_imbalance: float = Field(
        default=0, ge=0, le=10, description="coefficient of variation of experts' loads in a layer"
    )
    capacity_factor: float | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="of an expert's even share: what it takes at most, the rest is dropped",
    )
    lora_rank: int = Field(
        default=0, ge=0, le=100_000_000, description="0: every weight is trained"
    )
    source: str = Field(default="", description="where the shape is published")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}; "
                "every key/value head must serve the same number of heads"
            )
        if self.qk_norm and self.position != "rope":
            raise ValueError(
                f"qk_norm with position {self.position}; norms of queries and keys stand in front "
                "of rotary positions, give position rope"
            )
        if self.qk_norm and self.head_dim > MOST_OF_HEAD:
            raise ValueError(
                f"qk_norm with head_dim {self.head_dim}; norms over heads were timed up to "
                f"{MOST_OF_HEAD} values, give as many at most"
            )
        self._check_latents()
        if bool(self.experts) != bool(self.top_k) or self.top_k > self.experts:
            raise ValueError(
                f"experts {self.experts} with top_k {self.top_k}; "
                "give both, top_k at most experts, or neither"
            )
        if not self.experts and (self.expert_imbalance or self.capacity_factor):
            raise ValueError("expert_imbalance and capacity_factor need experts; leave them out")
        if self.shared_ffn_hidden and not self.experts:
            raise ValueError("shared_ffn_hidden needs experts; a dense model's MLP is ffn_hidden")
        if self.shared_ffn_hidden and self.linear_bias:
            raise ValueError(
                "linear_bias with shared_ffn_hidden is not simulated, nor has Megatron-Core shared "
                "experts with biases; give linear_bias false"
            )
        if bool(self.dense_layers) != bool(self.dense_ffn_hidden):
            raise ValueError(
                f"dense_layers {self.dense_layers} with dense_ffn_hidden {self.dense_ffn_hidden}; "
                "give both or neither"
            )
        if self.dense_layers and not self.dense_layers < self.layers * bool(self.experts):
            raise ValueError(
                f"dense_layers {self.dense_layers} of {self.layers} layers with {self.experts} "
                "experts; they are a mixture's first layers, and others follow"
            )
        if self.experts and self.expert_imbalance > (self.experts - 1) ** 0.5:
            raise ValueError(
                f"expert_imbalance is {self.expert_imbalance:g}; loads of {self.experts} experts "
                f"cannot vary by more than {(self.experts - 1) ** 0.5:.2f}, all on one of them"
            )
        return self

    def _check_latents(self) -> None:
        """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""
        sizes = (self.kv_lora_rank, self.rope_head_dim, self.v_head_dim)
        if not all(sizes) and any((*sizes, self.q_lora_rank)):
            raise ValueError(
                f"kv_lora_rank {sizes[0]} with rope_head_dim {sizes[1]} and v_head_dim {sizes[2]}; "
                "latent attention needs all three, other attention none, nor q_lora_rank"
            )
        if not self.latent:
            return
        if self.rope_head_dim % 2:
            raise ValueError(
                f"rope_head_dim {self.rope_head_dim}; positions rotate pairs of values, "
                "give an even number"
            )
        if self.kv_heads != self.heads:
            raise ValueError(
                f"kv_heads {self.kv_heads} with kv_lora_rank; latents are made into keys and "
                f"values of each head, give {self.heads}"
            )
        only = {"position": "rope", "qk_norm": False, "linear_bias": False, "lora_rank": 0}
        for name, usual in only.items():
            if getattr(self, name) != usual:
                raise ValueError(
                    f"{name} {getattr(self, name)} with kv_lora_rank is not simulated; "
                    f"latent attention is with {name} {usual}"
                )

    @property
    def latent(self) -> bool:
        """Whether keys and values are made of a latent (multi-head latent attention)."""
        return self.kv_lora_rank > 0

    @property
    def query_dim(self) -> int:
        """Values of a head's queries and keys."""
        return self.head_dim + self.rope_head_dim

    @property
    def value_dim(self) -> int:
        """Values of a head's values."""
        return self.v_head_dim or self.head_dim

    @property
    def latent_parameters(self) -> int:
        """Weights of one layer that make latents, and the keys that all heads share."""
        return self.hidden * (self.q_lora_rank + self.kv_lora_rank + self.rope_head_dim)

    @property
    def attention_parameters(self) -> int:
        """Weights of the attention projections of one layer, without biases."""
        if self.latent:
            queries = (self.q_lora_rank or self.hidden) * self.query_dim
            others = self.kv_lora_rank * (self.head_dim + self.value_dim)
            output = self.value_dim * self.hidden
            return self.latent_parameters + self.heads * (queries + others + output)
        width = self.heads * self.head_dim
        kv_width = self.kv_heads * self.head_dim
        return self.hidden * (width + 2 * kv_width) + width * self.hidden

    @property
    def norm_vectors(self) -> int:
        """Vectors of a norm: its scale, and its offset if it has one."""
        return 2 if self.norm == "layernorm" else 1

    @property
    def qk_norm_parameters(self) -> int:
        """Of one layer's norms of queries and keys, which all heads share."""
        return 2 * self.norm_vectors * self.head_dim if self.qk_norm else 0

    @property
    def latent_norm_parameters(self) -> int:
        """Of one layer's norms of latents."""
        return self.norm_vectors * (self.q_lora_rank + self.kv_lora_rank)

    @property
    def mlp_parameters(self) -> int:
        """Weights of one MLP (one expert), without biases."""
        return (3 if self.gated else 2) * self.hidden * self.ffn_hidden

    @property
    def shared_parameters(self) -> int:
        """Weights of a layer's shared expert."""
        return (3 if self.gated else 2) * self.hidden * self.shared_ffn_hidden

    @cached_property
    def dense(self) -> "ModelSpec":
        """The model that `dense_layers` are layers of: the same without experts."""
        none = dict.fromkeys(("experts", "top_k", "shared_ffn_hidden"), 0)
        none |= dict.fromkeys(("dense_layers", "dense_ffn_hidden"), 0)
        alone = {"expert_imbalance": 0, "capacity_factor": None}
        return self.resized(**none, **alone, ffn_hidden=self.dense_ffn_hidden)

    @property
    def kinds(self) -> dict[str, "ModelSpec"]:
        """What its layers are layers of, the first ones' first, by their unit's name in a step."""
        return {"dense": self.dense, "layer": self} if self.dense_layers else {"layer": self}

    def layer_parameters(self) -> int:
        """All parameters of one layer, biases and norms included; of a mixture's, with experts."""
        norms = self.norm_vectors * 2 * self.hidden
        norms += self.qk_norm_parameters + self.latent_norm_parameters
        bias = 0
        if self.linear_bias:
            width = (self.heads + 2 * self.kv_heads) * self.head_dim
            bias = width + self.hidden
            bias += (self.ffn_hidden * (2 if self.gated else 1) + self.hidden) * max(
                self.experts, 1
            )
        router = self.hidden * self.experts
        mlp = self.mlp_parameters * max(self.experts, 1) + self.shared_parameters
        return self.attention_parameters + mlp + router + bias + norms

    def embedding_parameters(self) -> int:
        """Token embedding, and learned positions where the model has them."""
        positions = self.seq_len * self.hidden if self.position == "learned" else 0
        return self.vocab * self.hidden + positions

    def head_parameters(self) -> int:
        """Final norm and output projection (none of its own when tied to the embedding)."""
        norm = self.hidden * self.norm_vectors
        return norm + (0 if self.tied_embeddings else self.vocab * self.hidden)

    def parameters(self) -> int:
        """All parameters of the model."""
        dense = self.dense_layers * self.dense.layer_parameters() if self.dense_layers else 0
        return (
            dense
            + (self.layers - self.dense_layers) * self.layer_parameters()
            + self.embedding_parameters()
            + self.head_parameters()
        )

    @property
    def core_flops_per_token(self) -> int:
        """Forward FLOPs of one layer's attention scores and their application to the values."""
        return 2 * self.seq_len * self.heads * (self.query_dim + self.value_dim)

    def forward_flops_per_token(self) -> float:
        """Matrix FLOPs of one token's forward pass.

        Two per weight that the token meets, plus 2 * seq * heads * head_dim each for attention
        scores and their application, not halved for the causal mask: the convention of PaLM's MFU
        (arXiv 2204.02311, appendix B) and of Megatron-LM (arXiv 2104.04473, eq. 3).
        """
        attention = 2 * self.attention_parameters + self.core_flops_per_token
        mlp = 2 * self.mlp_parameters * max(self.top_k, 1) + 2 * self.hidden * self.experts
        mlp += 2 * self.shared_parameters
        dense = 2 * self.dense.mlp_parameters if self.dense_layers else 0
        mlps = self.dense_layers * dense + (self.layers - self.dense_layers) * mlp
        return self.layers * attention + mlps + 2 * self.vocab * self.hidden

    def step_flops(self, sequences: int) -> float:
        """Model FLOPs (forward and backward, no recomputation) of a step over `sequences`.

        The backward pass costs twice the forward; with LoRA it costs frozen weights, which need no
        gradient, once. Its adapters, well below a percent, are left out.
        """
        forward = self.forward_flops_per_token()
        saved = forward - self.layers * self.core_flops_per_token if self.lora_rank else 0.0
        return (3 * forward - saved) * self.seq_len * sequences

    def resized(self, **changes: int | float | str | None) -> "ModelSpec":
        """The same model with some fields changed, checked again."""
        return ModelSpec.model_validate(self.model_dump() | changes)


def limits(field: str) -> tuple[float, float]:
    """The least and the most that a number of a model may be."""
    bounds = [asdict(one) for one in ModelSpec.model_fields[field].metadata]
    low, high = (next(one[key] for one in bounds if key in one) for key in ("ge", "le"))
    return low, high


def model_names() -> list[str]:
    """Names of the models that come with the project."""
    return sorted(path.stem for path in MODELS.glob("*.yaml"))


def load_model(name_or_path: str) -> ModelSpec:
    """A named model, the user's own YAML of the same form, or a Hugging Face config.json."""
    named = MODELS / f"{name_or_path}.yaml"
    if "/" not in name_or_path and named.exists():
        return parse(ModelSpec, read_yaml(named, "a model"), str(named))
    path = Path(name_or_path)
    if len(name_or_path) > 1000 or not (path.is_file() or path.is_dir()):
        raise UserError(
            f"model {name_or_path[:80]!r} is neither a file nor a named model; "
            f"the named ones are {', '.join(model_names())}"
        )
    if path.suffix == ".json":
        fields = hugging_face_fields(read_json(path, "a Hugging Face config.json"), path)
        return parse(ModelSpec, fields, str(path))
    return parse(ModelSpec, read_yaml(path, "a model"), str(path))
