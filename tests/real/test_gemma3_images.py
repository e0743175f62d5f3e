"""Places of images in prompts of Gemma 3, with its own tokenizer."""

from __future__ import annotations

import random
from pathlib import Path

from tests.media.test_gemma3 import spec_of
from tests.real.packages import gemma3_file

from quire.protocol.media import ImageTiles
from quire.rendering.media.door import PreparedImage, TokenRun
from quire.rendering.media.images import ImageBounds, ImageRenderer, NamedImage
from quire.rendering.media.sources import MediaAccess
from quire.rendering.tokenizer import Tokenizer

BEGIN, END = "<start_of_image>", "<end_of_image>"
PIECES = (
    *("user", " a", "Describe", ".", "1", "é", "猫", "```\n", ":\n"),
    *("\n", "\n\n", "\n" * 5, "\n" * 40, " \n\n", "\r\n", "\n ", "\t", " ", "  \n"),
    *[BEGIN] * 4,
)


def test_line_ends_join_as_in_a_text(tmp_path: Path) -> None:
    """The tokens of a prompt with images are those of the text that `transformers`' processor
    writes, but for the image tokens, which this checkpoint of text lacks."""
    tokenizer = Tokenizer.from_folder(gemma3_file(tmp_path))
    spec, rng = spec_of(config={"image_token_index": 262144}), random.Random(1)
    access = MediaAccess(max_bytes=1, max_pixels=1)
    renderer = ImageRenderer(spec, tokenizer, access, ImageBounds(16, 1, 1))
    token_ids = (spec.begin_id, spec.token_id, spec.end_id)
    image = NamedImage(PreparedImage(ImageTiles(b"", 1, 0, 0), token_ids, (TokenRun(3),)), "image")
    for _ in range(2000):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 12)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        found, parts = renderer.place(ids, [image] * text.count(BEGIN))
        assert all(found[each.runs[0].position] == spec.token_id for each in parts)
        written = text.replace(BEGIN, f"\n\n{BEGIN}{END}\n\n")
        wanted = tokenizer.encode(written, add_special_tokens=False)
        assert [each for each in found if each != spec.token_id] == wanted, repr(text)
