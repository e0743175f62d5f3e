"""Names of block contents: a keyed, chained hash, so that equal names mean equal K/V."""

from __future__ import annotations

import hashlib
from functools import partial

import numpy as np

from quire.protocol.step import IntArray

__all__ = ["BlockHasher"]

DIGEST_BYTES = 16


class BlockHasher:
    """Hashes the full blocks of a token sequence, each over its parent and its own tokens.

    The chain starts from everything else that changes K/V: the model's fingerprint, the version of
    its weights and the tenant's salt. BLAKE2b is keyed and collision resistant, so one tenant
    cannot construct a prompt that takes another's blocks; engines with the same `key` and
    `fingerprint` agree on the names.

    key: at most 64 bytes, secret. block_size: tokens per block.
    """

    def __init__(
        self, block_size: int, key: bytes, fingerprint: bytes = b"", weights_version: int = 0
    ) -> None:
        self._block_size = block_size
        self._digest = partial(hashlib.blake2b, digest_size=DIGEST_BYTES, key=key)
        self._fingerprint = fingerprint
        self._weights_version = weights_version

    def raise_version(self) -> None:
        """The weights have changed: roots made from now on lead to no older name."""
        self._weights_version += 1

    def root(self, salt: str = "") -> bytes:
        """The parent of a sequence's first block."""
        seed = self._fingerprint + f"{self._weights_version}\0{salt}".encode()
        return self._digest(seed).digest()

    def name(self, parent: bytes, block: bytes) -> bytes:
        """The name of one block. block: its token ids as int32, in memory order."""
        return self._digest(parent + block).digest()

    def extend(self, chain: list[bytes], token_ids: IntArray, root: bytes) -> None:
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
        for offset in range(0, len(data), stride):
            parent = self.name(parent, data[offset : offset + stride])
            chain.append(parent)
