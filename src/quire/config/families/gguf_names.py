"""Names that GGUF files give to a family and to the tensors of its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from quire.config.families.mtp import DEEPSEEK_MTP, MTPNames

__all__ = ["BLOCK", "PROJECTIONS", "SHARED_GATE", "GGUFNames", "expert_block"]

BLOCK: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
"""Tensors of a block of Llama: the name in GGUF files, and the one in Hugging Face folders."""

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
SHARED_GATE = "ffn_gate_inp_shexp"
"""The gate of a network that all tokens pass through."""


@dataclass(frozen=True, slots=True)
class GGUFNames:
    """Differences between the GGUF files and the Hugging Face folders of a family.

    name: value of `general.architecture`.
    block: names of a block's tensors; one with a dot stands for the whole name, of this family
    alone.
    pairs_heads: True if rows of q and k are in the order of the rotated pairs.
    adds_one: True if norms hold the 1 that is added to them, but for `plain_norms`.
    told_by: key, after `name`, with a number other than 0 in files of this family alone, where
    another family has the same name; None if this is the family of all other files.
    partly_rotated: True if heads may be rotated in part.
    ropes: keys, after `name` and "rope", that are obeyed besides those of all files.
    numbers: keys of config.json, with the keys after `name` that hold their numbers.
    constants: keys of config.json with values that are the same for all files.
    outer: names of tensors beside the blocks that other families have not.
    rest_type: entry of `layer_types` for layers whose number of kv heads is 0; None if there are
    none. plain_norms: norms that hold what folders hold. blocks: beginning of the names of a
    block's tensors in folders, with its index as {}. mtp: names of an MTP layer's in folders.
    also: further values of `general.architecture`, of the text models of checkpoints with images.
    """

    name: str
    block: Mapping[str, str]
    pairs_heads: bool = False
    adds_one: bool = False
    told_by: str | None = None
    partly_rotated: bool = False
    ropes: tuple[str, ...] = ()
    numbers: Mapping[str, str] = field(default_factory=dict[str, str])
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])
    outer: Mapping[str, str] = field(default_factory=dict[str, str])
    rest_type: str | None = None
    plain_norms: tuple[str, ...] = ()
    blocks: str = "model.layers.{}."
    mtp: MTPNames = DEEPSEEK_MTP
    also: tuple[str, ...] = ()


def expert_block(router: str, experts: str, parts: tuple[str, str, str]) -> dict[str, str]:
    """Return the names of a block with experts: the router, and gate, up and down of each expert
    by its number."""
    gate, up, down = (f"{experts}.{{}}.{part}" for part in parts)
    own = {"ffn_gate_inp": router, "ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down}
    return {**BLOCK, **own}
