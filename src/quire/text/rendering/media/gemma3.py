"""Images of Gemma 3: resized to squares, with line ends around (`quire.config.media.gemma3`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.base.errors import RequestError
from quire.config.media.gemma3 import Gemma3ImageSpec
from quire.protocol.media import ImageTiles
from quire.text.rendering.media.door import PreparedImage, TokenRun
from quire.text.rendering.tokenizer import Tokenizer

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["Gemma3Preparer"]

LEAD, CROPS = "Here is the original image ", " and here are some crops to help you see better "
"""Texts before an image that has crops, and before these."""


class Gemma3Preparer:
    """`ImagePreparer`. A square is one tile, and one run of tokens between two others. An image is
    one square, or that of the whole and those of its crops, with texts between."""

    def __init__(self, spec: Gemma3ImageSpec, tokenizer: Tokenizer) -> None:
        self._spec, self._tokenizer = spec, tokenizer

    def __call__(self, image: Image.Image, *, is_low: bool) -> PreparedImage:
        """Pixels and texts equal those of `transformers`' PIL classes. is_low: without crops."""
        from PIL import Image

        spec, side = self._spec, self._spec.tower.tile_size
        parts = [image]
        if spec.crops is not None and not is_low:
            parts += (image.crop(box) for box in spec.crops.boxes(*image.size))
        resample = Image.Resampling(spec.levels.resample)
        pixels = b"".join(part.resize((side, side), resample).tobytes() for part in parts)
        tiles = ImageTiles(pixels, len(parts), side, side)
        token_ids, (run,) = self.runs_of(None)
        if len(parts) == 1:
            return PreparedImage(tiles, token_ids, (run,))
        for behind in (CROPS, *[" "] * (len(parts) - 2)):
            token_ids = [*token_ids, *self._between(behind), *self.runs_of(None)[0]]
        return PreparedImage(tiles, token_ids, (run,) * len(parts), LEAD)

    def _between(self, text: str) -> list[int]:
        """Return the tokens of a text between two squares, with the line ends around these."""
        ends = "\n" * self._spec.line_ends
        return self._tokenizer.encode(f"{ends}{text}{ends}", add_special_tokens=False)

    def runs_of(self, grid: tuple[int, ...] | None) -> tuple[Sequence[int], tuple[TokenRun, ...]]:
        """See `ImagePreparer`. The rows are those of the whole image alone, which has one grid, so
        none may be given."""
        if grid is not None:
            raise RequestError("image_grid_thw is given, and this model has no grid: leave it out")
        spec = self._spec
        return (spec.begin_id, spec.token_id, spec.end_id), (TokenRun(spec.whole_tokens),)
