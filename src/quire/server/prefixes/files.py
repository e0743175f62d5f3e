"""The files of `--pin-prefix`, which the operator wants to stay in the cache."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from quire.base.errors import ConfigError, RequestError
from quire.text.rendering import Renderer, check_messages

__all__ = ["PrefixFile", "RenderedPrefix", "read_prefix_files", "render_prefixes"]


@dataclass(frozen=True, slots=True)
class PrefixFile:
    """name: the path as given. content: a text, or the first messages of conversations."""

    name: str
    content: str | list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RenderedPrefix:
    """Token ids of a file's content."""

    name: str
    token_ids: list[int]


def read_prefix_files(paths: Iterable[str]) -> list[PrefixFile]:
    """Read each file once. A text loses its final line end, which editors add. Raises ConfigError
    if a file cannot be read, or a `.json` file is no list of messages."""
    return [PrefixFile(path, _read(path)) for path in dict.fromkeys(paths)]


def render_prefixes(files: Sequence[PrefixFile], renderer: Renderer) -> list[RenderedPrefix]:
    """Render the files. Messages go through the chat template, without the prompt for an answer.
    Raises ConfigError if a file cannot be rendered."""
    return [RenderedPrefix(file.name, _render(file, renderer)) for file in files]


def _read(path: str) -> str | list[dict[str, Any]]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"The file of --pin-prefix cannot be read: {path} ({error.strerror}). Give another one."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"The file of --pin-prefix is not UTF-8: {path} ({error.reason} at byte "
            f"{error.start}). Give a text, or messages in a .json file."
        ) from error
    if path.endswith(".json"):
        return _messages(path, text)
    return text.removesuffix("\n").removesuffix("\r")


def _messages(path: str, text: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} of --pin-prefix is not JSON: {error}. Correct it.") from error
    try:
        check_messages(found, text_only=True)
    except RequestError as error:
        raise ConfigError(
            f"{path} of --pin-prefix is no list of messages: {error} Write "
            '[{"role": "system", "content": "…"}], or a text in a file with another ending.'
        ) from error
    return cast("list[dict[str, Any]]", found)


def _render(file: PrefixFile, renderer: Renderer) -> list[int]:
    try:
        if isinstance(file.content, str):
            if not file.content:
                raise RequestError("It has no tokens of its own. Write at least one character.")
            return renderer.render_prompt(file.content).token_ids
        return renderer.render_chat(file.content, add_generation_prompt=False).token_ids
    except RequestError as error:
        raise ConfigError(f"{file.name} of --pin-prefix cannot be a prompt: {error}") from error
