"""Images of Qwen2.5-VL, Qwen3-VL and Qwen3.5: resized, and the places of their tokens
(`quire.config.media.qwen_vl`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.base.errors import RequestError
from quire.config.media.qwen_vl import QwenSpec
from quire.protocol.media import ImageTiles
from quire.text.rendering.media.door import PreparedImage, TokenRun
from quire.text.rendering.tokenizer import Tokenizer

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["QwenPreparer"]


class QwenPreparer:
    """`ImagePreparer`. An image is one tile, and one run of tokens, row by row. The template writes
    the tokens around it."""

    def __init__(self, spec: QwenSpec, tokenizer: Tokenizer) -> None:
        del tokenizer  # no text comes with an image
        self._spec = spec

    def __call__(self, image: Image.Image, *, is_low: bool) -> PreparedImage:
        """The pixels equal those of `transformers`' PIL class, which resizes in whole levels. A
        token has its row and its column as positions on the second and third axis, and 0 on the
        first. RequestError as of `QwenSpec.resized`."""
        from PIL import Image

        spec = self._spec
        width, height = spec.resized(*image.size, is_low=is_low)
        resized = image.resize((width, height), Image.Resampling(spec.levels.resample))
        tiles = ImageTiles(resized.tobytes(), 1, width, height)
        return PreparedImage(tiles, (spec.token_id,), (self._run(*spec.grid(width, height)),))

    def runs_of(self, grid: tuple[int, ...] | None) -> tuple[Sequence[int], tuple[TokenRun, ...]]:
        """grid: see `ImagePreparer`; `image_grid_thw` of `transformers`."""
        merge = self._spec.tower.merge
        if grid is None:
            raise RequestError("image_grid_thw is missing: send [1, rows, columns] of patches")
        frames, *sides = grid
        if frames != 1 or len(sides) != 2 or any(side < 1 or side % merge for side in sides):
            raise RequestError(
                f"image_grid_thw is {list(grid)}: send 1, and rows and columns of patches that are "
                f"multiples of {merge}"
            )
        return (self._spec.token_id,), (self._run(*(side // merge for side in sides)),)

    def _run(self, rows: int, columns: int) -> TokenRun:
        positions = np.indices((1, rows, columns)).reshape(-1).astype(np.int32)
        return TokenRun(rows * columns, positions)
