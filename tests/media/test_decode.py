"""Images of strangers: the pixels that are shown, and the files that are refused before pixels are
made."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.image_writer import as_bytes, picture
from tests.profiles import SCALE, examples

from quire.base.errors import RequestError
from quire.text.rendering.media.decode import decode_image
from quire.text.rendering.media.sources import ImageSource, MediaAccess

PLACE = "messages[0].content[1].image_url.url"


def decoded(data: bytes, max_bytes: int = 2**22, max_pixels: int = 2**20) -> np.ndarray:
    image = decode_image(data, PLACE, max_bytes, max_pixels)
    assert image.mode == "RGB"
    return np.asarray(image)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def claiming(width: int, height: int) -> bytes:
    """A small PNG that says it is large."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", zlib.compress(b"0" * 99))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
def test_formats_without_loss(kind: str) -> None:
    image = picture(20, 12) if kind != "GIF" else picture(20, 12).quantize(64)
    options = {"lossless": True} if kind == "WEBP" else {}
    found = decoded(as_bytes(image, kind, **options))
    assert np.array_equal(found, np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("turn", range(1, 9))
def test_exif_turns_the_image(turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    upright = np.asarray(picture(20, 12))
    found = decoded(as_bytes(picture(20, 12), "PNG", exif=exif))
    turned = {1: upright, 3: upright[::-1, ::-1], 6: np.rot90(upright, -1), 8: np.rot90(upright)}
    assert found.shape[:2] == ((12, 20) if turn < 5 else (20, 12))
    if turn in turned:
        assert np.array_equal(found, turned[turn])


def test_transparency_is_on_white() -> None:
    """Fault: the model reads pixels that a viewer does not see."""
    hidden = np.zeros((8, 8, 4), np.uint8)
    hidden[2:5] = (255, 0, 0, 128)
    found = decoded(as_bytes(Image.fromarray(hidden)))
    assert (found[0] == 255).all() and (found[3] == (255, 127, 127)).all()


@pytest.mark.parametrize("mode", ["P", "L", "RGB", "LA"])
def test_transparent_colours_of_other_modes_are_white(mode: str) -> None:
    image = Image.new(mode, (6, 6), 0)
    if mode == "P":
        image.putpalette([0, 0, 0, 255, 0, 0])
    options = {} if mode == "LA" else {"transparency": (0, 0, 0) if mode == "RGB" else 0}
    assert (decoded(as_bytes(image, "PNG", **options)) == 255).all()


def test_a_transparent_level_of_16_bits_is_white() -> None:
    levels = np.full((6, 6), 1000, np.uint16)
    levels[2] = 2000
    found = decoded(as_bytes(Image.fromarray(levels), "PNG", transparency=1000))
    assert (found[0] == 255).all() and (found[2] == 8).all()


def test_a_photo_of_several_is_its_first() -> None:
    """Fault: JPEG files of some cameras, which have a preview at their end, are refused."""
    photos = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    data = as_bytes(photos[0], "MPO", save_all=True, append_images=photos[1:])
    red = decoded(data)
    assert red[..., 0].min() > 200 > 60 > red[..., 2].max()


def test_16_bits_are_scaled_and_cmyk_is_converted() -> None:
    levels = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    found = decoded(as_bytes(Image.fromarray(levels)))
    assert np.abs(found[..., 0] - levels / 257).max() <= 0.5
    ink = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    red = decoded(as_bytes(ink, "JPEG", quality=100))
    assert red[..., 0].min() > 200 > 60 > red[..., 1].max()


def test_a_small_file_that_claims_to_be_large_costs_nothing() -> None:
    tracemalloc.start()
    for size in ((60_000, 60_000), (10_000, 10_000), (1100, 1000)):
        with pytest.raises(RequestError, match=r"image_url\.url (has|is too large).*max_image_pix"):
            decoded(claiming(*size))
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x89PNG\r\n\x1a\n",
        as_bytes(picture(20, 12))[:-300],
        as_bytes(picture(20, 12), "JPEG")[:200],
        b"<svg xmlns='http://www.w3.org/2000/svg'><rect width='9' height='9'/></svg>",
        b"<html><body>not an image</body></html>",
        as_bytes(picture(20, 12), "BMP"),
        claiming(64, 64),
    ],
    ids=["nothing", "start", "cut PNG", "cut JPEG", "SVG", "HTML", "BMP", "too little"],
)
def test_what_is_no_image_is_refused_with_its_place(data: bytes) -> None:
    with pytest.raises(RequestError, match=r"image_url\.url cannot be read as an image"):
        decoded(data)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animations_are_refused(kind: str) -> None:
    frames = [picture(8, 8, seed=i) for i in range(3)]
    data = as_bytes(frames[0], kind, save_all=True, append_images=frames[1:])
    with pytest.raises(RequestError, match="has several frames"):
        decoded(data)


