"""Heads that guess tokens from hidden states of the model: found, read and checked beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from quire.base.errors import ConfigError
from quire.config.families.llama import read_llama
from quire.config.hf import RawConfig, read_json
from quire.config.kv_layout import KVLayout
from quire.config.memory.plan import activation_bytes, logits_bytes
from quire.config.model_spec import DTYPE_BYTES, LlamaTraits, ModelSpec
from quire.config.speculation.settings import HeadMethod

__all__ = [
    "HEAD_FILES",
    "DraftHeads",
    "EagleSpec",
    "find_heads",
    "layer_page_bytes",
    "layer_step_bytes",
    "state_layers",
]

HEAD_FILES = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "model.safetensors",
    "pytorch_model.bin",
)
"""Names under which heads are published, in the order in which they are looked for. A pickled one
is read as plain tensors alone, which runs no code."""

_OTHER_SHAPES = ("norm_before_fc", "fc_norm", "attn_output_gate")
"""Switches of EAGLE layers of other shapes."""


@dataclass(frozen=True, slots=True)
class EagleSpec:
    """The decoder layer of EAGLE (Li et al. 2024, arXiv:2401.15077) and EAGLE-3 (Li et al. 2025,
    arXiv:2503.01840).

    layer: a Llama of one layer, with the tokens of the model. state_layers: layers of the model
    whose input states are read; empty for the state after the final norm. norm_before_residual: the
    stream goes on from the normed state. norm_output: the next guess goes on from the normed state.
    """

    layer: ModelSpec
    state_layers: tuple[int, ...]
    norm_before_residual: bool = False
    norm_output: bool = False

    @property
    def state_width(self) -> int:
        """Numbers of the model's states per token."""
        return self.layer.hidden_size * max(len(self.state_layers), 1)


@dataclass(frozen=True, slots=True)
class DraftHeads:
    """file: file of the weights. target: the model that they read. eagle: their layer; None for
    Medusa (Cai et al. 2024, arXiv:2401.10774), which has none. num_drafts: most drafts of a row in
    a step."""

    method: HeadMethod
    folder: Path
    file: Path
    target: ModelSpec
    eagle: EagleSpec | None
    num_drafts: int
    is_cut = False

    @property
    def name(self) -> str:
        """Folder, for the report."""
        return self.folder.name

    def with_dtype(self, dtype: str) -> DraftHeads:
        """The same in the dtype of the computation."""
        eagle = self.eagle
        if eagle is not None:
            eagle = replace(eagle, layer=replace(eagle.layer, dtype=dtype))
        return replace(self, target=replace(self.target, dtype=dtype), eagle=eagle)

    def weight_bytes(self, quantization: str | None) -> int:
        """Return the most bytes of weights in memory: the file has 16 bits or more for each."""
        del quantization  # formats of fewer bits need less
        return self.file.stat().st_size * DTYPE_BYTES[self.target.dtype] // 2

    def step_bytes(self, step_tokens: int, num_seqs: int) -> int:
        """Beside weights: activations and logits of the guesses, and states of the last step."""
        spec, eagle = self.target, self.eagle
        if eagle is not None:
            return layer_step_bytes(spec, eagle.layer, eagle.state_width, step_tokens, num_seqs)
        states = num_seqs * (1 + self.num_drafts) * spec.hidden_size * spec.dtype_bytes
        return states + logits_bytes(spec, num_seqs)

    def page_bytes(self, layout: KVLayout) -> int:
        """See `layer_page_bytes`."""
        if self.eagle is None:
            return 0
        return layer_page_bytes(self.target, self.layout(layout), self.eagle.state_width)

    def layout(self, target: KVLayout) -> KVLayout:
        """Return the layout of the layer's K/V beside that of the target."""
        assert self.eagle is not None
        return KVLayout.of_draft(self.eagle.layer, target)


