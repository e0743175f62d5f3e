"""Names of block contents: a keyed, chained hash, so that equal names mean equal K/V."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from quire.protocol.media import Media
from quire.protocol.step import IntArray

__all__ = ["NO_EXTRAS", "BlockExtras", "BlockHasher"]

DIGEST_BYTES = 16

EXTRAS_DOMAIN = b"block extras"
"""Separates the names of blocks that have extras from those of all others."""


@dataclass(frozen=True, slots=True)
class BlockExtras:
    """Inputs beside tokens that change the K/V of a sequence.

    adapter: name of what is added to the model's weights, for all blocks. media: media in their
    order; each changes the block that it stands in, and by its name all blocks after it.
    """

    adapter: str = ""
    media: Sequence[Media] = ()

    def __bool__(self) -> bool:
        return bool(self.adapter or self.media)

    def of(self, start: int, end: int) -> bytes:
        """Return the extras of the block of tokens start … end - 1; empty if it has none."""
        parts = [_field(b"adapter", self.adapter.encode())] if self.adapter else []
        for each in self.media:
            span = each.span
            first, last = max(start, span.position), min(end, span.end)
            if first >= last:
                continue
            taken = slice(first - span.position, last - span.position)
            row = span.first_row + taken.start
            where = struct.pack("<III", first - start, row, last - first)
            positions = b""
            if len(span.positions):
                of_axes = span.positions.astype("<i4").reshape(3, span.length)
                positions = of_axes[:, taken].tobytes()
            parts.append(_field(b"media", where + _field(b"positions", positions) + each.digest))
        return b"".join(parts)


NO_EXTRAS = BlockExtras()


def _field(kind: bytes, value: bytes) -> bytes:
    """A value that can't be taken for one of another kind, nor for a part of the next."""
    return struct.pack("<BI", len(kind), len(value)) + kind + value


class BlockHasher:
    """Hashes the full blocks of a token sequence, each over its parent and its own tokens.

    The chain starts from everything else that changes K/V: the model's fingerprint, the version of
    its weights and the tenant's salt. BLAKE2b is keyed and collision resistant, so one tenant
    cannot construct a prompt that takes another's blocks; engines with the same `key` and
    `fingerprint` agree on the names.

    key: secret of at most 64 bytes. block_size: tokens per block.
    """

    def __init__(
        self, block_size: int, key: bytes, fingerprint: bytes = b"", weights_version: int = 0
    ) -> None:
        self._block_size = block_size
        self._digest = partial(hashlib.blake2b, digest_size=DIGEST_BYTES, key=key)
        self._digest_of_extras = partial(self._digest, person=EXTRAS_DOMAIN)
        self._fingerprint = fingerprint
        self._weights_version = weights_version

    @property
    def weights_version(self) -> int:
        """Number of times that weights were replaced."""
        return self._weights_version

    def raise_version(self) -> None:
        """The weights have changed: roots made from now on lead to no older name."""
        self._weights_version += 1

    def root(self, salt: str = "") -> bytes:
        """The parent of a sequence's first block."""
        seed = self._fingerprint + f"{self._weights_version}\0{salt}".encode()
        return self._digest(seed).digest()

    def name(self, parent: bytes, block: bytes, extras: bytes = b"") -> bytes:
        """Return the name of one block. block: its token ids as int32, in memory order. extras:
        bytes of `BlockExtras.of`."""
        if extras:
            return self._digest_of_extras(parent + block + extras).digest()
        return self._digest(parent + block).digest()

    def extend(
        self,
        chain: list[bytes],
        token_ids: IntArray,
        root: bytes,
        extras: BlockExtras = NO_EXTRAS,
    ) -> None:
        """Append to `chain` the names of the full blocks of `token_ids` that it does not have."""
        size = self._block_size
        start = len(chain)
        end = len(token_ids) // size
        if start >= end:
            return
        if token_ids.dtype != np.int32:
            token_ids = token_ids.astype(np.int32)
        data = token_ids[start * size : end * size].tobytes()
        parent = chain[-1] if chain else root
        stride = 4 * size
        for index, offset in enumerate(range(0, len(data), stride), start=start):
            block = data[offset : offset + stride]
            its_extras = extras.of(index * size, (index + 1) * size) if extras else b""
            parent = self.name(parent, block, its_extras)
            chain.append(parent)
