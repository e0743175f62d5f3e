"""Images of prompts: decoded, cut into tiles, and put in the place of their tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from quire.config.media.idefics3 import ImageSpec
from quire.errors import RequestError
from quire.protocol.media import ImageTiles
from quire.rendering.media.decode import decode_image, plain_image
from quire.rendering.media.door import ImagePart, Run
from quire.rendering.media.idefics3 import expand, make_tiles
from quire.rendering.media.sources import ImageSource, MediaAccess
from quire.rendering.tokenizer import Tokenizer

__all__ = ["ImageRenderer", "PreparedImage"]

GRIDS_KEPT = 256


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image as the encoder takes it. token_ids: with one image token for each tile."""

    tiles: ImageTiles
    place: str
    token_ids: list[int]


class ImageRenderer:
    """Prepares images for one model; safe to share between threads."""

    def __init__(
        self, spec: ImageSpec, tokenizer: Tokenizer, access: MediaAccess, max_images: int
    ) -> None:
        """max_images: most images of one prompt."""
        self.access = access
        self._spec = spec
        self._max_images = max_images
        self._expand = functools.lru_cache(GRIDS_KEPT)(functools.partial(expand, tokenizer))

    def check_number(self, num_images: int) -> None:
        """Raise RequestError for more images than a prompt may have."""
        if num_images > self._max_images:
            raise RequestError(
                f"the prompt has {num_images} images, but at most {self._max_images} are taken "
                "(limit_mm_per_prompt): send fewer"
            )

    def prepare(self, source: ImageSource) -> PreparedImage:
        """Read, decode and cut an image. Raises RequestError with its place in the request."""
        access, value = self.access, self.access.read(source)
        if isinstance(value, bytes):
            image = decode_image(value, source.place, access.max_bytes, access.max_pixels)
        else:
            image = plain_image(value, source.place, access.max_pixels)
        splits = source.detail != "low"
        tiles = make_tiles(self._spec, image, splits=splits)
        rows, columns = self._spec.grid(*image.size, splits=splits)
        return PreparedImage(tiles, source.place, self._expand(rows, columns))

    def place(
        self, token_ids: Sequence[int], images: Sequence[PreparedImage]
    ) -> tuple[list[int], tuple[ImagePart, ...]]:
        """Return the token ids with each image in place of an image token, in order, and the
        images with their places. RequestError unless there are as many tokens as images."""
        image_id, per_tile = self._spec.token_id, self._spec.tower.tokens_per_tile
        num_places = sum(token_id == image_id for token_id in token_ids)
        if num_places != len(images):
            raise RequestError(
                f"the prompt has {num_places} places for images (token {image_id}) and "
                f"{len(images)} images: give one place for each image"
            )
        found: list[int] = []
        parts: list[ImagePart] = []
        for token_id in token_ids:
            if token_id != image_id:
                found.append(token_id)
                continue
            image = images[len(parts)]
            runs: list[Run] = []
            for each in image.token_ids:
                if each != image_id:
                    found.append(each)
                    continue
                runs.append(Run(len(found), per_tile, len(runs) * per_tile))
                found += [image_id] * per_tile
            parts.append(ImagePart(image.tiles, image.place, tuple(runs)))
        return found, tuple(parts)
