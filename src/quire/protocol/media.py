"""Parts of a prompt that come as embeddings or images and not as token ids.

Their bytes go from the front to the worker under a handle (`Executor.put_media`), never through the
scheduler, which knows where they stand and what they hash to. Prompt embeddings are media too:
their encoder is the identity.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from quire.base.errors import RequestError
from quire.protocol.step import MediaSpan

__all__ = ["ImageData", "ImageRows", "ImageTiles", "Media", "MediaInfo", "check_media"]


@dataclass(frozen=True, slots=True)
class Media:
    """digest: hash of the content, from `MediaInfo`; equal media share cached blocks. Only the
    client that owns the handle may name it."""

    digest: bytes
    span: MediaSpan


@dataclass(frozen=True, slots=True)
class MediaInfo:
    """A worker's answer to media that it was given. num_tokens: places of a prompt that they take.
    was_kept: an image that the worker had encoded before. num_kept_bytes: bytes of all encoded
    images that it keeps by now."""

    num_tokens: int
    digest: bytes
    was_kept: bool = False
    num_kept_bytes: int = 0


class ImageTiles(msgspec.Struct, frozen=True, array_like=True, tag="tiles"):
    """An image, resized and cut for an encoder.

    pixels: uint8 [num_tiles, height, width, 3], as red, green and blue.
    """

    pixels: bytes
    num_tiles: int
    width: int
    height: int

    @property
    def num_bytes(self) -> int:
        return len(self.pixels)


class ImageRows(msgspec.Struct, frozen=True, array_like=True, tag="rows"):
    """An image as its client's own encoder made it. data: file with a tensor of `num_rows` rows, as
    bytes of `torch.save` or safetensors."""

    data: bytes
    num_rows: int

    @property
    def num_bytes(self) -> int:
        return len(self.data)


ImageData = ImageTiles | ImageRows


def check_media(media: tuple[Media, ...], num_prompt_tokens: int) -> None:
    """RequestError unless the spans stand within the prompt, in order and apart."""
    end = 0
    for span in (each.span for each in media):
        if span.length < 1 or span.position < end or span.end > num_prompt_tokens:
            raise RequestError(
                f"media take the tokens {span.position} to {span.end - 1} of a prompt of "
                f"{num_prompt_tokens}, and those before end at {end}: give spans in order, apart "
                "and within the prompt"
            )
        if len(span.positions) not in (0, 3 * span.length):
            raise RequestError(
                f"media of {span.length} tokens have {len(span.positions)} positions: give none, "
                f"or {3 * span.length}"
            )
        known = range(span.length)
        if any(position not in known for position in span.positions.tolist()):
            raise RequestError(
                f"media of {span.length} tokens have positions from {span.positions.min()} to "
                f"{span.positions.max()}: give some from 0 to {span.length - 1}"
            )
        end = span.end
