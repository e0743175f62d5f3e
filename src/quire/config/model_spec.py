"""Contents of a checkpoint's config.json, parsed once and frozen.

`ModelSpec` holds what the whole engine asks of a model (sizes, context, KV cache, tokens);
`traits` holds what only the model's own file reads. Traits that one family has stand in its file in
`quire.config.families`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from quire.config.media.image_spec import ImageSpec  # numpy comes with it
    from quire.config.rope import RopeSpec
    from quire.protocol.pooling_params import ClassActivation

__all__ = [
    "DTYPE_BYTES",
    "CenteredTraits",
    "ClassesSpec",
    "DeltaHeads",
    "DeltaLayout",
    "ExpertNames",
    "ExpertsSpec",
    "GenerationDefaults",
    "GenericTraits",
    "LatentSpec",
    "LlamaTraits",
    "MatrixShape",
    "ModelSpec",
    "ParameterCounts",
    "Routing",
    "SSDHeads",
    "STATE_ALIGNMENT",
    "aligned_state",
]

STATE_ALIGNMENT = 64
"""Bytes: the state of each layer begins at a cache line."""

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""The dtypes in which a model can compute, with their sizes in bytes."""


def aligned_state(num_bytes: int) -> int:
    """Return the bytes that a layer's recurrent state takes in a place for those of all layers."""
    return -(-num_bytes // STATE_ALIGNMENT) * STATE_ALIGNMENT


@dataclass(frozen=True, slots=True)
class LlamaTraits:
    """Llama and the families of its shape.

    qkv_bias, o_bias, mlp_bias: whether these projections have a bias. gated: the MLP has a gate.
    qk_norm: norm of q and k, over each "head" or over the whole "row" of all heads. fused_qkv,
    fused_gate: q, k and v are one tensor on disk, and so are gate and up. pairs_neighbours: rows of
    q and k are on disk in the order of the pairs that rope rotates. sinks: heads have a score of a
    key without a value.
    norms: place of the norms of a sublayer: before it, after it or both. query_growth: beta and
    length of the growth of queries with their positions, None if they do not grow. attention_scale:
    factor on q·k, None for head_dim^-1/2. embedding_factor, residual_factor, logit_factor: factors
    on embeddings, on the output of a sublayer, and on logits.
    """

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    gated: bool = True
    qk_norm: Literal["head", "row"] | None = None
    fused_qkv: bool = False
    fused_gate: bool = False
    pairs_neighbours: bool = False
    sinks: bool = False
    norms: Literal["before", "after", "both"] = "before"
    query_growth: tuple[float, int] | None = None
    attention_scale: float | None = None
    embedding_factor: float = 1.0
    residual_factor: float = 1.0
    logit_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class CenteredTraits:
    """StarCoder 2, StableLM, Nemotron, Falcon, Bloom and Phi-3.5-MoE, whose norms are layer norms.

    names: family whose tensor names are used. qkv: layout of q, k and v on disk: three "parts", one
    tensor "fused", or one where each kv "head" has its query heads, k and v side by side. qkv_bias,
    o_bias, mlp_bias, head_bias: whether these projections have a bias. gated: the MLP has a gate.
    mlp_input: the norm "after" attention was added, or in parallel to attention its norm, "shared",
    or a norm "beside" it. norm_offset: number added to the weights of norms on disk.
    embedding_norm: embeddings are normed. alibi: attention has ALiBi; alibi_scaled: times
    head_dim^-1/2, with slopes in bfloat16 (Falcon).
    """

    names: Literal[
        "starcoder2", "stablelm", "nemotron", "falcon", "falcon_two_norms", "bloom", "phimoe"
    ]
    qkv: Literal["parts", "fused", "head"] = "parts"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    gated: bool = False
    mlp_input: Literal["after", "shared", "beside"] = "after"
    norm_offset: float = 0.0
    embedding_norm: bool = False
    head_bias: bool = False
    alibi: bool = False
    alibi_scaled: bool = False


@dataclass(frozen=True, slots=True)
class ClassesSpec:
    """Classes that a model sorts prompts into. labels: their names. activation: function that turns
    the model's numbers into probabilities. score_activation: function that turns the number of a
    model with one class into a score. pooling: choice of the states that the classes are computed
    from. answers: tokens of "no" and "yes" of a model that was trained to say one of them; its one
    number is the logit of the second less that of the first."""

    labels: tuple[str, ...]
    activation: ClassActivation
    score_activation: ClassActivation
    pooling: Literal["classify", "classify_last", "classify_mean"] = "classify"
    answers: tuple[int, int] | None = None

    @property
    def gives_scores(self) -> bool:
        """True if the model has one number for a pair of texts: it is a cross-encoder."""
        return len(self.labels) == 1


DeltaLayout = Literal["parts", "by_key", "gates_by_key", "in_turn"]


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Heads of a gated delta rule: keys of `key_dim`, each for as many values of `value_dim`.

    layout: "parts" if the projections on disk have q, k, v, z, b and a of all heads one after the
    other; "by_key" if they have for each key head in turn what is its own, "gates_by_key" if those
    to b and a alone do; "in_turn" as "parts", but values of one key are not adjacent: all keys take
    turns (GGUF files).
    """

    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int
    layout: DeltaLayout = "parts"

    @property
    def in_turn(self) -> bool:
        """True if values that use one key are apart."""
        return self.layout == "in_turn" and self.num_keys < self.num_values

    @property
    def channels(self) -> int:
        """Elements of q, k and v of a token."""
        return 2 * self.num_keys * self.key_dim + self.num_values * self.value_dim

    @property
    def state(self) -> int:
        """Elements of the state of a sequence."""
        return self.num_values * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1).

    rank: elements of the vector of a token that the keys and values of all heads are made of.
    rotary: elements of the rotated part of a key, one for all heads. nope: elements of the part of
    a key that each head has for itself. value: elements of a value. query_rank: elements of the
    vector that queries are made of; None if they are made of the hidden state. split: matrices from
    the vector to keys and to values are apart on disk (GGUF files).
    """

    rank: int
    rotary: int
    nope: int
    value: int
    query_rank: int | None = None
    split: bool = False

    @property
    def width(self) -> int:
        """Elements of a token in the cache of a layer."""
        return self.rank + self.rotary

    @property
    def query(self) -> int:
        """Elements of a head's query."""
        return self.nope + self.rotary


@dataclass(frozen=True, slots=True)
class SSDHeads:
    """Heads of a selective state (Mamba 2): `num_heads` of `head_dim`. Each of `num_groups` groups
    of adjacent heads shares B and C of `state_size`. limits: least and most of a step."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    limits: tuple[float, float]

    @property
    def inner(self) -> int:
        """Elements of x, of z, and of the result of a token."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Elements of x, B and C of a token."""
        return self.inner + 2 * self.num_groups * self.state_size

    @property
    def inputs(self) -> int:
        """Outputs of the projection to z, x, B, C and steps."""
        return self.inner + self.channels + self.num_heads

    @property
    def state(self) -> int:
        """Elements of the state of a sequence."""
        return self.inner * self.state_size


ExpertNames = Literal[
    "qwen", "deepseek", "gpt_oss", "mixtral", "granite", "granite_hybrid", "gemma4", "lfm2"
]
"""Families whose names of tensors others share."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Choice of the experts of a token (Shazeer et al. 2017, arXiv:1701.06538), and their weights.

    score: function that makes scores of experts from the router's logits. top_k: experts of a
    token. renormalise: weights are divided by their sum. scale: factor on the weights after that.
    biased: numbers of the checkpoint are added to the scores for the choice, and not to the
    weights. num_groups: number of groups of experts. top_groups: number of the best groups, which
    alone are open to a token. group_best: number of the best experts of a group whose scores are
    its score: two (DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2) or one (DeepSeek-AI 2024,
    arXiv:2405.04434, section 2.2.2). score "mixer": two experts, each weighted by the softmax of
    its logit among those that are at most 2 · jitter below it, relative to the larger magnitude;
    the first one is left out for the second (Liu et al. 2024, arXiv:2409.12136, section 2.2).
    has_factors: each expert has a number in the checkpoint that multiplies its weight at last.
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid", "mixer"] = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    biased: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    jitter: float = 0.0
    has_factors: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Feed-forward networks; a router chooses some of them for each token.

    layers: whether each layer of the model has experts; others have one network. inner_size: inner
    size of an expert. shared_size: inner size of a network that every token takes besides, None for
    none; shared_gated: its output is multiplied by the sigmoid of a projection to one number;
    shared_fused: its gate and up are one tensor on disk. bias: whether the router and experts have
    a bias. names: naming of the tensors on disk.
    """

    routing: Routing
    layers: tuple[bool, ...]
    inner_size: int
    names: ExpertNames
    shared_size: int | None = None
    shared_gated: bool = False
    bias: bool = False
    shared_fused: bool = False

    @property
    def num_layers(self) -> int:
        """Layers with experts."""
        return sum(self.layers)

    def layer_parameters(self, hidden_size: int) -> int:
        """Parameters of the experts of a layer and of all that is beside them."""
        routing, shared = self.routing, self.shared_size or 0
        router = routing.num_experts * (hidden_size + routing.biased + routing.has_factors)
        others = router + 3 * hidden_size * shared + self.shared_gated * hidden_size
        biases = self.bias * (2 * self.inner_size + hidden_size + 1)
        return others + (3 * hidden_size * self.inner_size + biases) * routing.num_experts

    def idle_parameters(self, hidden_size: int) -> int:
        """Parameters of a layer that a token does not use."""
        idle = self.routing.num_experts - self.routing.top_k
        return 3 * hidden_size * self.inner_size * idle


@dataclass(frozen=True, slots=True)
class GenericTraits:
    """Nothing: `transformers` reads what it needs."""


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Numbers of parameters, for the memory plan when there are no files to measure.

    embedding: token and position tables with their projections. layer: one layer. head: final norm
    and LM head; a tied LM head counts as embedding only. extra: parameters that layers of another
    kind have beyond `layer`, all of them together. idle: parameters of all layers that a token does
    not use.
    """

    embedding: int
    layer: int
    head: int
    extra: int = 0
    idle: int = 0


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """A matrix [outputs, inputs] that the model multiplies with, merged as the layers merge it.

    count: number of such matrices in the model. is_head: whether it is the projection to logits.
    """

    outputs: int
    inputs: int
    count: int = 1
    is_head: bool = False


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling defaults in generation_config.json, or in a GGUF file, for requests that name none.

    numbers: pairs of a name in `SamplingParams` and a value. banned_words: tokens, or sequences of
    them, that must not come.
    """

    numbers: tuple[tuple[str, float], ...] = ()
    stop_strings: tuple[str, ...] = ()
    banned_words: tuple[tuple[int, ...], ...] = ()
    eos_token_ids: tuple[int, ...] = ()

    def sampling(self) -> dict[str, Any]:
        """Return the stated values, by the names of `SamplingParams`."""
        values = {
            **dict(self.numbers),
            "stop": list(self.stop_strings),
            "bad_words_token_ids": [list(word) for word in self.banned_words],
        }
        return {name: value for name, value in values.items() if value != []}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model, as its checkpoint describes it.

    dtype: "bfloat16", "float16" or "float32"; `dataclasses.replace` it to compute in another.
    max_context: longest context in tokens that the checkpoint claims, rope scaling included.
    windows, ropes: per layer; the window counts the query itself, None is full attention; a layer
    without rope sees no positions. No rope at all, no ALiBi slopes and no states mean that
    positions are learned, and then `max_context` cannot be exceeded.
    kv_shapes: number of kv heads and head_dim of each layer, if they are not `num_kv_heads` and
    `head_dim`, which are the largest then. num_shared_kv: number of the last layers that read K and
    V of layers before them, and have none. side_size: elements of a token that a forward holds from
    its beginning on, beside the residual stream. states: elements of each layer's recurrent state,
    in the model's dtype; 0 for a layer that attends. () if all layers do. wide_states: elements
    that it has beside them in float32, () for none. state_inputs: elements of a token, in the
    model's dtype, from which the operations of all layers compute their states. copied_states,
    copied_inputs: elements of `states` and of `state_inputs`, in all layers, that each rank has, as
    ranks share none of them. mixer_size: elements of a token that a layer holds at once to mix
    tokens, if it is more than plain attention does.
    score_options: names of `quire.compute.attention.ScoreOptions` for changes of scores besides
    scaling.
    prompt_attention: "bidirectional" if every token of a prompt sees the whole prompt (encoders,
    prefix LMs), or as far behind it as before it in layers with a window; a prompt is then computed
    in one step. None: causal.
    matrices: all matrices to multiply with, for the memory plan of quantized weights.
    experts: networks of layers with experts in place of one feed-forward network; None if no layer
    has experts.
    is_encoder: it draws no tokens, and is asked for vectors alone. has_head: False for a decoder
    saved without the projection to logits, which is asked for vectors too. classes: classes that it
    sorts prompts into; None if it does not. token_types: rows of a table that tells the second text
    of a pair from the first; 0 if there is none.
    latent: multi-head latent attention of all layers; None if heads have keys and values. A token
    then has one kv head in the cache, of `latent.width`. index_top_k: number of tokens that each
    layer would choose to attend to in longer sequences, so that none may be longer; None for all.
    images: images that it reads beside text; None for a model that reads, or serves, text alone.
    mtp_layers: beginnings of names on disk of layers behind the last one, which guess further
    tokens (multi-token prediction) and compute nothing of the model.
    eos_token_ids: ids of config.json, then those that only generation_config.json names.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str
    norm_eps: float
    max_context: int
    tie_word_embeddings: bool
    dtype: str
    windows: tuple[int | None, ...]
    ropes: tuple[RopeSpec | None, ...]
    traits: object
    parameters: ParameterCounts
    matrices: tuple[MatrixShape, ...] = ()
    score_options: frozenset[str] = frozenset()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    prompt_attention: Literal["bidirectional"] | None = None
    experts: ExpertsSpec | None = None
    is_encoder: bool = False
    has_head: bool = True
    classes: ClassesSpec | None = None
    token_types: int = 0
    kv_shapes: tuple[tuple[int, int], ...] = ()
    num_shared_kv: int = 0
    side_size: int = 0
    states: tuple[int, ...] = ()
    images: ImageSpec | None = None
    wide_states: tuple[int, ...] = ()
    state_inputs: int = 0
    copied_states: int = 0
    copied_inputs: int = 0
    mixer_size: int = 0
    latent: LatentSpec | None = None
    index_top_k: int | None = None
    mtp_layers: tuple[str, ...] = ()

    @property
    def whole_prompts(self) -> bool:
        """True if tokens of a prompt see all of it, so that one step computes it."""
        return self.prompt_attention == "bidirectional"

    @property
    def whole_tokens(self) -> int:
        """Tokens of an image that see each other; see `ImageSpec`."""
        return 0 if self.images is None else self.images.whole_tokens

    @property
    def least_chunk(self) -> int:
        """Tokens of a sequence that a step must have room for: an image that is computed whole."""
        return max(1, self.whole_tokens)

    @property
    def looks_ahead(self) -> bool:
        """True if some tokens of a prompt see tokens behind them."""
        return self.whole_prompts or self.whole_tokens > 0

    @property
    def draws_tokens(self) -> bool:
        """False of encoders, without a head, and where one for classes stands in its place."""
        has_logits = self.classes is None or self.classes.answers is not None
        return has_logits and self.has_head and not self.is_encoder

    def without_head(self) -> ModelSpec:
        """Return the model without the projection to logits."""
        if not self.has_head:
            return self
        head = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        return replace(
            self,
            has_head=False,
            tie_word_embeddings=False,
            parameters=replace(self.parameters, head=self.parameters.head - head),
            matrices=tuple(each for each in self.matrices if not each.is_head),
        )

    @property
    def num_classes(self) -> int:
        return 0 if self.classes is None else len(self.classes.labels)

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def num_parameters(self) -> int:
        counts = self.parameters
        layers = self.num_layers * counts.layer + counts.extra
        return counts.embedding + layers + counts.head

    @property
    def num_active_parameters(self) -> int:
        """Parameters that a token uses: all, but for experts that it did not choose."""
        return self.num_parameters - self.parameters.idle

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Indices of the layers that keep K and V of their own."""
        count = self.num_layers - self.num_shared_kv
        return tuple(i for i in range(count) if not (self.states and self.states[i]))

    @property
    def has_kv(self) -> bool:
        """False if every layer keeps a state in place of K and V."""
        return bool(self.kv_layers)

    @property
    def own_kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """Number of kv heads and head_dim of each of `kv_layers`."""
        alike = (self.num_kv_heads, self.head_dim)
        return tuple(self.kv_shapes[i] if self.kv_shapes else alike for i in self.kv_layers)

    @property
    def attention_windows(self) -> tuple[int | None, ...]:
        """Windows of the layers that attend."""
        has_state = self.states or (0,) * self.num_layers
        return tuple(w for w, state in zip(self.windows, has_state, strict=True) if not state)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state of one sequence in all layers."""
        own = sum(aligned_state(elements * self.dtype_bytes) for elements in self.states)
        return own + sum(aligned_state(4 * elements) for elements in self.wide_states)

    @property
    def state_input_bytes(self) -> int:
        """Bytes of a token from which the recurrent states of all layers are computed."""
        return self.state_inputs * self.dtype_bytes

    @property
    def kv_elements(self) -> int:
        """Elements of K and V, or of latent vectors, of one token in all layers."""
        planes = 2 if self.latent is None else 1
        return planes * sum(heads * dim for heads, dim in self.own_kv_shapes)

    @property
    def expanded_kv_elements(self) -> int | None:
        """Elements of one token in all layers if heads had their own keys and values; None if they
        do."""
        if self.latent is None:
            return None
        of_head = self.latent.query + self.latent.value
        return len(self.kv_layers) * self.num_heads * of_head

    def within(self, length: int) -> ModelSpec:
        """Return the model for sequences of at most `length` tokens: a window that none of them can
        outgrow is full attention."""
        windows = tuple(
            None if window is None or window >= length else window for window in self.windows
        )
        return self if windows == self.windows else replace(self, windows=windows)

    @property
    def position_axes(self) -> int:
        """Number of positions per token: 1, or 3 (M-RoPE)."""
        return 3 if any(rope is not None and rope.axes for rope in self.ropes) else 1

    def on_one_axis(self) -> ModelSpec:
        """Return the model for text, whose positions are equal on all axes."""
        plain = (None if rope is None else replace(rope, axes=()) for rope in self.ropes)
        return replace(self, ropes=tuple(plain)) if self.position_axes > 1 else self

    @property
    def has_learned_positions(self) -> bool:
        """True if positions come from a table, so that `max_context` is a hard limit."""
        if "alibi_slopes" in self.score_options or self.states:
            return False
        return all(rope is None for rope in self.ropes)
