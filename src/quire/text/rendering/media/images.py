"""Images of prompts: decoded, cut into tiles, and put in the place of their tokens."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module

from quire.base.errors import RequestError, quoted
from quire.config.media.image_spec import ImageSpec
from quire.protocol.media import ImageRows
from quire.text.rendering.media.decode import decode_image, plain_image
from quire.text.rendering.media.door import (
    ImagePart,
    ImagePreparer,
    MediaPart,
    PreparedImage,
    Run,
)
from quire.text.rendering.media.sources import ImageSource, MediaAccess, RowsSource, is_remote
from quire.text.rendering.tokenizer import Tokenizer

__all__ = ["ImageBounds", "ImageRenderer", "NamedImage"]


FETCH_THREADS = 4
"""Most images of a prompt that are fetched at once."""

NAMED_BYTES = 1 << 28
"""Most bytes of the images that a program has named, in files or in pixels."""

MOST_PATCHES = 16
"""Patches of a token that a grid may claim."""

MOST_LINE_ENDS = 64
"""Most line ends that are looked for in one token."""


@dataclass(frozen=True, slots=True)
class ImageBounds:
    """max_images: most images of one prompt. max_open_bytes: memory for images of open requests.
    row_bytes: bytes of what the engine keeps for a token of an image. takes_rows: images may come
    as rows of the encoder (`enable_mm_embeds`)."""

    max_images: int
    max_open_bytes: int
    row_bytes: int
    takes_rows: bool = False


@dataclass(frozen=True, slots=True)
class NamedImage:
    """A prepared image, and its path in the request."""

    image: PreparedImage
    place: str


class ImagesByName:
    """Images of a program by the names that it gave them. Those that were used least recently go
    first. Safe to share between threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._kept: OrderedDict[str, tuple[object, int]] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, name: str, value: object, num_bytes: int) -> None:
        """Keep what an image was read from, in place of what had the name before."""
        with self._lock:
            self._num_bytes -= self._kept.pop(name, (None, 0))[1]
            self._kept[name] = (value, num_bytes)
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                _, (_, freed) = self._kept.popitem(last=False)
                self._num_bytes -= freed

    def find(self, name: str, place: str) -> object:
        """Return what the image was read from. RequestError, which names the place, if it is gone
        or never was."""
        with self._lock:
            if name not in self._kept:
                raise RequestError(
                    f"{place} is {quoted(name)}, and no image of that name is kept: give the image "
                    "with its name again"
                )
            self._kept.move_to_end(name)
            return self._kept[name][0]


