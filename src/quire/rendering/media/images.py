"""Images of prompts: decoded, cut into tiles, and put in the place of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from quire.config.media.image_spec import ImageSpec
from quire.errors import RequestError
from quire.rendering.media.decode import decode_image, plain_image
from quire.rendering.media.door import ImagePart, ImagePreparer, PreparedImage, Run
from quire.rendering.media.sources import ImageSource, MediaAccess
from quire.rendering.tokenizer import Tokenizer

__all__ = ["ImageRenderer", "NamedImage"]


@dataclass(frozen=True, slots=True)
class NamedImage:
    """A prepared image, and its path in the request."""

    image: PreparedImage
    place: str


class ImageRenderer:
    """Prepares images for one model; safe to share between threads."""

    def __init__(
        self, spec: ImageSpec, tokenizer: Tokenizer, access: MediaAccess, max_images: int
    ) -> None:
        """max_images: most images of one prompt."""
        self.access = access
        self._spec = spec
        self._max_images = max_images
        module, _, name = spec.preparer.partition(":")
        self._prepare: ImagePreparer = getattr(import_module(module), name)(spec, tokenizer)

    def check_number(self, num_images: int) -> None:
        """Raise RequestError for more images than a prompt may have."""
        if num_images > self._max_images:
            raise RequestError(
                f"the prompt has {num_images} images, but at most {self._max_images} are taken "
                "(limit_mm_per_prompt): send fewer"
            )

    def prepare(self, source: ImageSource) -> NamedImage:
        """Read, decode and cut an image. Raises RequestError with its place in the request."""
        access, value = self.access, self.access.read(source)
        if isinstance(value, bytes):
            image = decode_image(value, source.place, access.max_bytes, access.max_pixels)
        else:
            image = plain_image(value, source.place, access.max_pixels)
        try:
            return NamedImage(self._prepare(image, is_low=source.detail == "low"), source.place)
        except RequestError as error:
            raise RequestError(f"{source.place}: {error}") from error

    def place(
        self, token_ids: Sequence[int], images: Sequence[NamedImage]
    ) -> tuple[list[int], tuple[ImagePart, ...]]:
        """Return the token ids with each image in place of an image token, in order, and the
        images with their places. RequestError unless there are as many tokens as images."""
        image_id = self._spec.token_id
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
            named = images[len(parts)]
            runs = self._append(found, named.image)
            parts.append(ImagePart(named.image.tiles, named.place, runs))
        return found, tuple(parts)

    def _append(self, found: list[int], image: PreparedImage) -> tuple[Run, ...]:
        """Append the token ids of an image, and return where its runs are."""
        image_id, left, first_row = self._spec.token_id, iter(image.runs), 0
        runs: list[Run] = []
        for each in image.token_ids:
            if each != image_id:
                found.append(each)
                continue
            run = next(left)
            runs.append(Run(len(found), run, first_row))
            first_row += run.length
            found += [image_id] * run.length
        return tuple(runs)
