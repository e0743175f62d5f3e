"""Opens the store of an engine's K/V on disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

from quire.config.checkpoint import Checkpoint
from quire.config.kv_disk.digest import digest_files
from quire.config.kv_disk.folder import KVFolder, OpenStore
from quire.config.kv_disk.records import StoreHeader
from quire.config.resolve import Resolved
from quire.config.shard import Shard

__all__ = ["disk_key", "open_store", "weights_digest"]

DISK_BLOCK = 4096
"""Slots begin at multiples of it, so that files can be read past the page cache."""


def disk_key(kv_disk: str) -> bytes:
    """Return the secret that block names in a folder are keyed by. ConfigError if there is none and
    none can be written."""
    return KVFolder(Path(kv_disk).expanduser()).key()


def weights_digest(kv_disk: str, checkpoint: Checkpoint | None) -> bytes:
    """Return a digest over all bytes of the weights, those that encode images too, remembered in
    the folder; empty for made-up weights, which the seed decides."""
    if checkpoint is None:
        return b""
    tensors = (*checkpoint.tensors.values(), *checkpoint.others.values())
    stored = [part for tensor in tensors for part in tensor.stored]
    files = {tensor.file for tensor in (*stored, *checkpoint.cache_scales)}
    return digest_files(files, Path(kv_disk).expanduser() / "digests.json")


def open_store(resolved: Resolved, kv_disk: str, model: str, root: bytes) -> OpenStore:
    """Open the store of an engine. root: a name that stands for everything that decides the K/V,
    and for the key of names. ConfigError if the folder cannot be used."""
    settings = resolved.settings
    num_ranks = settings.tensor_parallel_size
    layout = resolved.layout.of_rank(Shard(0, num_ranks))  # all ranks have as many bytes
    identity = hashlib.blake2b(root, digest_size=32, person=b"quire store")
    identity.update(repr((layout.page_bytes, num_ranks)).encode())
    header = StoreHeader(
        identity=identity.hexdigest(),
        model=model,
        block_bytes=layout.page_bytes,
        slot_bytes=-(-layout.page_bytes // DISK_BLOCK) * DISK_BLOCK,
        max_bytes=settings.kv_disk_bytes,
        num_ranks=num_ranks,
    )
    return KVFolder(Path(kv_disk).expanduser()).open(header)
