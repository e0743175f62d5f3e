"""Numbers of each GGUF type, from the bytes of its blocks.

Each function takes blocks, uint8 [N, bytes per block], and returns float32 [N, numbers per block].
They are definitions: fast enough to load a model with, and what kernels are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

__all__ = ["DEQUANTIZE", "dequantize"]

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of IQ4_NL and IQ4_XS, by the 4 bits of a number."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*_E2M1, *(-value for value in _E2M1))
"""Values of MXFP4: 1 sign, 2 exponent and 1 mantissa bits (OCP Microscaling Formats 1.0, 5.3.3)."""


def dequantize(name: str, blocks: torch.Tensor) -> torch.Tensor:
    """blocks uint8 [..., B] of the type `name` → float32 [..., numbers of a row], where a row is
    any number of whole blocks."""
    function, size = DEQUANTIZE[name]
    rows = blocks.shape[:-1]
    return function(blocks.reshape(-1, size)).reshape(*rows, -1)


def _plain(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: blocks.contiguous().view(dtype).float()


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of each block, float32 [N, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _halves(packed: torch.Tensor) -> torch.Tensor:
    """[N, n] bytes → [N, 2n]: the low nibbles of all, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """[N, n] bytes → [N, 8n] bits, lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed[..., None] >> shifts) & 1).flatten(-2)


def q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """d, 16 bytes: d · (q - 8)."""
    return _half(blocks, 0) * (_halves(blocks[:, 2:]).float() - 8)


def q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """d, m, 16 bytes: d · q + m."""
    return _half(blocks, 0) * _halves(blocks[:, 4:]).float() + _half(blocks, 2)


def q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """d, 32 fifth bits, 16 bytes: d · (q - 16)."""
    q = _halves(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return _half(blocks, 0) * (q.float() - 16)


def q5_1(blocks: torch.Tensor) -> torch.Tensor:
    """d, m, 32 fifth bits, 16 bytes: d · q + m."""
    q = _halves(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return _half(blocks, 0) * q.float() + _half(blocks, 2)


def q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """d, 32 int8: d · q."""
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def q2_k(blocks: torch.Tensor) -> torch.Tensor:
    """16 bytes (scale, minimum << 4), 64 bytes of 2 bits, d, dmin: d · scale · q - dmin · minimum,
    with one scale and minimum for 16 numbers."""
    scale, minimum = (blocks[:, :16] & 15).float(), (blocks[:, :16] >> 4).float()
    q = _two_bits(blocks[:, 16:80]).float().unflatten(1, (16, 16))
    low = _half(blocks, 82) * minimum
    return ((_half(blocks, 80) * scale)[..., None] * q - low[..., None]).flatten(1)


def _two_bits(packed: torch.Tensor) -> torch.Tensor:
    """[N, 64] → [N, 256]: of each half of the bytes, the lowest 2 bits of all 32, then the next."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return (packed.view(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 256)


def q3_k(blocks: torch.Tensor) -> torch.Tensor:
    """32 bytes of third bits, 64 bytes of 2 bits, 12 bytes with 16 scales of 6 bits, d:
    d · (scale - 32) · (q - 4), where the third bit of q is one of the byte for number i mod 32."""
    high = (blocks[:, None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1).flatten(1)
    q = (_two_bits(blocks[:, 32:96]) | high << 2).float() - 4
    packed = blocks[:, 96:108]
    low = _halves(packed[:, :8])
    top = (packed[:, None, 8:] >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3).flatten(1)
    scale = _half(blocks, 108) * ((low | top << 4).float() - 32)
    return (scale[..., None] * q.unflatten(1, (16, 16))).flatten(1)


def _six_bit_pairs(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """12 bytes → 8 scales and 8 minima of 6 bits, [N, 8] each (Q4_K, Q5_K)."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=1)
    minimum = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=1)
    return scale.float(), minimum.float()


def _scaled_pairs(blocks: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """d · scale · q - dmin · minimum, with one of each for 32 numbers; q [N, 256]."""
    scale, minimum = _six_bit_pairs(blocks[:, 4:16])
    scale, minimum = _half(blocks, 0) * scale, _half(blocks, 2) * minimum
    return (scale[..., None] * q.float().unflatten(1, (8, 32)) - minimum[..., None]).flatten(1)


def _nibbles_by_64(packed: torch.Tensor) -> torch.Tensor:
    """[N, 128] → [N, 256]: 32 low nibbles, then the high ones of the same bytes, four times."""
    return _halves(packed.reshape(-1, 4, 32)).reshape(-1, 256)


def q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """d, dmin, 12 bytes of scales and minima, 128 bytes."""
    return _scaled_pairs(blocks, _nibbles_by_64(blocks[:, 16:]))


def q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """Dequantize Q5_K: like Q4_K, with 32 bytes of fifth bits before the 128: bit s of byte i mod
    32 for the s-th 32 numbers."""
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    high = (blocks[:, None, 16:48] >> shifts & 1).flatten(1)
    return _scaled_pairs(blocks, _nibbles_by_64(blocks[:, 48:]) | high << 4)


def q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """128 bytes of 4 low bits, 64 bytes of 2 high bits, 16 int8 scales, d:
    d · scale · (q - 32), with one scale for 16 numbers."""
    low = _halves(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    high = _two_bits(blocks[:, 128:192])
    scale = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    q = (low | high << 4).float() - 32
    return (scale[..., None] * q.unflatten(1, (16, 16))).flatten(1)


def iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    """d, 16 bytes: d · table[q]."""
    table = torch.tensor(IQ4_VALUES, dtype=torch.float32)
    return _half(blocks, 0) * table[_halves(blocks[:, 2:]).long()]


def iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    """d, 8 times 2 high bits of scales, 4 bytes of their low nibbles, 128 bytes:
    d · (scale - 32) · table[q], with one scale for 32 numbers."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
    top = (blocks[:, 2:4, None] >> shifts & 3).flatten(1)
    nibbles = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=2).flatten(1)
    scale = _half(blocks, 0) * ((nibbles | top << 4).float() - 32)
    table = torch.tensor(IQ4_VALUES, dtype=torch.float32)
    q = table[_halves(blocks[:, 8:].reshape(-1, 8, 16)).long()]
    return (scale[..., None] * q).flatten(1)


def mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """An exponent e, 16 bytes: 2^(e - 127) · table[q]."""
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32)
    exponent = blocks[:, :1].int() - 127
    return torch.ldexp(table[_halves(blocks[:, 1:]).long()], exponent)


DEQUANTIZE: Mapping[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = MappingProxyType(
    {
        "F32": (_plain(torch.float32), 4),
        "F16": (_plain(torch.float16), 2),
        "BF16": (_plain(torch.bfloat16), 2),
        "Q4_0": (q4_0, 18),
        "Q4_1": (q4_1, 20),
        "Q5_0": (q5_0, 22),
        "Q5_1": (q5_1, 24),
        "Q8_0": (q8_0, 34),
        "Q2_K": (q2_k, 84),
        "Q3_K": (q3_k, 110),
        "Q4_K": (q4_k, 144),
        "Q5_K": (q5_k, 176),
        "Q6_K": (q6_k, 210),
        "IQ4_NL": (iq4_nl, 18),
        "IQ4_XS": (iq4_xs, 136),
        "MXFP4": (mxfp4, 17),
    }
)
"""Definitions by name, with the bytes of a block."""
