"""`quire.inputs`: forms of a prompt, by the names of vLLM's module."""

from __future__ import annotations

from typing import Any, TypedDict

from quire.base.idioms import missing_name
from quire.text.rendering import Prompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]

PromptType = Prompt


class _Given(TypedDict, total=False):
    """cache_salt: only prompts of the same one share cached prefixes. multi_modal_data: images, as
    {"image": one or a list}, for models that take some. multi_modal_uuids: names of these, by which
    later prompts may have them (None in place of the image)."""

    cache_salt: str
    multi_modal_data: Any
    multi_modal_uuids: Any


class _Text(TypedDict):
    prompt: str


class _Tokens(TypedDict):
    prompt_token_ids: list[int]


class TextPrompt(_Text, _Given):
    """A text."""


class TokensPrompt(_Tokens, _Given):
    """Token ids, and perhaps the text that they came from."""


def __getattr__(name: str) -> object:
    raise missing_name(__name__, name, __all__)