def test_too_many_bytes_are_refused() -> None:
    with pytest.raises(RequestError, match=r"has 1001 bytes.*max_image_bytes"):
        decoded(b"x" * 1001, max_bytes=1000)


@given(
    kind=st.sampled_from(["PNG", "JPEG", "WEBP", "GIF"]),
    flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=8),
)
@examples(150 if SCALE == 1 else 500)  # 10,000 in `make soak`
def test_damaged_images_are_shown_or_refused(kind: str, flips: list[tuple[int, int]]) -> None:
    data = bytearray(FILES[kind])
    for place, value in flips:
        data[place % len(data)] = value
    try:
        decoded(bytes(data))
    except RequestError as error:
        assert str(error).startswith(PLACE)


FILES = {kind: as_bytes(picture(24, 16), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF")}


def access(folder: Path | None = None) -> MediaAccess:
    return MediaAccess(10_000, 2**20, folder)


def read(value: object, folder: Path | None = None, detail: str | None = None) -> object:
    return access(folder).read(ImageSource(PLACE, value, detail))


def test_data_urls() -> None:
    assert read("data:image/png;base64,aGVsbG8=") == b"hello"
    assert read("DATA:;charset=utf-8;base64,aGVsbG8=") == b"hello"
    assert read("data:,he%6Clo") == b"hello"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("data:image/png;base64,aGVs bG8=", "is no base64"),
        ("data:image/png;base64", "without data"),
        ("data:image/png;base64," + "A" * 13_400, "10000 bytes .max_image_bytes"),
        ("data:," + "%41" * 10_001, "10000 bytes .max_image_bytes"),
        ("file:///etc/hostname", "allowed_local_media_path"),
        ("https://example.org/a.png", "allowed_media_domains"),
        ("ftp://example.org/a.png", "give a data: URL"),
        ("/etc/hostname", "give a data: URL"),
        (3, "give an image of Pillow"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_not_read(value: object, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read(value)


def test_files_of_the_allowed_folder_alone(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir(), outside.mkdir()
    (inside / "a b.png").write_bytes(b"hello")
    (outside / "c.png").write_bytes(b"secret")
    (inside / "link.png").symlink_to(outside / "c.png")
    assert read(f"file://{inside}/a%20b.png", inside) == b"hello"
    for path in (f"{outside}/c.png", f"{inside}/../out/c.png", f"{inside}/link.png"):
        with pytest.raises(RequestError, match="outside of allowed_local_media_path"):
            read(f"file://{path}", inside)
    behind = tmp_path / "behind"
    behind.symlink_to(inside)
    for name, words in (("none.png", "there is no file"), ("x" * 300, "cannot be read")):
        with pytest.raises(RequestError, match=words) as caught:
            read(f"file://{behind}/{name}", behind)
        assert str(inside) not in str(caught.value), "it tells where the folder leads"


def test_details() -> None:
    assert read(b"x", detail="high") == b"x"
    with pytest.raises(RequestError, match="detail 'huge'"):
        read(b"x", detail="huge")


def test_images_of_pillow_are_bounded_too() -> None:
    from quire.text.rendering.media.decode import plain_image

    with pytest.raises(RequestError, match="max_image_pixels"):
        plain_image(picture(100, 100), PLACE, 9_999)
    with Image.open(io.BytesIO(as_bytes(picture(5, 4)))) as opened:
        assert plain_image(opened, PLACE, 20).size == (5, 4)
