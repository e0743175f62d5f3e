"""`quire chat`: a conversation with a running server, or with an engine in this process."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quire.base.errors import QuireError, RequestError
from quire.entrypoints.cli.flags.engine import image_bounds
from quire.entrypoints.cli.flags.sampling import chat_sampling
from quire.entrypoints.cli.flags.source import add_source_flags, open_source
from quire.entrypoints.cli.parser import CommandParser, print_error, print_note
from quire.entrypoints.cli.texts.dialogue import Answer, as_path, ask_lines, pieces_of, print_answer
from quire.entrypoints.cli.texts.source import ContextFullError, TextSource

__all__ = ["add_arguments", "run"]

HELP = (
    "/reset forgets the conversation, /system TEXT sets the system prompt, /image FILE shows an "
    "image with the next message, /save FILE writes the messages, /exit or Ctrl-D ends."
)
Part = Mapping[str, Any]
Content = str | list[Part]
ReadsImage = Callable[[str], Part]
ANSWER_SHARE = 8
"""At least this part of the context is left to an answer."""
CHARS_PER_TOKEN = 3
"""Rough characters per token of the user's text. Where it is too low, the server reports the
overflow."""


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="answer this one message and end")
    parser.add_argument("--system-prompt", metavar="TEXT", help="first message of a conversation")
    parser.add_argument(
        "--image", nargs="+", action="extend", metavar="FILE_OR_URL",
        help="images that the first message shows (PNG, JPEG, WebP or GIF)",
    )  # fmt: skip
    add_source_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Status 0 when the conversation has ended; an error of the only message is raised, and
    KeyboardInterrupt if its answer was cut."""
    read_image = partial(_read_image, image_bounds(options))
    images = [(name, read_image(name)) for name in options.image or ()]
    with open_source(options) as (source, given):
        sampling, note = chat_sampling(given, source.default_sampling)
        if note:
            print_note(note)
        conversation = Conversation(source, sampling, options.system_prompt, read_image)
        for name, image in images:
            conversation.attach(name, image)
        if options.quick is not None:
            if conversation.say(options.quick).is_cut:
                raise KeyboardInterrupt
            return 0
        if sys.stdin.isatty():
            print(f"{source.model}. Ctrl-C ends an answer; {HELP}", file=sys.stderr)
        for line in ask_lines():
            if line.strip() in ("/exit", "/quit"):
                break
            try:
                if is_command(line):
                    print(conversation.command(line), file=sys.stderr)
                else:
                    conversation.say(line)
            except QuireError as error:
                print_error(str(error))
    return 0


def is_command(line: str) -> bool:
    """Return whether a line is a command to the chat, and not a message that begins with the path
    of an image."""
    return line.startswith("/") and next(iter(pieces_of(line))) != ""


def _read_image(bounds: tuple[int, int], name: str) -> Part:
    from quire.text.rendering.media.attached import (
        attached_image,  # slow to import, and seldom needed
    )

    return attached_image(name, *bounds)


@dataclass(frozen=True, slots=True)
class _Turn:
    """One question and its answer. num_tokens: tokens of both; None where it is not known."""

    asked: Content
    answered: str
    num_tokens: int | None

    def messages(self) -> list[dict[str, Any]]:
        return [
            {"role": "user", "content": self.asked},
            {"role": "assistant", "content": self.answered},
        ]


