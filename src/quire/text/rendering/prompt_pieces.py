"""A prompt that arrives in pieces, as token ids that can be computed before it is complete."""

from __future__ import annotations

from collections.abc import Sequence

from quire.base.errors import RequestError
from quire.text.rendering.renderer import RenderedPrompt, Renderer

__all__ = ["PromptPieces"]

NUM_HELD_BACK = 8
"""Last tokens of an unfinished text, which later ones may join. A text whose earlier tokens change
nevertheless is seen at its end."""
GROWTH = 1 / 64
"""A text is tokenized again when so much of it is new: in all that costs about as much as 64 times
the whole, however small the pieces are, and leaves so much of it to compute at its end."""


class PromptPieces:
    """Pieces are all text or all token ids. token_ids: ids returned so far."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._text: str | None = None
        self._num_tokenized = 0  # characters
        self.token_ids: list[int] = []

    def add(self, piece: str | Sequence[int]) -> list[int]:
        """Token ids that can be computed now. RequestError for ids outside the vocabulary, and for
        a piece that is neither text nor token ids, or of another kind than those before."""
        if not hasattr(piece, "__len__"):
            raise RequestError(f"a piece is {piece!r}: give text, or a list of token ids")
        if self.token_ids and self._text is None and isinstance(piece, str):
            raise RequestError("the pieces so far are token ids: give token ids, not text")
        if self._text is not None and not isinstance(piece, str):
            raise RequestError("the pieces so far are text: give text, not token ids")
        if len(piece) == 0:
            return []
        if not isinstance(piece, str):
            found = self._renderer.render_prompt(list(piece)).token_ids
            self.token_ids += found
            return found
        self._text = (self._text or "") + piece
        if len(self._text) - self._num_tokenized < GROWTH * len(self._text):
            return []
        self._num_tokenized = len(self._text)
        whole = self._renderer.render_prompt(self._text).token_ids
        certain = whole[: max(len(whole) - NUM_HELD_BACK, 0)]
        given = len(self.token_ids)
        if certain[:given] != self.token_ids:
            return []
        self.token_ids = certain
        return certain[given:]

    def whole(self) -> RenderedPrompt:
        """The complete prompt. RequestError if it is empty."""
        prompt = self.token_ids if self._text is None else self._text
        return self._renderer.render_prompt(prompt)
