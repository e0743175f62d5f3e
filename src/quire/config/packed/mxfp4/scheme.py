"""Microscaled floating-point numbers of 4 bits (OCP Microscaling Formats 1.0)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from quire.config.hf import RawConfig, StoredTensor
from quire.config.packed.format import Format, PackedSettings
from quire.config.packed.parts import Parts
from quire.config.packed.scheme import Scheme, block_kernel, found

__all__ = ["FORMAT", "MXFP4", "split_experts"]

_STACKED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)_(blocks|scales)")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True, slots=True)
class MXFP4(Scheme):
    """e2m1 times a power of two for 32 inputs (OCP Microscaling Formats 1.0), by the names of
    compressed-tensors, or by those of gpt-oss."""

    name: ClassVar[str] = "mxfp4"
    kinds: ClassVar[tuple[str, ...]] = (
        "weight_packed", "weight_scale", "weight_blocks", "weight_scales"
    )  # fmt: skip
    dropped: ClassVar[tuple[str, ...]] = ("input_scale", "weight_shape")

    def holds(self, parts: Parts) -> bool:
        return "weight_packed" in parts or "weight_blocks" in parts

    def measure(self, parts: Parts) -> tuple[int, int]:
        if "weight_blocks" in parts:
            shape = parts.get("weight_blocks").shape
            if len(shape) != 3 or shape[2] != 16 or parts.get("weight_blocks").dtype != "U8":
                raise parts.refuse("weight_blocks", "shape [outputs, inputs / 32, 16], dtype U8")
            outputs, groups = shape[:2]
            parts.expect("weight_scales", (outputs, groups), ("U8", "F8_E8M0"))
        else:
            outputs, size = parts.matrix("weight_packed", ("U8",))
            groups = size // 16
            if size % 16:
                raise parts.refuse("weight_packed", "a multiple of 32 inputs")
            parts.expect("weight_scale", (outputs, groups), ("U8", "F8_E8M0"))
        return outputs, groups * 32

    def kernels(self, inputs: int) -> tuple[str, ...]:
        return found(block_kernel("e2m1", inputs, 32))


def read_mxfp4(raw: RawConfig) -> PackedSettings:
    return PackedSettings(raw.source, MXFP4())


def split_experts(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the same tensors by name, those of all experts in pieces by the names of each one's
    matrices. Rows of gate and up take turns."""
    split: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        match = _STACKED.fullmatch(name)
        if match is None or len(tensor.shape) < 3:
            split[name] = tensor
            continue
        prefix, module, kind = match.groups()
        parts = _PARTS[module]
        parted = tensor.pieces(len(parts), interleaved=True, is_transposed=False)
        for expert, pieces in enumerate(parted):
            for part, piece in zip(parts, pieces, strict=True):
                split[f"{prefix}.{expert}.{part}.weight_{kind}"] = piece
    return split


FORMAT = Format(
    methods={"mxfp4": read_mxfp4},
    readings="quire.config.packed.mxfp4.read:READINGS",
)
