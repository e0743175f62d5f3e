"""Token ids of a text while its pieces come."""

from __future__ import annotations

from quire.bundled import bundled_model_path
from quire.text.rendering import Prompt, PromptPieces, RenderedPrompt, Renderer
from quire.text.rendering.prompt_pieces import GROWTH, NUM_HELD_BACK

WORDS = ["The ", "quick ", "brown ", "fox ", "jumps ", "over ", "lazy ", "dogs. "] * 300


class CountingRenderer:
    """Counts the characters that it is given to tokenize."""

    def __init__(self) -> None:
        self._renderer = Renderer.from_folder(bundled_model_path())
        self.num_characters = 0

    def render_prompt(self, prompt: Prompt) -> RenderedPrompt:
        self.num_characters += len(prompt) if isinstance(prompt, str) else 0
        return self._renderer.render_prompt(prompt)


def test_word_by_word_costs_in_proportion_to_the_text() -> None:
    """Fault: with every word all of the text before it was tokenized again, and 12,000 words took
    minutes. What is given out stays close behind the text all the same."""
    renderer = CountingRenderer()
    pieces = PromptPieces(renderer)  # pyright: ignore[reportArgumentType]
    given: list[int] = []
    for count, word in enumerate(WORDS, 1):
        given += pieces.add(word)
        assert len(given) >= (1 - GROWTH) * count - NUM_HELD_BACK - 1  # a word is a token or more
    text = "".join(WORDS)
    assert renderer.num_characters < 70 * len(text)
    whole = pieces.whole().token_ids
    assert whole == renderer.render_prompt(text).token_ids
    assert whole[: len(given)] == given == pieces.token_ids
