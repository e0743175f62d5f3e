"""Encoded images: made beside steps, and kept for later requests with the same image."""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict

import torch

from quire.config.media.idefics3 import ImageSpec
from quire.errors import RequestError
from quire.models.siglip import SiglipTower
from quire.protocol.media import ImageTiles

__all__ = ["ImageEncoder"]


class ImageEncoder:
    """Rows of images by the digests of their tiles. Any thread may call it, also while a step
    computes; images are encoded one after the other, and tile by tile.

    num_encoded: images so far that were not kept from before.
    """

    def __init__(
        self, tower: SiglipTower, spec: ImageSpec, device: torch.device, cache_bytes: int
    ) -> None:
        """device: device of the tower. cache_bytes: most bytes of rows that are kept; the least
        recently used ones go first, and stay alive while a request has them."""
        self.num_encoded = 0
        self._tower, self._spec, self._device = tower, spec, device
        self._cache_bytes = cache_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def encode(self, tiles: ImageTiles, dtype: torch.dtype) -> tuple[torch.Tensor, bytes]:
        """Return rows [N · tokens_per_tile, E] on the host, and the digest. RequestError for tiles
        of another size than the model's, or rows that are not finite."""
        shape = (tiles.num_tiles, tiles.tile_size, tiles.tile_size, 3)
        size = self._spec.tower.tile_size
        if tiles.tile_size != size or not tiles.num_tiles or tiles.num_bytes != math.prod(shape):
            raise RequestError(
                f"an image of {tiles.num_tiles} tiles of {tiles.tile_size} pixels has "
                f"{tiles.num_bytes} bytes: this model takes tiles of {size} pixels"
            )
        digest = hashlib.blake2b(tiles.pixels, digest_size=32, person=b"quire image").digest()
        with self._lock:
            rows = self._kept.get(digest)
            if rows is None:
                pixels = torch.frombuffer(bytearray(tiles.pixels), dtype=torch.uint8)
                rows = self._encode(pixels.view(shape), dtype)
                self._keep(digest, rows)
            else:
                self._kept.move_to_end(digest)
        return rows, digest

    @torch.inference_mode()
    def _encode(self, tiles: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        self.num_encoded += 1
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
