"""Media of a receipt, made again from files, since the receipt itself has only digests of them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import msgspec

from quire.base.errors import RequestError
from quire.engine.build import Engine
from quire.protocol.media import Media, check_media
from quire.protocol.receipts import Receipt
from quire.text.rendering.media.door import EmbedsPart, ImagePart, MediaPart
from quire.text.rendering.media.images import ImageRenderer
from quire.text.rendering.media.sources import ImageSource

__all__ = ["GivenMedia", "is_tensor", "put_media", "stated_media"]


class GivenMedia(NamedTuple):
    """A file as it was sent. name: its name, for people. data: its contents."""

    name: str
    data: bytes


class StatedRun(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a prompt that show one image; see `MediaSpan`. digest: in hexadecimal."""

    digest: str
    position: int
    length: int
    first_row: int


def stated_media(receipt: Receipt) -> list[list[StatedRun]]:
    """Return the runs of each image of a receipt, in order. A prompt of embeddings has one run.
    RequestError if it states none that can be read."""
    try:
        runs = msgspec.convert(receipt.statement.text.get("media") or [], list[StatedRun])
    except msgspec.ValidationError as error:
        raise RequestError(f"text.media of the receipt cannot be read: {error}") from error
    starts = [at for at, run in enumerate(runs) if run.first_row == 0]
    return [runs[at:end] for at, end in pairwise([*starts, len(runs)])]


def is_tensor(data: bytes) -> bool:
    """Return whether a file has a tensor, of torch.save or safetensors, and no image."""
    header_bytes = int.from_bytes(data[:8], "little")  # the ninth byte of a GIF may be anything
    return data[:2] == b"PK" or (data[8:9] == b"{" and header_bytes <= len(data) - 8)


@contextmanager
def put_media(
    engine: Engine, receipt: Receipt, given: Sequence[GivenMedia], first_handle: int
) -> Generator[tuple[Media, ...]]:
    """Give an engine the media of a receipt, from files in their order, and take them back at the
    end. Returns the media with the places that the receipt states. Raises RequestError for another
    number of files, and for a file that cannot be what the receipt states."""
    stated = stated_media(receipt)
    if len(stated) != len(given):
        raise RequestError(
            f"the prompt has {len(stated)} images or embeddings, of which a receipt keeps digests "
            f"alone, and {len(given)} files of them are given. Give each as it was sent, in their "
            "order (--media)."
        )
    num_prompt = len(receipt.evidence.prompt_token_ids)
    parts = [_part(engine, one, file, num_prompt) for one, file in zip(stated, given, strict=True)]
    handles = range(first_handle, first_handle + len(parts))
    client, media = engine.client, list[Media]()
    try:
        for handle, part in zip(handles, parts, strict=True):
            media += part.placed(client.put_media(handle, part.data), handle).media
        check_media(tuple(media), num_prompt)
        yield tuple(media)
    finally:
        client.drop_media(handles)


def _part(
    engine: Engine, stated: Sequence[StatedRun], file: GivenMedia, num_prompt: int
) -> MediaPart:
    images = engine.renderer.images
    if is_tensor(file.data):
        if [run.length for run in stated] != [num_prompt]:
            raise RequestError(
                f"{file.name} has a tensor, but the receipt states an image within the prompt: "
                "give the image. Images that came as rows of an encoder cannot be replayed."
            )
        return EmbedsPart(file.data, file.name)
    if images is None:
        raise RequestError(f"{file.name} is an image, and this model takes none")
    return _image(images, stated, file)


def _image(images: ImageRenderer, stated: Sequence[StatedRun], file: GivenMedia) -> ImagePart:
    """Prepare an image with the detail that gives it the stated number of tokens."""
    wanted, found = [run.length for run in stated], list[int]()
    for detail in (None, "low"):
        named = images.prepare(ImageSource(file.name, file.data, detail))
        found = [run.length for run in named.image.runs]
        if found == wanted:
            return images.part_at(named, [run.position for run in stated])
    raise RequestError(
        f"{file.name} takes {sum(found)} tokens in {len(found)} runs, but the image of the receipt "
        f"takes {sum(wanted)} in {len(wanted)}: give the one that was sent"
    )
