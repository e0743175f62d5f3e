"""Hugging Face folders whose matrices are quantized: settings and layout, from headers alone.

A format is a folder here, listed in `settings.py`.
"""

from quire.config.packed.cache_scales import CacheScales, is_cache_scale, read_cache_scales
from quire.config.packed.format import PackedSettings
from quire.config.packed.gguf.scheme import GGUFBlocks
from quire.config.packed.layout import PackedLayout, layouts_of
from quire.config.packed.mxfp4.scheme import split_experts
from quire.config.packed.settings import MARKS, read_packed_settings

__all__ = [
    "MARKS",
    "CacheScales",
    "GGUFBlocks",
    "PackedLayout",
    "PackedSettings",
    "is_cache_scale",
    "layouts_of",
    "read_cache_scales",
    "read_packed_settings",
    "split_experts",
]
