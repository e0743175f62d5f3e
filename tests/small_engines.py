"""Engines with little memory, of which a test starts several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from quire import LLM

__all__ = ["SMALL", "Maker", "small_engines"]

SMALL: Mapping[str, Any] = MappingProxyType(
    {
        "dtype": "float32",
        "quiet": True,
        "skip_tokenizer_init": True,
        "num_kv_blocks": 256,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
    }
)
"""Settings under which requests of a few tokens are batched, chunked and cached."""

Maker = Callable[..., LLM]
"""Takes settings that differ."""


@contextmanager
def small_engines(model: str | None, **settings: Any) -> Iterator[Maker]:
    """Make engines that end here. model: None for the bundled one. settings: settings of all
    engines, beside `SMALL`."""
    engines: list[LLM] = []

    def make(**more: Any) -> LLM:
        engines.append(LLM(model, **{**SMALL, **settings, **more}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()
