"""Stop strings in answers with tools and thinking, against those in plain text."""

from __future__ import annotations

from typing import Any

import pytest

from quire.protocol.request import FinishReason, SequenceFinish
from quire.protocol.sampling_params import SamplingParams
from quire.text.dialect import AnswerParser, Part, Thinking, Tool
from quire.text.dialect.families import DIALECTS
from quire.text.dialect.sample import PartsReader
from quire.text.rendering import Renderer
from tests.dialect.answers import Answer, read
from tests.dialect.models import tokenizer
from tests.pairs import BY_PAIRS

TOKENS = tokenizer((), ("<tool_call>", "</tool_call>", "<think>", "</think>"))
DIALECT = DIALECTS["hermes"].bound(TOKENS)
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
END = SequenceFinish(0, FinishReason.LENGTH)


def answered(
    text: str, thinking: Thinking = Thinking.NONE, **params: Any
) -> tuple[list[Part], int]:
    """The parts of an answer up to its end, and the number of its tokens."""
    parser = AnswerParser(DIALECT, TOKENS, (Tool("f"),), thinking)
    reader = PartsReader(parser, SamplingParams(**params), stop_tokens={}, end_token_ids=())
    parts: list[Part] = []
    num_tokens = 0
    for token_id in TOKENS.encode(text, add_special_tokens=False):
        update = reader.take((token_id,), None)
        parts += update.parts
        num_tokens += update.num_tokens_kept
        if update.ending is not None:
            return parts, num_tokens
    return parts + reader.take((), END).parts, num_tokens


TEXTS = ["Hi\n\n   \n\n  there", "Hi\n\n", "Hi there\n", "Hi \n \n\n \n", "Hi.\n\nSo.\n\n"]


@BY_PAIRS
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("stop", ["\n\n", "\n", " \n", ".\n", "  t", "x"])
@pytest.mark.parametrize("included", [False, True])
def test_white_space_stops_where_it_stops_plain_text(text: str, stop: str, included: bool) -> None:
    """Turns red when a stop string waits for what follows its white space."""
    given = {"stop": [stop], "max_tokens": 50, "include_stop_str_in_output": included}
    parts, num_tokens = answered(text, **given)
    plain = Renderer(TOKENS).output_of([], SamplingParams(**given))
    said, num_plain = "", 0
    for token_id in TOKENS.encode(text, add_special_tokens=False):
        update = plain.take((token_id,), None)
        said += update.text
        num_plain += update.num_tokens_kept
        if update.ending is not None:
            break
    else:
        said += plain.take((), END).text
    assert read(parts).text == said
    assert num_tokens == num_plain


def test_no_call_comes_behind_a_stop() -> None:
    parts, _ = answered(f"Hi\n\n{CALL}", stop=["\n\n"])
    assert read(parts) == Answer("Hi")
    parts, _ = answered(f"Hi\n{CALL}", stop=["\n\n"])
    assert read(parts).without_ids == Answer("Hi", calls=(("f", {}),))


def test_white_space_of_thinking_stops_nothing() -> None:
    parts, _ = answered("so\n\n \n\n</think>\n\nHi\n\nthere", Thinking.OPEN, stop=["\n\n"])
    assert read(parts) == Answer("Hi", "so")


def test_white_space_before_the_fewest_tokens_stops_nothing() -> None:
    parts, _ = answered("Hi\n\nyou\n\nthere", stop=["\n\n"], min_tokens=6)
    assert read(parts).text == "Hi\n\nyou"
