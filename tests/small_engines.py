"""Engines with little memory, of which a test starts several."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import pytest

from quire import LLM
from quire.compute.executor.processes.group import RankGroup
from tests.forked import REAL, rank_starter, template_of

__all__ = [
    "SMALL", "Maker", "collect_and_freeze", "forked_ranks", "kernels_by_flags", "small_engines",
]  # fmt: skip

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


@pytest.fixture(scope="module", autouse=True)
def kernels_by_flags() -> Iterator[None]:
    """Time no kernels, for rooms whose `conftest.py` names this: on a busy machine the first of two
    engines may have no time to, and the second choose others, which round otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.ops.kernel_timing.BUDGET_S", 0.0)
        yield


@pytest.fixture(scope="module", autouse=True)
def forked_ranks() -> Iterator[None]:
    """Fork ranks that an engine in this process starts (tests/forked.py), in rooms whose
    `conftest.py` names this. The first one starts the template."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankGroup, "_start_process", rank_starter(lambda: template_of(REAL)))
        yield


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


def collect_and_freeze() -> None:
    """Collect what ended engines left, and freeze the rest, which the next such collection need not
    visit then: with all modules of `transformers`, it takes 0.2 s. `tests/conftest.py` visits it at
    the end of the file."""
    gc.collect()
    gc.freeze()
