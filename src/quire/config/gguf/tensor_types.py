"""Types of tensors in GGUF files: numbers and bytes of a block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["GGML_TYPES", "UNSUPPORTED_TYPES", "GGMLType"]


@dataclass(frozen=True, slots=True)
class GGMLType:
    """A row of a tensor is a sequence of blocks. block_size: numbers in one. block_bytes: its
    size."""

    name: str
    block_size: int
    block_bytes: int


GGML_TYPES: Mapping[int, GGMLType] = MappingProxyType(
    {
        0: GGMLType("F32", 1, 4),
        1: GGMLType("F16", 1, 2),
        2: GGMLType("Q4_0", 32, 18),
        3: GGMLType("Q4_1", 32, 20),
        6: GGMLType("Q5_0", 32, 22),
        7: GGMLType("Q5_1", 32, 24),
        8: GGMLType("Q8_0", 32, 34),
        10: GGMLType("Q2_K", 256, 84),
        11: GGMLType("Q3_K", 256, 110),
        12: GGMLType("Q4_K", 256, 144),
        13: GGMLType("Q5_K", 256, 176),
        14: GGMLType("Q6_K", 256, 210),
        20: GGMLType("IQ4_NL", 32, 18),
        23: GGMLType("IQ4_XS", 256, 136),
        30: GGMLType("BF16", 1, 2),
        39: GGMLType("MXFP4", 32, 17),
    }
)
"""Types keyed by the number in a file. The numbers are those of ggml and never change."""

UNSUPPORTED_TYPES: Mapping[int, str] = MappingProxyType(
    {
        4: "Q4_2",
        5: "Q4_3",
        9: "Q8_1",
        15: "Q8_K",
        16: "IQ2_XXS",
        17: "IQ2_XS",
        18: "IQ3_XXS",
        19: "IQ1_S",
        21: "IQ3_S",
        22: "IQ2_S",
        24: "I8",
        25: "I16",
        26: "I32",
        27: "I64",
        28: "F64",
        29: "IQ1_M",
        31: "Q4_0_4_4",
        32: "Q4_0_4_8",
        33: "Q4_0_8_8",
        34: "TQ1_0",
        35: "TQ2_0",
        36: "IQ4_NL_4_4",
        37: "IQ4_NL_4_8",
        38: "IQ4_NL_8_8",
        40: "NVFP4",
    }
)
"""Types that exist, or once did, and cannot be read here."""
