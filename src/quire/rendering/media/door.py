"""The way of media into a prompt: parts go in; token ids, spans and a handle come out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from quire.errors import EngineError
from quire.protocol.media import ImageTiles, Media, MediaInfo
from quire.protocol.step import MediaSpan

__all__ = ["EmbedsPart", "ImagePart", "MediaPart", "PlacedMedia", "Run"]


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
class Run:
    """`length` tokens from `position` on that show the same image, from its row `first_row` on."""

    position: int
    length: int
    first_row: int


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image, which shows in one run of tokens or more."""

    data: ImageTiles
    place: str
    runs: tuple[Run, ...]

    def placed(self, info: MediaInfo, handle: int) -> PlacedMedia:
        """Raises EngineError if the worker made another number of rows than there are places."""
        num_places = sum(run.length for run in self.runs)
        if info.num_tokens != num_places:
            raise EngineError(
                f"{self.place}: an image of {num_places} tokens has {info.num_tokens} rows; this "
                "is a bug"
            )
        return PlacedMedia(
            tuple(
                Media(
                    info.digest,
                    MediaSpan(run.position, run.length, handle, first_row=run.first_row),
                )
                for run in self.runs
            )
        )
