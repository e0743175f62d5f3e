"""SigLIP (Zhai et al. 2023, arXiv:2303.15343), the encoder of squares of pixels in several families
of image encoders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.base.errors import ConfigError
from quire.config.families.shared import ACTIVATIONS
from quire.config.hf import RawConfig
from quire.config.media.image_spec import NUM_CHANNELS, STEPS
from quire.config.media.projector import ProjectorFile

__all__ = ["PROCESSOR", "SIGLIP_BLOCK", "SiglipSpec", "read_siglip", "siglip_names", "siglip_of"]

PROCESSOR: Mapping[str, Any] = {
    **STEPS,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""Values of `transformers` where preprocessor_config.json is silent."""

SIGLIP_BLOCK: Mapping[str, str] = {
    "ln1": "layer_norm1",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
"""Names of a block's tensors in GGUF files, and in folders."""


@dataclass(frozen=True, slots=True)
class SiglipSpec:
    """The encoder, without the projection of its states.

    tile_size: pixels of a side of the square.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    tile_size: int
    activation: str
    norm_eps: float

    @property
    def patches_per_side(self) -> int:
        return self.tile_size // self.patch_size

    @property
    def num_parameters(self) -> int:
        size, inner = self.hidden_size, self.intermediate_size
        layer = 4 * (size * size + size) + 2 * size * inner + inner + size + 4 * size
        patches = size * (NUM_CHANNELS * self.patch_size**2 + 1) + self.patches_per_side**2 * size
        return patches + self.num_layers * layer + 2 * size

    @property
    def activation_elements(self) -> int:
        """Elements that the encoder holds at once for a square, with the scores of one head."""
        size, patches = self.hidden_size, self.patches_per_side**2
        of_pixels = 2 * NUM_CHANNELS * self.tile_size**2
        inner = max(2 * self.intermediate_size, 5 * size)
        return of_pixels + patches * (3 * size + inner + patches)


def read_siglip(vision: RawConfig, defaults: Mapping[str, Any]) -> SiglipSpec:
    """Read `vision_config`. defaults: values of `transformers` where the file is silent. Raises
    ConfigError, naming the file and the key, for what quire does not compute."""
    vision = vision.with_defaults(defaults)
    if vision.read(int, "num_channels") != NUM_CHANNELS:
        raise vision.unsupported("num_channels", vision.read(int, "num_channels"), ["3"])
    spec = SiglipSpec(
        hidden_size=vision.read_size("hidden_size"),
        intermediate_size=vision.read_size("intermediate_size"),
        num_layers=vision.read_size("num_hidden_layers"),
        num_heads=vision.read_size("num_attention_heads"),
        patch_size=vision.read_size("patch_size"),
        tile_size=vision.read_size("image_size"),
        activation=vision.read_choice(ACTIVATIONS, "hidden_act", default="gelu_pytorch_tanh"),
        norm_eps=vision.read(float, "layer_norm_eps"),
    )
    if spec.hidden_size % spec.num_heads:
        raise ConfigError(
            f"{vision.source}: hidden_size={spec.hidden_size} does not split into "
            f"{spec.num_heads} heads; take the published file"
        )
    return spec


def siglip_names(name: str) -> dict[str, str]:
    """Return the names of tensors beside the blocks in GGUF files, and in folders where `name` is
    the beginning of all."""
    return {
        "v.patch_embd": f"{name}.embeddings.patch_embedding",
        "v.position_embd": f"{name}.embeddings.position_embedding",
        "v.post_ln": f"{name}.post_layernorm",
    }


def siglip_of(file: ProjectorFile) -> dict[str, Any]:
    """Return `vision_config` of a GGUF file."""
    sizes = file.sizes(
        hidden_size="embedding_length",
        intermediate_size="feed_forward_length",
        num_hidden_layers="block_count",
        num_attention_heads="attention.head_count",
        image_size="image_size",
        patch_size="patch_size",
    )
    eps = file.number("attention.layer_norm_epsilon")
    return {**sizes, "layer_norm_eps": eps, "hidden_act": file.activation()}
