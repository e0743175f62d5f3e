"""`quire chat`: a conversation with a running server, or with an engine in this process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from quire.cli.answer import Answer, print_answer
from quire.cli.ask import ask_lines
from quire.cli.flags.sampling import chat_sampling
from quire.cli.flags.source import add_source_flags, open_source
from quire.cli.parser import CommandParser, print_error, print_note
from quire.cli.text_source import TextSource
from quire.errors import QuireError

__all__ = ["add_arguments", "run"]

HELP = "/reset forgets the conversation, /system TEXT sets the system prompt, /exit or Ctrl-D ends."


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="answer this one message and end")
    parser.add_argument("--system-prompt", metavar="TEXT", help="first message of a conversation")
    add_source_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Status 0 when the conversation has ended; an error of the only message is raised, and
    KeyboardInterrupt if its answer was cut."""
    with open_source(options) as (source, given):
        sampling, note = chat_sampling(given, source.default_sampling)
        if note:
            print_note(note)
        conversation = Conversation(source, sampling, options.system_prompt)
        if options.quick is not None:
            if conversation.say(options.quick).is_cut:
                raise KeyboardInterrupt
            return 0
        if sys.stdin.isatty():
            print(f"{source.model}. Ctrl-C ends an answer; {HELP}", file=sys.stderr)
        for line in ask_lines():
            if line.strip() in ("/exit", "/quit"):
                break
            if line.startswith("/"):
                print(conversation.command(line), file=sys.stderr)
                continue
            try:
                conversation.say(line)
            except QuireError as error:
                print_error(str(error))
    return 0


class Conversation:
    """The messages so far. What the user says stays only if it was answered, if only in part."""

    def __init__(
        self, source: TextSource, sampling: Mapping[str, Any], system_prompt: str | None
    ) -> None:
        self._source = source
        self._sampling = sampling
        self._system_prompt = system_prompt
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """As the API takes them."""
        if self._system_prompt is None:
            return list(self._turns)
        return [{"role": "system", "content": self._system_prompt}, *self._turns]

    def say(self, text: str) -> Answer:
        """Ask, print the answer and remember both. RequestError if it is refused."""
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = print_answer(self._source.chat(asked, self._sampling))
        if answer.text:
            self._turns += [asked[-1], {"role": "assistant", "content": answer.text}]
        return answer

    def command(self, line: str) -> str:
        """Obey a line that begins with a slash; what to tell the user."""
        name, _, rest = line.strip().partition(" ")
        if name == "/reset":
            self._turns.clear()
            return "The conversation begins anew."
        if name == "/system":
            self._system_prompt = rest.strip() or None
            self._turns.clear()
            return "The conversation begins anew, " + (
                "with this system prompt." if rest.strip() else "without a system prompt."
            )
        return HELP
