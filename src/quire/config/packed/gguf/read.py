"""Meaning of the bytes of each GGUF type.

Each function takes blocks, uint8 [N, bytes per block], and returns the weights [N, numbers per
block]: codes and scales of a quantized type, which kernels take as they are, else float32. They are
definitions: fast enough to load a model with, and what kernels are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from quire.config.packed.block_kinds import BLOCK_KINDS as KINDS
from quire.config.packed.gguf.scheme import GGUFBlocks
from quire.config.packed.mxfp4.read import e2m1_scale
from quire.config.packed.read import BrokenError, Part, Reading, Tensors, axes_of
from quire.ops.linear.blocks.contract import Blocks

__all__ = ["DEQUANTIZE", "READINGS", "dequantize"]


def dequantize(name: str, blocks: torch.Tensor) -> torch.Tensor:
    """blocks uint8 [..., B] of the type `name` → float32 [..., numbers of a row], where a row is
    any number of whole blocks."""
    function, size = DEQUANTIZE[name]
    found = function(blocks.reshape(-1, size))
    numbers = found if isinstance(found, torch.Tensor) else found.numbers()
    return numbers.reshape(*blocks.shape[:-1], -1)


def _plain(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: blocks.contiguous().view(dtype).float()


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of each block, float32 [N, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _halves(packed: torch.Tensor) -> torch.Tensor:
    """[N, n] bytes → [N, 2n]: the low nibbles of all, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _shifts(step: int, like: torch.Tensor) -> torch.Tensor:
    """0 to 7 by `step`, on the device of `like`."""
    return torch.arange(0, 8, step, dtype=torch.uint8, device=like.device)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """[N, n] bytes → [N, 8n] bits, lowest first."""
    shifts = _shifts(1, packed)
    return ((packed[..., None] >> shifts) & 1).flatten(-2)


def q4_0(blocks: torch.Tensor) -> Blocks:
    """d, 16 bytes: d · (q - 8)."""
    return Blocks(KINDS["w4"], _halves(blocks[:, 2:]), _half(blocks, 0))


