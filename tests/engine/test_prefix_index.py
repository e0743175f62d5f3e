"""Beginnings of prompts that an engine is taken to have in its cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.engine.clients.prefix_index import CHUNK, PrefixIndex, prefixes_of
from quire.protocol import EngineRequest, SamplingParams
from quire.protocol.adapters import AdapterRef


def names(num_tokens: int, first: int = 0, **more: Any) -> list[bytes]:
    """Return the names for a prompt of consecutive tokens."""
    tokens = np.arange(first, first + num_tokens, dtype=np.int32)
    return prefixes_of(EngineRequest("test", 0, tokens, SamplingParams(), 0, **more))


def test_names_are_of_whole_beginnings() -> None:
    """Turns red when prompts that differ early are alike later, or tenants are."""
    assert names(CHUNK - 1) == []
    assert len(names(CHUNK)) == 1
    assert names(3 * CHUNK + 5)[:2] == names(2 * CHUNK)
    other = names(2 * CHUNK, first=1)
    assert not set(other) & set(names(2 * CHUNK))
    of_tenant = names(2 * CHUNK, salt="tenant")
    adapted = names(2 * CHUNK, adapter=AdapterRef("a", "/a", "1"))
    assert not set(names(2 * CHUNK)) & {*of_tenant, *adapted}


def test_the_longest_known_beginning_counts() -> None:
    index = PrefixIndex()
    assert index.num_known(names(5 * CHUNK)) == 0
    index.note(names(2 * CHUNK), 100 * CHUNK)
    assert index.num_known(names(5 * CHUNK)) == 2 * CHUNK
    assert index.num_known(names(CHUNK)) == CHUNK
    assert index.num_known(names(5 * CHUNK, first=7)) == 0
    index.clear()
    assert index.num_known(names(5 * CHUNK)) == 0


def test_no_more_is_known_than_a_cache_holds() -> None:
    """Turns red when an index grows without end, forgets what was used last, or forgets the first
    part of a prompt before its end."""
    index = PrefixIndex()
    first, second = names(3 * CHUNK), names(3 * CHUNK, first=5000)
    for each in (first, second, first[:1]):
        index.note(each, 5 * CHUNK)
    assert index.num_known(first) == 2 * CHUNK
    assert index.num_known(second) == 3 * CHUNK
    index.note(names(3 * CHUNK, first=9000), 5 * CHUNK)
    assert index.num_known(first) == CHUNK
    assert index.num_known(second) == CHUNK
    index.note(first, 0)
    assert index.num_known(first) == 0
