"""Images of Idefics 3 and SmolVLM: tiles and their tokens (`quire.config.media.idefics3`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.config.media.idefics3 import TEXTS, ImageSpec
from quire.protocol.media import ImageTiles
from quire.rendering.tokenizer import Tokenizer

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["expand", "make_tiles"]


def make_tiles(spec: ImageSpec, image: Image.Image, *, splits: bool) -> ImageTiles:
    """Resize and cut an RGB image: row by row, and the whole image at the end. splits: False for
    the whole image alone.

    The pixels equal those of `transformers`' PIL classes, which resize in whole levels: to the
    longest edge, to multiples of a tile, and from there to one tile.
    """
    from PIL import Image

    size = spec.tower.tile_size
    rows, columns = spec.grid(*image.size, splits=splits)
    resample = Image.Resampling(spec.resample)
    image = image.resize(spec.resized(*image.size), resample)
    image = image.resize((columns * size, rows * size), resample)
    tiles: list[Image.Image] = []
    if rows * columns > 1:
        corners = ((x * size, y * size) for y in range(rows) for x in range(columns))
        tiles += (image.crop((x, y, x + size, y + size)) for x, y in corners)
        image = image.resize((size, size), resample)
    tiles.append(image)
    return ImageTiles(b"".join(tile.tobytes() for tile in tiles), len(tiles), size)


def expand(tokenizer: Tokenizer, rows: int, columns: int) -> list[int]:
    """Return the token ids of an image of so many tiles, with one image token for each tile and the
    whole image. Each stands for the `tokens_per_tile` of the model."""
    image, edge = TEXTS["image"], TEXTS["edge"]
    lines: list[str] = []
    if rows * columns > 1:
        for row in range(1, rows + 1):
            names = (TEXTS["tile"].format(row, column) for column in range(1, columns + 1))
            lines.append("".join(f"{edge}{name}{image}" for name in names) + "\n")
        lines.append("\n")
    lines.append(f"{edge}{TEXTS['whole']}{image}{edge}")
    return tokenizer.encode("".join(lines), add_special_tokens=False)
