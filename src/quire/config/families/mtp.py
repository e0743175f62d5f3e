"""Names of MTP layers (multi-token prediction), which several families have in one of two forms."""

from __future__ import annotations

from dataclasses import dataclass

from quire.base.errors import ConfigError
from quire.config.families.shared import MAX_LAYERS
from quire.config.hf import RawConfig

__all__ = ["DEEPSEEK_MTP", "QWEN_MTP", "MTPNames", "mtp_names", "read_mtp_layers"]


@dataclass(frozen=True, slots=True)
class MTPNames:
    """Names of an MTP layer's tensors in folders.

    start: beginning of all names, with the index of the layer behind the model's last one as {} if
    it is in them. join, token_norm, state_norm, norm: names behind it of the projection, of the
    norms before it, and of the final norm. block: beginning behind `start` of the names of the
    layer's block, with its index as {} if it has one. table, head: names behind `start` of copies
    of the model's table of tokens, and of its head.
    """

    start: str
    join: str
    token_norm: str
    state_norm: str
    norm: str
    block: str
    table: str
    head: str


DEEPSEEK_MTP = MTPNames(
    "model.layers.{}.",
    join="eh_proj",
    token_norm="enorm",
    state_norm="hnorm",
    norm="shared_head.norm",
    block="",
    table="embed_tokens",
    head="shared_head.head",
)
QWEN_MTP = MTPNames(
    "mtp.",
    join="fc",
    token_norm="pre_fc_norm_embedding",
    state_norm="pre_fc_norm_hidden",
    norm="norm",
    block="layers.{}.",
    table="embed_tokens",
    head="lm_head",
)


def mtp_names(start: str) -> MTPNames:
    """Return the names of a layer. start: an entry of `ModelSpec.mtp_layers`."""
    return QWEN_MTP if start == QWEN_MTP.start else DEEPSEEK_MTP


def read_mtp_layers(raw: RawConfig, num_layers: int, default: int = 0) -> tuple[str, ...]:
    """Return `ModelSpec.mtp_layers` of a family with DeepSeek's layers, behind `num_layers` of the
    model. default: number of MTP layers where the file does not say."""
    count = raw.read(int, "num_nextn_predict_layers", default=default)
    if not 0 <= count <= MAX_LAYERS:
        raise ConfigError(
            f"{raw.source}: num_nextn_predict_layers={count} must be from 0 to {MAX_LAYERS}; fetch "
            "the file again"
        )
    return tuple(DEEPSEEK_MTP.start.format(num_layers + index) for index in range(count))
