"""Hugging Face folders whose matrices are quantized: settings and layout, from headers alone."""

from quire.config.packed.cache_scales import CacheScales, is_cache_scale, read_cache_scales
from quire.config.packed.layout import PackedLayout, describe_layouts, layouts_of
from quire.config.packed.schemes import GGUFBlocks
from quire.config.packed.settings import PackedSettings, read_packed_settings
from quire.config.packed.stacked import split_experts

__all__ = [
    "CacheScales",
    "GGUFBlocks",
    "PackedLayout",
    "PackedSettings",
    "describe_layouts",
    "is_cache_scale",
    "layouts_of",
    "read_cache_scales",
    "read_packed_settings",
    "split_experts",
]
