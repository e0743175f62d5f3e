"""Images of Gemma 3: resized to a square, with line ends around (`quire.config.media.gemma3`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.config.media.gemma3 import Gemma3ImageSpec
from quire.errors import RequestError
from quire.protocol.media import ImageTiles
from quire.rendering.media.door import PreparedImage, TokenRun
from quire.rendering.tokenizer import Tokenizer

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["Gemma3Preparer"]


class Gemma3Preparer:
    """`ImagePreparer`. An image is one tile, and one run of tokens between two others."""

    def __init__(self, spec: Gemma3ImageSpec, tokenizer: Tokenizer) -> None:
        del tokenizer  # the text around an image is line ends alone
        self._spec = spec

    def __call__(self, image: Image.Image, *, is_low: bool) -> PreparedImage:
        """The pixels equal those of `transformers`' PIL class. All images have as many tokens, so
        `is_low` changes nothing."""
        from PIL import Image

        del is_low
        spec, side = self._spec, self._spec.tower.tile_size
        resized = image.resize((side, side), Image.Resampling(spec.levels.resample))
        tiles = ImageTiles(resized.tobytes(), 1, side, side)
        token_ids, runs = self.runs_of(None)
        return PreparedImage(tiles, token_ids, runs)

    def runs_of(self, grid: tuple[int, ...] | None) -> tuple[Sequence[int], tuple[TokenRun, ...]]:
        """See `ImagePreparer`. All images have one grid, so none may be given."""
        if grid is not None:
            raise RequestError("image_grid_thw is given, and this model has no grid: leave it out")
        spec = self._spec
        return (spec.begin_id, spec.token_id, spec.end_id), (TokenRun(spec.whole_tokens),)
