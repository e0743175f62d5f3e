"""Quantized matrices of all experts of a layer in one tensor, as gpt-oss has them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from quire.config.hf import StoredTensor

__all__ = ["split_experts"]

_STACKED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)_(blocks|scales)")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def split_experts(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the same tensors by name, those of all experts in pieces by the names of each one's
    matrices. Rows of gate and up take turns."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        match = _STACKED.fullmatch(name)
        if match is None or len(tensor.shape) < 3:
            found[name] = tensor
            continue
        prefix, module, kind = match.groups()
        parts = _PARTS[module]
        split = tensor.pieces(len(parts), interleaved=True, is_transposed=False)
        for expert, pieces in enumerate(split):
            for part, piece in zip(parts, pieces, strict=True):
                found[f"{prefix}.{expert}.{part}.weight_{kind}"] = piece
    return found