class ImageRenderer:
    """Prepares images for one model; safe to share between threads."""

    def __init__(
        self, spec: ImageSpec, tokenizer: Tokenizer, access: MediaAccess, bounds: ImageBounds
    ) -> None:
        self.access, self.bounds = access, bounds
        self._by_name: ImagesByName | None = None
        self._spec = spec
        self._tokenizer = tokenizer
        module, _, name = spec.preparer.partition(":")
        self._prepare: ImagePreparer = getattr(import_module(module), name)(spec, tokenizer)

    def keep_by_name(self) -> None:
        """Keep images by their names from now on, for a program that has this renderer alone."""
        self._by_name = ImagesByName(NAMED_BYTES)

    def check_number(self, num_images: int) -> None:
        """Raise RequestError for more images than a prompt may have."""
        most = self.bounds.max_images
        if num_images > most:
            raise RequestError(
                f"the prompt has {num_images} images, but at most {most} are taken "
                "(limit_mm_per_prompt): send fewer"
            )

    def num_bytes(self, parts: Sequence[MediaPart]) -> tuple[int, int]:
        """Bytes that the images of a prompt take until its request ends, and those of pixels among
        them, which the front keeps for the next core. The others are rows in the engine."""
        images = [part for part in parts if isinstance(part, ImagePart)]
        rows = sum(part.num_rows for part in images)
        num_pixels = sum(part.data.num_bytes for part in images)
        return num_pixels + rows * self.bounds.row_bytes, num_pixels

    def prepare_all(self, sources: Sequence[ImageSource]) -> list[NamedImage]:
        """Prepare images, of which those behind URLs are fetched side by side. RequestError as of
        `prepare`."""
        if sum(is_remote(source.value) for source in sources) < 2:
            return [self.prepare(source) for source in sources]
        threads = ThreadPoolExecutor(FETCH_THREADS, "quire-fetch")
        try:
            read = [
                threads.submit(self.access.read, source) if is_remote(source.value) else None
                for source in sources
            ]
            return [
                self.prepare(source if each is None else replace(source, value=each.result()))
                for source, each in zip(sources, read, strict=True)
            ]
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def prepare(self, source: ImageSource) -> NamedImage:
        """Read, decode and cut an image. Raises RequestError with its place in the request."""
        kept, place = self._by_name, source.place
        if kept is None or source.uuid is None:
            return self._prepared(source)[0]
        if source.value is None:
            return self._prepared(replace(source, value=kept.find(source.uuid, place)))[0]
        prepared, value, num_bytes = self._prepared(source)
        kept.put(source.uuid, value, num_bytes)
        return prepared

    def _prepared(self, source: ImageSource) -> tuple[NamedImage, object, int]:
        """Return an image, what it was read from, and the bytes of that. An image of Pillow, which
        the program may change later, was read from a copy."""
        if isinstance(source.value, RowsSource):
            rows = source.value
            return NamedImage(self._encoded(rows, source.place), source.place), rows, len(rows.data)
        access, value = self.access, self.access.read(source)
        if isinstance(value, bytes):
            num_bytes = len(value)
            image = decode_image(value, source.place, access.max_bytes, access.max_pixels)
        else:
            value = image = plain_image(value, source.place, access.max_pixels)
            num_bytes = image.width * image.height * len(image.getbands())
        try:
            prepared = self._prepare(image, is_low=source.detail == "low")
        except RequestError as error:
            raise RequestError(f"{source.place}: {error}") from error
        return NamedImage(prepared, source.place), value, num_bytes

    def part_at(self, named: NamedImage, positions: Sequence[int]) -> ImagePart:
        """Return an image of which the places in a prompt are known, one for each of its runs."""
        runs: list[Run] = []
        first_row = 0
        for position, tokens in zip(positions, named.image.runs, strict=True):
            runs.append(Run(position, tokens, first_row))
            first_row += tokens.length
        is_whole = self._spec.whole_tokens > 0
        return ImagePart(named.image.data, named.place, tuple(runs), is_whole)

    def _encoded(self, given: RowsSource, place: str) -> PreparedImage:
        """Return an image that comes as rows of the encoder; the engine reads them."""
        bounds = self.bounds
        if not bounds.takes_rows:
            raise RequestError(
                f"{place} is given, but this engine takes no encoded images: send the image, or "
                "start with enable_mm_embeds (--enable-mm-embeds)"
            )
        data, grid = given.read(place, bounds.max_open_bytes)
        # Numbers have 2 bytes at least, and the engine keeps at most 4 of each.
        most_rows = 2 * len(data) // bounds.row_bytes
        if grid is not None and math.prod(grid) > MOST_PATCHES * most_rows:
            raise RequestError(f"{place} has the grid {list(grid)}, but only {len(data)} bytes")
        try:
            token_ids, runs = self._prepare.runs_of(grid)
        except RequestError as error:
            raise RequestError(f"{place}: {error}") from error
        num_rows = sum(run.length for run in runs)
        return PreparedImage(ImageRows(data, num_rows), token_ids, runs)

    def place(
        self, token_ids: Sequence[int], images: Sequence[NamedImage]
    ) -> tuple[list[int], tuple[ImagePart, ...]]:
        """Return the token ids with each image in place of an image token, in order, and the
        images with their places. RequestError unless there are as many tokens as images."""
        place_id, is_whole = self._spec.place_id, self._spec.whole_tokens > 0
        num_places = sum(token_id == place_id for token_id in token_ids)
        if num_places != len(images):
            raise RequestError(
                f"the prompt has {num_places} places for images (token {place_id}) and "
                f"{len(images)} images: give one place for each image"
            )
        found: list[int] = []
        parts: list[ImagePart] = []
        is_behind = False  # an image with line ends, and nothing but line ends since
        for token_id in token_ids:
            if token_id != place_id:
                is_behind = is_behind and token_id in self._line_ends
                if is_behind:
                    self._append_line_ends(found, self._line_ends[token_id])
                else:
                    found.append(token_id)
                continue
            named = images[len(parts)]
            runs = self._append(found, named.image)
            is_behind = self._spec.line_ends > 0
            parts.append(ImagePart(named.image.data, named.place, runs, is_whole))
        return found, tuple(parts)

    @cached_property
    def _line_ends(self) -> Mapping[int, int]:
        """Numbers of line ends, by the token that stands for so many."""
        runs = ((count, self._encode_line_ends(count)) for count in range(1, MOST_LINE_ENDS + 1))
        return {ids[0]: count for count, ids in runs if len(ids) == 1}

    def _encode_line_ends(self, count: int) -> list[int]:
        return self._tokenizer.encode("\n" * count, add_special_tokens=False)

    def _append_line_ends(self, found: list[int], count: int) -> None:
        """Append line ends to tokens, as the tokenizer joins them with those at their end."""
        while found and found[-1] in self._line_ends:
            count += self._line_ends[found.pop()]
        found += self._encode_line_ends(count)

    def _append_text(self, found: list[int], text: str) -> None:
        """Append a text to tokens, as the tokenizer joins it with the text at their end. Tokens
        that it would have made otherwise stay."""
        tokenizer, start = self._tokenizer, len(found)
        while start and not tokenizer.is_added(found[start - 1]):
            start -= 1
        before = tokenizer.raw_decode(found[start:], skip_special_tokens=False)
        if self._encode_plain(before) == found[start:]:
            found[start:] = self._encode_plain(before + text)
        else:
            found += self._encode_plain(text)

    def _encode_plain(self, text: str) -> list[int]:
        """Return the tokens of a text, in which nothing is a control token."""
        tokenizer = self._tokenizer
        if tokenizer.control_tokens.spans(text):
            return tokenizer.control_tokens.encode(text, ())
        return tokenizer.encode(text, add_special_tokens=False)

    def _append(self, found: list[int], image: PreparedImage) -> tuple[Run, ...]:
        """Append the token ids of an image, with line ends around, and return where its runs
        are."""
        image_id, left, first_row = self._spec.token_id, iter(image.runs), 0
        if image.lead:
            self._append_text(found, image.lead + "\n" * self._spec.line_ends)
        elif self._spec.line_ends:
            self._append_line_ends(found, self._spec.line_ends)
        runs: list[Run] = []
        for each in image.token_ids:
            if each != image_id:
                found.append(each)
                continue
            run = next(left)
            runs.append(Run(len(found), run, first_row))
            first_row += run.length
            found += [image_id] * run.length
        if self._spec.line_ends:
            self._append_line_ends(found, self._spec.line_ends)
        return tuple(runs)
