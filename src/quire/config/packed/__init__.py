"""Hugging Face folders whose matrices are quantized: settings and layout, from headers alone."""

from quire.config.packed.layout import PackedLayout, layouts_of
from quire.config.packed.settings import PackedSettings, read_packed_settings

__all__ = ["PackedLayout", "PackedSettings", "layouts_of", "read_packed_settings"]