def layer_step_bytes(
    target: ModelSpec, layer: ModelSpec, state_width: int, step_tokens: int, num_seqs: int
) -> int:
    """Bytes beside the weights of a layer that guesses from states of `target`: its activations,
    logits of the guesses, and states of the last step. state_width: numbers of a token's states."""
    states = 2 * step_tokens * state_width * target.dtype_bytes
    return states + activation_bytes(layer, step_tokens) + logits_bytes(target, num_seqs)


def layer_page_bytes(target: ModelSpec, layout: KVLayout, state_width: int) -> int:
    """Bytes of each block for such a layer: its K/V, in `layout`, and states of the model."""
    return layout.page_bytes + state_width * target.dtype_bytes * layout.block_size


def find_heads(method: HeadMethod, folder: Path, num_drafts: int, target: ModelSpec) -> DraftHeads:
    """Read what the folder says of its heads. Raises ConfigError: no weights, or of another
    shape."""
    file = next((folder / name for name in HEAD_FILES if (folder / name).is_file()), None)
    if file is None:
        raise ConfigError(
            f"{folder}: has none of {', '.join(HEAD_FILES)}; give the folder of published {method} "
            "weights"
        )
    eagle = None if method == "medusa" else _read_eagle(method, folder, target)
    if eagle is not None:
        _check_target(target)
    return DraftHeads(method, folder, file, target, eagle, num_drafts)


def _check_target(target: ModelSpec) -> None:
    traits = target.traits
    if not isinstance(traits, LlamaTraits) or traits.embedding_factor != 1.0:
        raise ConfigError(
            f"speculative_config: EAGLE is offered for models of Llama's shape, and not for "
            f"{target.architecture}: take method='draft_model' or 'auto'."
        )


def _read_eagle(method: HeadMethod, folder: Path, target: ModelSpec) -> EagleSpec:
    path = folder / "config.json"
    raw = read_json(path)
    _refuse_other_shapes(raw)
    if raw.read(int, "num_hidden_layers", default=1) != 1:
        raise ConfigError(f"{path}: num_hidden_layers is not 1; quire serves EAGLE with one layer")
    fixed = {
        "num_hidden_layers": 1,
        "tie_word_embeddings": True,
        "vocab_size": target.vocab_size,
        "bias": None,  # of the projection, which the tensors tell
    }
    layer = read_llama(raw.overridden(fixed), target.dtype)
    if layer.hidden_size != target.hidden_size:
        raise ConfigError(
            f"{path}: hidden_size={layer.hidden_size} is not the model's {target.hidden_size}; "
            "take weights that were trained for this model"
        )
    layers = state_layers(raw, target.num_layers) if method == "eagle3" else ()
    return EagleSpec(
        layer,
        layers,
        norm_before_residual=raw.read(bool, "norm_before_residual", default=False),
        norm_output=raw.read(bool, "norm_output", default=False),
    )


def _refuse_other_shapes(raw: RawConfig) -> None:
    for key in _OTHER_SHAPES:
        raw.reject(key, value=True, advice="use weights without it")


def state_layers(raw: RawConfig, num_layers: int) -> tuple[int, ...]:
    """Layers of a model whose inputs EAGLE-3 reads: its config's, else a low, a middle and a high
    one.

    The list counts layers by what enters them, as vLLM and its speculators do. In `eagle_config`,
    where SGLang and ModelOpt have it, it names layers by what leaves them, which enters the next.
    Published lists for n layers are [2, n/2, n - 3] here and [1, n/2 - 1, n - 4] there: the same
    states. Raises ConfigError for layers that the model lacks.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    nested = raw.section("eagle_config")
    named, shift = raw.read_list(int, key), 0
    if named is None and nested is not None:
        named, shift = nested.read_list(int, key), 1
    if named is None:
        named, shift = (2, num_layers // 2, num_layers - 3), 0
    found = tuple(layer + shift for layer in named)
    if len(found) != 3 or not all(0 <= layer < num_layers for layer in found):
        raise ConfigError(
            f"{raw.source}: {key} names the layers {list(named)}, which are not three whose states "
            f"are read in a model of {num_layers} layers; correct it"
        )
    return found
