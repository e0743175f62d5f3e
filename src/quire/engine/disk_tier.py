"""Opens the store of an engine's K/V on disk, and pins again what an engine before had pinned."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path

from quire.base.errors import RequestError
from quire.base.platform.background import Background
from quire.config.checkpoint import Checkpoint
from quire.config.kv_disk.digest import digest_files
from quire.config.kv_disk.folder import KVFolder, OpenStore, StoreFiles
from quire.config.kv_disk.records import StoreHeader
from quire.config.kv_layout import StoredSizes
from quire.config.resolve import Resolved
from quire.engine.core.engine_core import EngineCore
from quire.plan.kv_cache import NO_EXTRAS
from quire.plan.kv_cache.slot_tree import SlotTree
from quire.plan.scheduler import Scheduler
from quire.protocol.messages import HANDLES_PER_CLIENT, MAX_CLIENTS
from quire.protocol.pins import PIN_PARAMS, KeptPin, prefix_key
from quire.protocol.request import EngineRequest, FinishReason
from quire.protocol.scheduling_params import SchedulingParams

__all__ = [
    "StoreNews",
    "disk_key",
    "num_state_parts",
    "open_store",
    "pin_again",
    "weights_digest",
]

logger = logging.getLogger("quire")

DISK_BLOCK = 4096
"""Slots begin at multiples of it, so that files can be read past the page cache."""

FIRST_HANDLE = MAX_CLIENTS * HANDLES_PER_CLIENT
"""Handles from here on belong to no client."""

NUM_HANDLES = 2**60

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
    """Return the number of slots that a rank's recurrent state takes; 0 without states."""
    return _sizes(resolved).num_state_parts


def _sizes(resolved: Resolved) -> StoredSizes:
    num_ranks = resolved.settings.tensor_parallel_size
    return resolved.layout.stored_sizes(resolved.spec, num_ranks)


def open_store(
    resolved: Resolved, kv_disk: str, model: str, root: bytes, computes_with: str
) -> OpenStore:
    """Open the store of an engine. root: a name that stands for the model, the format of its K/V
    and the key of names. computes_with: version and kernels, which decide the bits. ConfigError if
    the folder cannot be used."""
    settings = resolved.settings
    num_ranks = settings.tensor_parallel_size
    block_bytes = _sizes(resolved).block_bytes
    identity = hashlib.blake2b(root, digest_size=32, person=b"quire store")
    identity.update(repr((block_bytes, num_ranks, computes_with)).encode())
    header = StoreHeader(
        identity=identity.hexdigest(),
        model=model,
        block_bytes=block_bytes,
        slot_bytes=-(-block_bytes // DISK_BLOCK) * DISK_BLOCK,
        max_bytes=settings.kv_disk_bytes,
        num_ranks=num_ranks,
    )
    return KVFolder(Path(kv_disk).expanduser()).open(header)


def pin_again(core: EngineCore, scheduler: Scheduler, pins: Sequence[KeptPin]) -> None:
    """Pin the prefixes of an engine before this one, before the first request of a client. Their
    K/V come from the disk; what is lost is computed. One that cannot be pinned is a warning."""
    state, guarded = scheduler.state, list[bytes]()
    for pin in pins:  # all of them, before the blocks of one evict those of another
        names = state.prefixes.name_prompt(pin.salt, pin.token_ids, NO_EXTRAS)[1]
        guarded += state.kv.names_to_guard(names, len(pin.token_ids))
    state.kv.sources.guard(guarded)
    for pin in pins:
        key = prefix_key(pin.token_ids, pin.salt, is_shared=False)
        seconds = math.inf if pin.expires_s is None else max(pin.expires_s - time.time(), 1e-3)
        request = EngineRequest(
            request_id=pin.name,
            first_handle=FIRST_HANDLE + int(key, 16) % NUM_HANDLES,  # the same in all replicas
            prompt_token_ids=pin.token_ids,
            params=PIN_PARAMS,
            seed=0,
            arrival_time=time.monotonic(),
            salt=pin.salt,
            scheduling=SchedulingParams(tenant=pin.tenant),
            pin_seconds=seconds,
        )
        try:
            core.add(request)
        except RequestError as error:
            logger.warning("the prefix %s is not pinned again: %s", pin.name, error)
    while core.has_unfinished:
        for finish in core.step(time.monotonic()).finished:
            if finish.reason is FinishReason.ERROR:
                logger.warning("a prefix is not pinned again: %s", finish.message)
    state.kv.sources.unguard(guarded)


class StoreNews:
    """Looks into a store that another process writes, in a thread. A call returns at once: the
    blocks that are there now, if a look has found the store written, and None otherwise. While a
    look hangs, there is no other one, and nobody waits for it."""

    def __init__(self, files: StoreFiles, header: StoreHeader) -> None:
        """header: header as it was opened. Slots beyond it are not seen."""
        self._files = files
        self._header = header
        self._written_ns = -1
        self._next_look = time.monotonic() + LOOK_SECONDS
        self._looking = Background("quire-disk-news", self._look)
        self._found: SlotTree | None = None

    def __call__(self) -> SlotTree | None:
        if self._looking.is_busy:
            return None
        found, self._found = self._found, None
        if found is None and time.monotonic() >= self._next_look:
            self._looking.ask()
        return found

    def _look(self) -> None:
        started = time.monotonic()
        try:
            written_ns = self._files.written_ns
            if written_ns != self._written_ns:
                records = self._files.read_records(self._header)
                self._found = SlotTree(self._header.num_slots, records)
                self._written_ns = written_ns
        except OSError:
            self._found = None  # the next look may find it again
        finally:
            took = time.monotonic() - started
            self._next_look = started + max(LOOK_SECONDS, took / SHARE_OF_LOOKS)
