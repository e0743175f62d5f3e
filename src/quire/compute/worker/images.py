"""Encoded images: made beside steps, and kept for later requests with the same image."""

from __future__ import annotations

import hashlib
import struct
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from quire.base.errors import RequestError
from quire.base.platform.priority import give_way
from quire.compute.models.towers import ImageTower
from quire.compute.worker.turns import Turns
from quire.config.media.image_spec import ImageSpec
from quire.ops.native.team import torch_threads
from quire.protocol.media import ImageTiles

__all__ = ["EncodedImage", "ImageEncoder"]


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """rows: float [T, E] on the host. digest: hash of the tiles. was_kept, num_kept_bytes: see
    `MediaInfo`."""

    rows: torch.Tensor
    digest: bytes
    was_kept: bool
    num_kept_bytes: int


class ImageEncoder:
    """Rows of images by the digests of their tiles. Any thread may call it, also while a step
    computes; images are encoded one after the other, and tile by tile, in a thread that gives way
    to steps.

    num_encoded: images so far that were not kept from before.
    """

    def __init__(
        self,
        tower: ImageTower,
        spec: ImageSpec,
        device: torch.device,
        cache_bytes: int,
        num_threads: int,
        turns: Turns,
    ) -> None:
        """device: device of the tower. cache_bytes: most bytes of rows that are kept; the least
        recently used ones go first, and stay alive while a request has them. num_threads: threads
        of torch, which computes attention between kernels. turns: taken with the steps."""
        self.num_encoded = 0
        self._turns = turns
        self._num_threads = num_threads
        self._tower, self._spec, self._device = tower, spec, device
        self._cache_bytes = cache_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "quire-encoder", initializer=give_way)

    def encode(self, tiles: ImageTiles, dtype: torch.dtype) -> EncodedImage:
        """Return the rows of an image, encoded or from before. RequestError for tiles of another
        size than the model's, or rows that are not finite."""
        count, width, height = tiles.num_tiles, tiles.width, tiles.height
        num_rows = self._spec.num_rows(count, width, height) if count > 0 else 0
        if not num_rows or tiles.num_bytes != 3 * count * width * height:
            raise RequestError(
                f"an image of {count} tiles of {width} x {height} pixels has {tiles.num_bytes} "
                "bytes: this model does not take such tiles"
            )
        shape = struct.pack("<III", count, width, height)
        digest = hashlib.blake2b(shape, digest_size=32, person=b"quire image")
        digest.update(tiles.pixels)
        name = digest.digest()
        with self._lock:
            rows = self._kept.get(name)
            was_kept = rows is not None
            if rows is None:
                pixels = torch.frombuffer(bytearray(tiles.pixels), dtype=torch.uint8)
                tensor = pixels.view(count, height, width, 3)
                rows = self._thread.submit(self._encode, tensor, dtype).result()
                self._keep(name, rows)
            else:
                self._kept.move_to_end(name)
            return EncodedImage(rows, name, was_kept, self._num_bytes)

    @torch.inference_mode()
    def _encode(self, tiles: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        self.num_encoded += 1
        with self._turns.encoding(), torch_threads(self._num_threads):  # steps have theirs
            encoded = [self._tower.encode(tile.to(self._device), dtype) for tile in tiles.split(1)]
            rows = torch.cat(encoded).cpu()
        if not torch.isfinite(rows).all():
            raise RequestError("the image has rows that are not finite: leave it out")
        return rows

    def _keep(self, digest: bytes, rows: torch.Tensor) -> None:
        if rows.nbytes > self._cache_bytes:
            return
        self._kept[digest] = rows
        self._num_bytes += rows.nbytes
        while self._num_bytes > self._cache_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.nbytes
