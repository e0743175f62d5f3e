"""Hugging Face folders whose matrices are quantized: settings and layout, from headers alone."""

from quire.config.packed.layout import PackedLayout, describe_layouts, layouts_of
from quire.config.packed.settings import PackedSettings, read_packed_settings

__all__ = [
    "PackedLayout",
    "PackedSettings",
    "describe_layouts",
    "layouts_of",
    "read_packed_settings",
]
