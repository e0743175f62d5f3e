"""Opens the store of an engine's K/V on disk."""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from quire.config.checkpoint import Checkpoint
from quire.config.kv_disk.digest import digest_files
from quire.config.kv_disk.folder import KVFolder, OpenStore, StoreFiles
from quire.config.kv_disk.records import StoreHeader
from quire.config.model_spec import STATE_ALIGNMENT
from quire.config.resolve import Resolved
from quire.config.shard import Shard
from quire.kv_cache.slot_tree import SlotTree

__all__ = ["StoreNews", "disk_key", "num_state_parts", "open_store", "weights_digest"]

DISK_BLOCK = 4096
"""Slots begin at multiples of it, so that files can be read past the page cache."""

LOOK_SECONDS = 2.0
"""Time between two looks into a store that another process writes, at least."""

SHARE_OF_LOOKS = 0.01
"""Largest share of a processor's time for these looks."""


def disk_key(kv_disk: str) -> bytes:
    """Return the secret that block names in a folder are keyed by. ConfigError if there is none and
    none can be written."""
    return KVFolder(Path(kv_disk).expanduser()).key()


def weights_digest(kv_disk: str, checkpoint: Checkpoint | None) -> bytes:
    """Return a digest over all bytes of the weights, remembered in the folder; empty for made-up
    weights, which the seed decides."""
    if checkpoint is None:
        return b""
    return digest_files(checkpoint.files, Path(kv_disk).expanduser() / "digests.json")


def num_state_parts(resolved: Resolved) -> int:
    """Return the number of blocks as long as a rank's recurrent state, 0 without states or K/V. A
    rank may pad its share of each layer's state to a cache line."""
    if not resolved.spec.has_kv:
        return 0  # no block has a length, and `kv_disk` is refused
    num_ranks, spec = resolved.settings.tensor_parallel_size, resolved.spec
    layout = resolved.layout.of_rank(Shard(0, num_ranks))
    num_states = len(spec.states) + len(spec.wide_states)
    padding = num_states * STATE_ALIGNMENT if num_ranks > 1 else 0
    return -(-(layout.state_bytes + padding) // layout.page_bytes)


def open_store(
    resolved: Resolved, kv_disk: str, model: str, root: bytes, computes_with: str
) -> OpenStore:
    """Open the store of an engine. root: a name that stands for the model, the format of its K/V
    and the key of names. computes_with: version and kernels, which decide the bits. ConfigError if
    the folder cannot be used."""
    settings = resolved.settings
    num_ranks = settings.tensor_parallel_size
    layout = resolved.layout.of_rank(Shard(0, num_ranks))  # all ranks have as many bytes
    identity = hashlib.blake2b(root, digest_size=32, person=b"quire store")
    identity.update(repr((layout.page_bytes, num_ranks, computes_with)).encode())
    header = StoreHeader(
        identity=identity.hexdigest(),
        model=model,
        block_bytes=layout.page_bytes,
        slot_bytes=-(-layout.page_bytes // DISK_BLOCK) * DISK_BLOCK,
        max_bytes=settings.kv_disk_bytes,
        num_ranks=num_ranks,
    )
    return KVFolder(Path(kv_disk).expanduser()).open(header)


class StoreNews:
    """Looks into a store that another process writes, in a thread. A call returns at once: the
    blocks that are there now, if a look has found the store written, and None otherwise."""

    def __init__(self, files: StoreFiles, header: StoreHeader) -> None:
        """header: header as it was opened. Slots beyond it are not seen."""
        self._files = files
        self._header = header
        self._written_ns = -1
        self._next_look = time.monotonic() + LOOK_SECONDS
        self._thread = ThreadPoolExecutor(1, "quire-disk-news")
        self._looking: Future[SlotTree | None] | None = None

    def __call__(self) -> SlotTree | None:
        if self._looking is None:
            if time.monotonic() >= self._next_look:
                self._looking = self._thread.submit(self._look)
            return None
        if not self._looking.done():
            return None
        looked, self._looking = self._looking, None
        return looked.result() if looked.exception() is None else None

    def _look(self) -> SlotTree | None:
        started = time.monotonic()
        try:
            written_ns = self._files.written_ns
            if written_ns == self._written_ns:
                return None
            tree = SlotTree(self._header.num_slots, self._files.read_records(self._header))
            self._written_ns = written_ns
            return tree
        finally:
            took = time.monotonic() - started
            self._next_look = started + max(LOOK_SECONDS, took / SHARE_OF_LOOKS)
