"""Sizes of a model's weights and KV cache, and how many requests fit beside them."""

from quire.entrypoints.simulator.explorer.memory import (
    MemoryQuestion,
    MemoryTable,
    explore,
    render_memory,
)
from quire.entrypoints.simulator.explorer.page import render_page

__all__ = ["MemoryQuestion", "MemoryTable", "explore", "render_memory", "render_page"]
