"""Beginnings of prompts that an engine has been sent, so that others which begin alike can be sent
there too."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np

from quire.protocol.request import EngineRequest

__all__ = ["CHUNK", "PrefixIndex", "prefixes_of"]

CHUNK: Final = 64
"""Tokens of a beginning, or a multiple; shorter prompts cost little wherever they are computed."""


def prefixes_of(request: EngineRequest) -> list[bytes]:
    """Return names of the prompt's first CHUNK, 2 · CHUNK, … tokens. Requests with other salts or
    adapters share no cached blocks, and no names."""
    tokens = np.ascontiguousarray(request.prompt_token_ids, np.int32)
    name = repr((request.salt, request.adapter)).encode()
    names: list[bytes] = []
    for end in range(CHUNK, len(tokens) + 1, CHUNK):
        name = hashlib.blake2b(name + tokens[end - CHUNK : end].tobytes(), digest_size=16).digest()
        names.append(name)
    return names


class PrefixIndex:
    """Names of beginnings that one engine may still have in its cache: beginnings of the latest
    requests, up to the cache's size. It may err, which costs an engine a prompt."""

    def __init__(self) -> None:
        self._names: OrderedDict[bytes, None] = OrderedDict()  # used longest ago first

    def num_known(self, names: Sequence[bytes]) -> int:
        """Return the number of tokens of the longest known beginning. names: see `prefixes_of`."""
        known = next((i for i, name in enumerate(names) if name not in self._names), len(names))
        return known * CHUNK

    def note(self, names: Sequence[bytes], capacity_tokens: int) -> None:
        """Note a prompt that goes to the engine. capacity_tokens: tokens that its cache holds."""
        for name in reversed(names):  # a cache too keeps beginnings longest
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) * CHUNK > capacity_tokens:
            self._names.popitem(last=False)

    def clear(self) -> None:
        """Forget everything: the engine has ended."""
        self._names.clear()
