"""Images from bytes that strangers send. Format and size are checked before pixels are made."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any

from quire.base.errors import RequestError

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["decode_image", "media_type", "plain_image"]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_KINDS = {"MPO": "jpeg"}
"""Media types that are not the format's name: a photo of several begins as a JPEG."""

_WHITE = (255, 255, 255, 255)
_ADVICE = "send a PNG, JPEG, WebP or GIF image"


def decode_image(data: bytes, place: str, max_bytes: int, max_pixels: int) -> Image.Image:
    """Return the image as RGB, turned as its EXIF data say, and on white where it is transparent.

    place: path of the image in the request. Raises RequestError, which names it, for bytes that are
    no image of a known format, are cut off or damaged, have several frames, or are too many.
    """
    with _opened(data, place, max_bytes, max_pixels) as image:
        return plain_image(image, place, max_pixels)


def media_type(data: bytes, place: str, max_bytes: int, max_pixels: int) -> str:
    """Return the media type of an image that `decode_image` takes, such as "image/png"; errors as
    there."""
    with _opened(data, place, max_bytes, max_pixels) as image:
        kind = str(image.format)
        plain_image(image, place, max_pixels)
    return f"image/{_KINDS.get(kind, kind.lower())}"


def _opened(data: bytes, place: str, max_bytes: int, max_pixels: int) -> Image.Image:
    """Return an image with its size and without its pixels; errors as of `decode_image`."""
    from PIL import Image

    if len(data) > max_bytes:
        raise RequestError(
            f"{place} has {len(data)} bytes, but an image has at most {max_bytes} "
            "(max_image_bytes): send a smaller one"
        )
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise RequestError(
            f"{place} is too large ({error}), and an image has at most {max_pixels} pixels "
            "(max_image_pixels): send a smaller one"
        ) from error
    except Exception as error:  # whatever a stranger's file makes of the decoders
        raise _unreadable(place, error) from error


def plain_image(image: Image.Image, place: str, max_pixels: int) -> Image.Image:
    """Return an opened image as `decode_image` does; errors as there."""
    width, height = image.size
    if width * height > max_pixels:
        raise RequestError(
            f"{place} has {width} x {height} pixels, but an image has at most {max_pixels} "
            "(max_image_pixels): send a smaller one"
        )
    if width < 1 or height < 1:
        raise RequestError(f"{place} has {width} x {height} pixels: {_ADVICE}")
    try:
        # A photo of several (MPO) is an ordinary JPEG first, and previews of it follow.
        if image.format != "MPO" and getattr(image, "is_animated", False):
            raise RequestError(f"{place} has several frames: send one image of each as a part")
        image.load()
        return _as_rgb(_turned(image))
    except RequestError:
        raise
    except Exception as error:
        raise _unreadable(place, error) from error


def _turned(image: Image.Image) -> Image.Image:
    """Turn an image as its EXIF data say; one with broken data stays as it is."""
    from PIL import ImageOps

    with contextlib.suppress(Exception):
        return ImageOps.exif_transpose(image)
    return image


def _as_rgb(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode.startswith("I"):
        return _of_16_bits(image, image.info.get("transparency"))
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, _WHITE)
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


def _of_16_bits(image: Image.Image, transparent: object) -> Image.Image:
    """Scale levels of 16 bits to 8 bits; Pillow's own conversion cuts them off. transparent: level
    that is shown as white; None if there is none."""
    import numpy as np
    from PIL import Image

    levels: Any = np.asarray(image).clip(0, 65535).astype(np.uint32)
    if isinstance(transparent, int):
        levels[levels == transparent] = 65535
    return Image.fromarray(((levels + 128) // 257).astype(np.uint8)).convert("RGB")


def _unreadable(place: str, error: Exception) -> RequestError:
    reason = " ".join(str(error).split())[:120]
    return RequestError(f"{place} cannot be read as an image ({reason}): {_ADVICE}")
