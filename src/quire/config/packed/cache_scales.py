"""Scales of an 8-bit KV cache that a checkpoint brings along: one each of K and V of each layer."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable

from quire.base.errors import ConfigError
from quire.config.hf import StoredTensor

__all__ = ["CacheScales", "is_cache_scale", "read_cache_scales"]

CacheScales = dict[int, tuple[float, float]]
"""Divisors of K and V before they are stored, by layer."""

_NAME = re.compile(
    r"\.(self_attn|attn|attention)\.(([kv]|kv|q|prob|prob_output)_scale"
    r"|[qkv]_proj\.([kv]_scale|kv_scale|output_scale))$"
)
_LAYER = re.compile(r"\.(\d{1,6})\.")
_KEYS = re.compile(r"\.(k_scale|kv_scale|k_proj\.output_scale)$")
_VALUES = re.compile(r"\.(v_scale|kv_scale|v_proj\.output_scale)$")
_CODES = {"F32": "<f", "F16": "<e", "F64": "<d"}


def is_cache_scale(name: str) -> bool:
    """Return whether the tensor belongs to an 8-bit cache, and is no weight."""
    return _NAME.search(name) is not None


def read_cache_scales(tensors: Iterable[StoredTensor], num_layers: int) -> CacheScales:
    """Return the scales of every layer; 1.0 where the checkpoint says nothing.

    Raises ConfigError, naming file and tensor, for one that is no positive number.
    """
    keys, values = dict[int, float](), dict[int, float]()
    for tensor in tensors:
        layer = _LAYER.search(tensor.name)
        for pattern, found in ((_KEYS, keys), (_VALUES, values)):
            if layer is not None and pattern.search(tensor.name):
                found[int(layer[1])] = _number(tensor)
    return {i: (keys.get(i, 1.0), values.get(i, 1.0)) for i in range(num_layers)}


def _number(tensor: StoredTensor) -> float:
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        stored = file.read(min(tensor.num_bytes, 8))
    if tensor.dtype == "BF16":
        stored, code = b"\0\0" + stored, "<f"
    else:
        code = _CODES.get(tensor.dtype, "")
    number = math.nan
    if code and tensor.num_elements == 1:
        number = float(struct.unpack(code, stored)[0])
    if not (math.isfinite(number) and number > 0):
        raise ConfigError(
            f"{tensor.file}: tensor {tensor.name!r} of shape {list(tensor.shape)} and dtype "
            f"{tensor.dtype} is no scale of a KV cache, one positive number; give another "
            "kv_cache_dtype than fp8, or fetch the checkpoint again"
        )
    return number