class Conversation:
    """The messages so far. What the user says stays only if it was answered, if only in part; where
    the context is full the oldest turns go."""

    def __init__(
        self,
        source: TextSource,
        sampling: Mapping[str, Any],
        system_prompt: str | None,
        read_image: ReadsImage,
    ) -> None:
        self._source = source
        self._sampling = sampling
        self._system_prompt = system_prompt
        self._read_image = read_image
        self._attached: list[Part] = []
        self._turns: list[_Turn] = []
        self._num_tokens: int | None = 0  # of all messages; None where it is not known

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation in the form of the API."""
        system = self._system_prompt
        first = [] if system is None else [{"role": "system", "content": system}]
        return first + [message for turn in self._turns for message in turn.messages()]

    def attach(self, name: str, image: Part) -> None:
        """Show an image with the next message. Raises RequestError, with its name, if the model
        takes none."""
        if self._source.takes_images is False:
            raise RequestError(
                f"{name} is an image, but {self._source.model} takes text only. Name a model that "
                "takes images, such as HuggingFaceTB/SmolVLM-256M-Instruct."
            )
        self._attached.append(image)

    def say(self, text: str) -> Answer:
        """Ask, print the answer and remember both. RequestError if it is refused, EngineError if
        the answer breaks off."""
        content = self._content(text)
        num_turns = len(self._turns)
        while self._turns and self._is_short_of_room(text):
            self._forget_oldest()
        while True:
            if num_turns > len(self._turns):
                self._tell_forgotten(num_turns - len(self._turns))
                num_turns = len(self._turns)
            asked = [*self.messages, {"role": "user", "content": content}]
            try:
                answer = print_answer(self._source.chat(asked, self._sampling))
                break
            except ContextFullError:
                if not self._turns:
                    raise
                self._forget_oldest()
        if answer.text:
            self._remember(content, answer)
        return answer

    def command(self, line: str) -> str:
        """Obey a line that begins with a slash; what to tell the user."""
        name, _, rest = line.strip().partition(" ")
        if name == "/reset":
            self._begin_anew()
            return "The conversation begins anew."
        if name == "/system":
            self._system_prompt = rest.strip() or None
            self._begin_anew()
            return "The conversation begins anew, " + (
                "with this system prompt." if rest.strip() else "without a system prompt."
            )
        if name == "/save":
            return self._save(rest.strip())
        if name == "/image" and rest.strip():
            image = rest.strip().strip("'\"")
            if not os.path.exists(image) and "://" not in image:
                image = str(as_path(image))
            self.attach(image, self._read_image(image))
            return f"The next message shows {image}."
        return HELP

    def _content(self, text: str) -> Content:
        """Return the content of a message: its text, or its pieces behind the attached images,
        where paths among them are images too."""
        parts = list(self._attached)
        for piece in pieces_of(text):
            if isinstance(piece, str):
                parts += [{"type": "text", "text": piece}] if piece else []
            elif self._source.takes_images is False:
                print_note(f"the model takes text only, so {piece} stays a text")
                return text
            else:
                parts.append(self._read_image(str(piece)))
                print_note(f"{piece} is shown to the model")
        self._attached.clear()
        is_text = all(part["type"] == "text" for part in parts)
        return text if is_text else parts

    def _is_short_of_room(self, text: str) -> bool:
        """Return whether `text` and an answer probably do not fit behind the conversation."""
        longest = self._source.max_model_len
        if longest is None or self._num_tokens is None:
            return False
        room = min(self._sampling.get("max_tokens") or longest, longest // ANSWER_SHARE)
        return self._num_tokens + len(text) // CHARS_PER_TOKEN + room > longest

    def _remember(self, content: Content, answer: Answer) -> None:
        size = _difference(answer.num_context_tokens, self._num_tokens)
        self._num_tokens = answer.num_context_tokens
        self._turns.append(_Turn(content, answer.text, size))

    def _forget_oldest(self) -> None:
        self._num_tokens = _difference(self._num_tokens, self._turns.pop(0).num_tokens)

    def _tell_forgotten(self, count: int) -> None:
        turns = "the oldest turn" if count == 1 else f"the {count} oldest turns"
        print_note(f"the context is full, so {turns} of the conversation will not be seen any more")

    def _begin_anew(self) -> None:
        self._turns.clear()
        self._attached.clear()
        self._num_tokens = 0

    def _save(self, name: str) -> str:
        """Write the messages to a file that is not there yet."""
        if not name:
            return "/save FILE writes the messages to a file, as a JSON list."
        path = Path(name).expanduser()
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n")
        except FileExistsError:
            return f"{path} is there already: give another name."
        except OSError as error:
            return f"{path} cannot be written ({error.strerror}): give another name."
        return f"{len(self.messages)} messages are in {path}."


def _difference(whole: int | None, part: int | None) -> int | None:
    return None if whole is None or part is None else whole - part
