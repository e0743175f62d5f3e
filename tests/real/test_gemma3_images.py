"""Places of images in prompts of Gemma 3, with its own tokenizer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.image_writer import picture
from tests.media.test_gemma3 import spec_of
from tests.media.test_pan_and_scan import CROPS
from tests.real.packages import gemma3_file

from quire.text.rendering.media.gemma3 import Gemma3Preparer
from quire.text.rendering.media.images import ImageBounds, ImageRenderer, NamedImage
from quire.text.rendering.media.sources import MediaAccess
from quire.text.rendering.tokenizer import Tokenizer

BEGIN, END = "<start_of_image>", "<end_of_image>"
PIECES = (
    *("user", " a", "Describe", "The", "In", "x ", ".", "1", "é", "猫", "```\n", ":\n"),
    *("\n", "\n\n", "\n" * 5, "\n" * 40, " \n\n", "\r\n", "\n ", "\t", " ", "  \n"),
    *[BEGIN] * 4,
)


SQUARE = f"\n\n{BEGIN}{END}\n\n"
WITH_CROPS = (
    f"Here is the original image {SQUARE} and here are some crops to help you see better "
    f"{SQUARE} {SQUARE}"
)


@pytest.mark.parametrize(("size", "written"), [((40, 40), SQUARE), ((90, 40), WITH_CROPS)])
def test_prompts_join_as_a_text(size: tuple[int, int], written: str, tmp_path: Path) -> None:
    """The tokens of a prompt with images are those of the text that `transformers`' processor
    writes, but for the image tokens, which this checkpoint of text lacks."""
    tokenizer = Tokenizer.from_folder(gemma3_file(tmp_path))
    spec, rng = spec_of(config={"image_token_index": 262144}, **CROPS), random.Random(1)
    access = MediaAccess(max_bytes=1, max_pixels=1)
    renderer = ImageRenderer(spec, tokenizer, access, ImageBounds(16, 1, 1))
    prepared = Gemma3Preparer(spec, tokenizer)(picture(*size), is_low=False)
    for _ in range(2000):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 12)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        found, parts = renderer.place(ids, [NamedImage(prepared, "image")] * text.count(BEGIN))
        starts = [run.position for part in parts for run in part.runs]
        assert all(found[start] == spec.token_id for start in starts)
        wanted = tokenizer.encode(text.replace(BEGIN, written), add_special_tokens=False)
        assert [each for each in found if each != spec.token_id] == wanted, repr(text)
