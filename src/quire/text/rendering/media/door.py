"""The way of media into a prompt: parts go in; token ids, spans and a handle come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from quire.base.errors import EngineError
from quire.protocol.media import ImageData, Media, MediaInfo
from quire.protocol.step import IntArray, MediaSpan, no_ints

if TYPE_CHECKING:
    from PIL import Image

__all__ = [
    "EmbedsPart",
    "ImagePart",
    "ImagePreparer",
    "MediaPart",
    "PlacedMedia",
    "PreparedImage",
    "Run",
    "TokenRun",
]


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """Media of a prompt that the engine has. token_ids: ids of the whole prompt, if the number of
    tokens came from the engine; else None."""

    media: tuple[Media, ...]
    token_ids: list[int] | None = None


class MediaPart(Protocol):
    """A part of a prompt that the engine has to be given before the prompt."""

    @property
    def data(self) -> object:
        """Argument of `put_media`."""
        ...

    @property
    def place(self) -> str:
        """Path of the part in the request."""
        ...

    def placed(self, info: MediaInfo, handle: int) -> PlacedMedia:
        """Return the part as media, when the engine has it under `handle`."""
        ...


@dataclass(frozen=True, slots=True)
class EmbedsPart:
    """Embeddings of a prompt from end to end."""

    data: object
    place: str = "prompt_embeds"

    def placed(self, info: MediaInfo, handle: int) -> PlacedMedia:
        media = Media(info.digest, MediaSpan(0, info.num_tokens, handle))
        return PlacedMedia((media,), [0] * info.num_tokens)


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens of an image without text between them. positions: see `MediaSpan`."""

    length: int
    positions: IntArray = field(default_factory=no_ints)


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image as the engine takes it. token_ids: ids with one image token for each of `runs`.
    lead: text before these, whose tokens depend on the text before it."""

    data: ImageData
    token_ids: Sequence[int]
    runs: tuple[TokenRun, ...]
    lead: str = ""


class ImagePreparer(Protocol):
    """Prepares images of a family; safe to share between threads. It is made from its `ImageSpec`
    and the tokenizer (`ImageSpec.preparer`)."""

    def __call__(self, image: Image.Image, *, is_low: bool) -> PreparedImage:
        """Resize and cut an RGB image. is_low: for few tokens, where the family knows a way. Raises
        RequestError for an image that the family does not take."""
        ...

    def runs_of(self, grid: tuple[int, ...] | None) -> tuple[Sequence[int], tuple[TokenRun, ...]]:
        """Return token ids and runs of an image that comes as rows of the encoder. grid: frames,
        and rows and columns of patches, in the families that need it. Raises RequestError for a
        grid that the family does not take."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens from `position` on that show the same image, from its row `first_row` on."""

    position: int
    tokens: TokenRun
    first_row: int


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image, which shows in one run of tokens or more. is_whole: see `MediaSpan`."""

    data: ImageData
    place: str
    runs: tuple[Run, ...]
    is_whole: bool = False

    @property
    def num_rows(self) -> int:
        """Number of the image's tokens."""
        return sum(run.tokens.length for run in self.runs)

    def placed(self, info: MediaInfo, handle: int) -> PlacedMedia:
        """Raises EngineError if the worker made another number of rows than there are places."""
        if info.num_tokens != self.num_rows:
            raise EngineError(
                f"{self.place}: an image of {self.num_rows} tokens has {info.num_tokens} rows; "
                "this is a bug"
            )
        return PlacedMedia(
            tuple(
                Media(
                    info.digest,
                    MediaSpan(
                        run.position,
                        run.tokens.length,
                        handle,
                        run.tokens.positions,
                        run.first_row,
                        self.is_whole,
                    ),
                )
                for run in self.runs
            )
        )
