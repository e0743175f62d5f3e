"""Images of Qwen2.5-VL, Qwen3-VL and Qwen3.5: resized, and the places of their tokens
(`quire.config.media.qwen_vl`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire.config.media.qwen_vl import QwenSpec
from quire.protocol.media import ImageTiles
from quire.rendering.media.door import PreparedImage, TokenRun
from quire.rendering.tokenizer import Tokenizer

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
        positions = np.indices((1, *spec.grid(width, height))).reshape(-1).astype(np.int32)
        run = TokenRun(spec.num_rows(1, width, height), positions)
        tiles = ImageTiles(resized.tobytes(), 1, width, height)
        return PreparedImage(tiles, (spec.token_id,), (run,))
