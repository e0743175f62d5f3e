"""Images of Idefics 3 and SmolVLM: tiles and their tokens (`quire.config.media.idefics3`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.base.errors import RequestError
from quire.config.media.idefics3 import TEXTS, IdeficsSpec
from quire.protocol.media import ImageTiles
from quire.text.rendering.media.door import PreparedImage, TokenRun
from quire.text.rendering.tokenizer import Tokenizer

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["IdeficsPreparer", "make_tiles"]

GRIDS_KEPT = 256


class IdeficsPreparer:
    """`ImagePreparer`. Each tile is a run of tokens, with texts that say its row and column."""

    def __init__(self, spec: IdeficsSpec, tokenizer: Tokenizer) -> None:
        self._spec = spec
        self._expand = functools.lru_cache(GRIDS_KEPT)(functools.partial(_expand, tokenizer))

    def __call__(self, image: Image.Image, *, is_low: bool) -> PreparedImage:
        spec, splits = self._spec, not is_low
        tiles = make_tiles(spec, image, splits=splits)
        token_ids = self._expand(*spec.grid(*image.size, splits=splits))
        runs = (TokenRun(spec.tokens_per_tile),) * tiles.num_tiles
        return PreparedImage(tiles, token_ids, runs)

    def runs_of(self, grid: tuple[int, ...] | None) -> tuple[Sequence[int], tuple[TokenRun, ...]]:
        """The rows are those of one tile with the whole image. grid: none is taken."""
        if grid is not None:
            raise RequestError("image_grid_thw is given, and this model has no grid: leave it out")
        return self._expand(1, 1), (TokenRun(self._spec.tokens_per_tile),)


def make_tiles(spec: IdeficsSpec, image: Image.Image, *, splits: bool) -> ImageTiles:
    """Resize and cut an RGB image: row by row, and the whole image at the end. splits: False for
    the whole image alone.

    The pixels equal those of `transformers`' PIL classes, which resize in whole levels: to the
    longest edge, to multiples of a tile, and from there to one tile.
    """
    from PIL import Image

    size = spec.tower.tile_size
    rows, columns = spec.grid(*image.size, splits=splits)
    resample = Image.Resampling(spec.levels.resample)
    image = image.resize(spec.resized(*image.size), resample)
    image = image.resize((columns * size, rows * size), resample)
    tiles: list[Image.Image] = []
    if rows * columns > 1:
        corners = ((x * size, y * size) for y in range(rows) for x in range(columns))
        tiles += (image.crop((x, y, x + size, y + size)) for x, y in corners)
        image = image.resize((size, size), resample)
    tiles.append(image)
    return ImageTiles(b"".join(tile.tobytes() for tile in tiles), len(tiles), size, size)


def _expand(tokenizer: Tokenizer, rows: int, columns: int) -> list[int]:
    """Return the token ids of an image of so many tiles, with one image token for each tile and the
    whole image."""
    image, edge = TEXTS["image"], TEXTS["edge"]
    lines: list[str] = []
    if rows * columns > 1:
        for row in range(1, rows + 1):
            names = (TEXTS["tile"].format(row, column) for column in range(1, columns + 1))
            lines.append("".join(f"{edge}{name}{image}" for name in names) + "\n")
        lines.append("\n")
    lines.append(f"{edge}{TEXTS['whole']}{image}{edge}")
    return tokenizer.encode("".join(lines), add_special_tokens=False)