def q4_1(blocks: torch.Tensor) -> Blocks:
    """d, m, 16 bytes: d · q + m."""
    return Blocks(KINDS["w4_min"], _halves(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def q5_0(blocks: torch.Tensor) -> Blocks:
    """d, 32 fifth bits, 16 bytes: d · (q - 16)."""
    codes = _halves(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return Blocks(KINDS["w5"], codes, _half(blocks, 0))


def q5_1(blocks: torch.Tensor) -> Blocks:
    """d, m, 32 fifth bits, 16 bytes: d · q + m."""
    codes = _halves(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return Blocks(KINDS["w5_min"], codes, _half(blocks, 0), _half(blocks, 2))


def q8_0(blocks: torch.Tensor) -> Blocks:
    """d, 32 int8: d · q."""
    return Blocks(KINDS["w8"], blocks[:, 2:] ^ 128, _half(blocks, 0))


def q2_k(blocks: torch.Tensor) -> Blocks:
    """16 bytes (scale, minimum << 4), 64 bytes of 2 bits, d, dmin: d · scale · q - dmin · minimum,
    with one scale and minimum for 16 numbers."""
    factors, lows = (blocks[:, :16] & 15).view(torch.int8), blocks[:, :16] >> 4
    codes, scale = _two_bits(blocks[:, 16:80]), _half(blocks, 80)
    return Blocks(KINDS["w2_k"], codes, scale, -_half(blocks, 82), factors, lows)


def _two_bits(packed: torch.Tensor) -> torch.Tensor:
    """[N, 64] → [N, 256]. From each half of the bytes come the lowest 2 bits of all 32, then the
    next."""
    shifts = _shifts(2, packed)[:, None]
    return (packed.view(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 256)


def q3_k(blocks: torch.Tensor) -> Blocks:
    """32 bytes of third bits, 64 bytes of 2 bits, 12 bytes with 16 scales of 6 bits, d:
    d · (scale - 32) · (q - 4), where the third bit of q is one of the byte for number i mod 32."""
    high = (blocks[:, None, :32] >> _shifts(1, blocks)[:, None] & 1).flatten(1)
    packed = blocks[:, 96:108]
    low = _halves(packed[:, :8])
    top = (packed[:, None, 8:] >> _shifts(2, packed)[:, None] & 3).flatten(1)
    factors = (low | top << 4).view(torch.int8) - 32
    codes = _two_bits(blocks[:, 32:96]) | high << 2
    return Blocks(KINDS["w3_k"], codes, _half(blocks, 108), None, factors)


def _pairs(name: str, blocks: torch.Tensor, codes: torch.Tensor) -> Blocks:
    """d, dmin, 12 bytes with 8 scales and 8 minima of 6 bits: d · scale · q - dmin · minimum, with
    one of each for 32 numbers."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    factors = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=1).view(torch.int8)
    lows = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=1)
    return Blocks(KINDS[name], codes, _half(blocks, 0), -_half(blocks, 2), factors, lows)


def _nibbles_by_64(packed: torch.Tensor) -> torch.Tensor:
    """[N, 128] → [N, 256]: 32 low nibbles, then the high ones of the same bytes, four times."""
    return _halves(packed.reshape(-1, 4, 32)).reshape(-1, 256)


def q4_k(blocks: torch.Tensor) -> Blocks:
    """16 bytes of scales and minima, 128 bytes."""
    return _pairs("w4_k", blocks, _nibbles_by_64(blocks[:, 16:]))


def q5_k(blocks: torch.Tensor) -> Blocks:
    """Q4_K with 32 bytes of fifth bits before the 128: bit s of byte i mod 32 for the s-th 32
    numbers."""
    shifts = _shifts(1, blocks)[:, None]
    high = (blocks[:, None, 16:48] >> shifts & 1).flatten(1)
    return _pairs("w5_k", blocks, _nibbles_by_64(blocks[:, 48:]) | high << 4)


def q6_k(blocks: torch.Tensor) -> Blocks:
    """128 bytes of 4 low bits, 64 bytes of 2 high bits, 16 int8 scales, d:
    d · scale · (q - 32), with one scale for 16 numbers."""
    low = _halves(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    codes = low | _two_bits(blocks[:, 128:192]) << 4
    factors = blocks[:, 192:208].view(torch.int8)
    return Blocks(KINDS["w6_k"], codes, _half(blocks, 208), None, factors)


def iq4_nl(blocks: torch.Tensor) -> Blocks:
    """d, 16 bytes: d · table[q]."""
    return Blocks(KINDS["iq4"], _halves(blocks[:, 2:]), _half(blocks, 0))


def iq4_xs(blocks: torch.Tensor) -> Blocks:
    """d, 8 times 2 high bits of scales, 4 bytes of their low nibbles, 128 bytes:
    d · (scale - 32) · table[q], with one scale for 32 numbers."""
    shifts = _shifts(2, blocks)
    top = (blocks[:, 2:4, None] >> shifts & 3).flatten(1)
    nibbles = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=2).flatten(1)
    factors = (nibbles | top << 4).view(torch.int8) - 32
    codes = _halves(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, 256)
    return Blocks(KINDS["iq4_k"], codes, _half(blocks, 0), None, factors)


def mxfp4(blocks: torch.Tensor) -> Blocks:
    """An exponent e, 16 bytes: 2^(e - 127) · e2m1[q]."""
    return Blocks(KINDS["e2m1"], _halves(blocks[:, 1:]), e2m1_scale(blocks[:, :1]))


DEQUANTIZE: Mapping[str, tuple[Callable[[torch.Tensor], torch.Tensor | Blocks], int]] = (
    MappingProxyType(
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
)
"""Definitions by name, with the bytes of a block."""


def gguf_blocks(scheme: GGUFBlocks, tensors: Tensors, outputs: slice) -> Blocks:
    """Follow the definition of the type. Raises BrokenError for scales that are not finite."""
    rows = tensors["blocks"][outputs]
    function, size = DEQUANTIZE[scheme.kind]
    found = function(rows.reshape(-1, size))
    assert isinstance(found, Blocks), scheme.kind
    found = found.of_rows(len(rows))
    if not found.is_finite():
        raise BrokenError("blocks", "scales that are not finite")
    return found


def cut_gguf_blocks(scheme: GGUFBlocks, tensors: Tensors, part: Part) -> dict[str, torch.Tensor]:
    """Between blocks: K-quants have blocks of 256 inputs."""
    outputs, inputs = axes_of(part)
    blocks, size = tensors["blocks"], scheme.block_size
    width = blocks.shape[1] * size // inputs.total
    return {"blocks": inputs.of(outputs.of(blocks, 0), 1, size, width)}


READINGS: Mapping[type, Reading] = MappingProxyType(
    {GGUFBlocks: Reading(gguf_blocks, cut_gguf_blocks)}
)
