"""Answers in the words of each family, after its published format. What a user could have said
stands between marks, so that it is spelled by tokens that are no markers."""

from __future__ import annotations

import json
from collections.abc import Callable

from quire.rendering import Tokenizer
from tests.dialect.answers import Answer, Call

__all__ = ["WRITERS", "encoded", "plain"]

_OPEN, _CLOSE = "\ue000", "\ue001"


def data(value: object) -> str:
    """JSON, spelled."""
    return spelled(json.dumps(value, ensure_ascii=False))


def spelled(text: str) -> str:
    return f"{_OPEN}{text}{_CLOSE}"


def plain(text: str) -> str:
    """Without the marks."""
    return text.replace(_OPEN, "").replace(_CLOSE, "")


def encoded(tokens: Tokenizer, text: str) -> list[int]:
    """Spelled text character by character."""
    ids: list[int] = []
    for i, part in enumerate(text.replace(_CLOSE, _OPEN).split(_OPEN)):
        pieces = [part] if i % 2 == 0 else list(part)
        for piece in pieces:
            ids += tokens.encode(piece, add_special_tokens=False) if piece else []
    return ids


def thought(answer: Answer) -> str:
    return f"<think>\n{answer.reasoning}\n</think>\n\n" if answer.reasoning else ""


def hermes(answer: Answer) -> str:
    calls = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {data(given)}}}\n</tool_call>'
        for name, given in answer.calls
    ]
    return thought(answer) + "\n".join([*([answer.text] if answer.text else []), *calls])


def generic(answer: Answer) -> str:
    if not answer.calls:
        return f'{{"response": {data(answer.text)}}}'
    return f'{{"tool_calls": [{", ".join(map(_named, answer.calls))}]}}'


def _named(call: Call) -> str:
    return f'{{"name": "{call[0]}", "arguments": {data(call[1])}}}'


WRITERS: dict[str, Callable[[Answer], str]] = {"hermes": hermes, "generic": generic}
