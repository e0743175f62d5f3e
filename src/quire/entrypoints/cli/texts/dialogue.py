"""A dialogue at a terminal: lines that a person types, and answers printed as they come."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.entrypoints.cli.texts.source import Piece

__all__ = ["Answer", "Clock", "as_path", "ask_lines", "pieces_of", "print_answer"]

PROMPT = "> "

_IMAGE_PATHS = re.compile(
    r"""(?<!\S)(?: '(?P<single>[^']+\.ENDING)' | "(?P<double>[^"]+\.ENDING)"
    | (?P<bare>(?:~|\.{1,2})?/(?:\\.|[^\s\\])*?\.ENDING) )(?=$|[\s?!,.;:)])""".replace(
        "ENDING", "(?:png|jpe?g|webp|gif)"
    ),
    re.VERBOSE | re.IGNORECASE,
)
"""Paths as people type them, and as terminals write a file that is dropped on them: in quotes, or
with a backslash before a space."""

Clock = Callable[[], float]
"""Seconds, from any start."""


@dataclass(frozen=True, slots=True)
class Answer:
    """text: answer without the thinking before it. num_tokens: tokens of both. num_context_tokens:
    tokens of the answer and all before it. Both are None where the source did not say. first_s:
    seconds to the first token, None if there was none. total_s: seconds to the end. is_cut: ended
    by Ctrl-C."""

    text: str
    num_tokens: int | None
    first_s: float | None
    total_s: float
    is_cut: bool
    num_context_tokens: int | None = None

    def summary(self) -> str:
        """One line. The rate is that of the tokens after the first, over their own time."""
        parts = [] if self.first_s is None else [f"first token after {self.first_s * 1000:.0f} ms"]
        if self.num_tokens is not None:
            parts.append(f"{self.num_tokens} tokens in {self.total_s:.2f} s")
            decode_s = self.total_s - (self.first_s or 0.0)
            if self.num_tokens > 1 and decode_s > 0:
                parts.append(f"{(self.num_tokens - 1) / decode_s:.0f} tokens/s")
        else:
            parts.append(f"{self.total_s:.2f} s")
        return ("stopped; " if self.is_cut else "") + ", ".join(parts)


def print_answer(pieces: Generator[Piece], *, clock: Clock = time.perf_counter) -> Answer:
    """Write the text to stdout as it comes, and the thinking before it and its speed to stderr.
    Ctrl-C ends the answer and the request, and nothing else."""
    start, texts, thinking = clock(), list[str](), _Thinking()
    first: float | None = None
    num_tokens: int | None = None
    num_prompt: int | None = None
    is_cut = False
    try:
        for piece in pieces:
            if piece.text or piece.reasoning:
                first = clock() - start if first is None else first
            if piece.reasoning:
                thinking.show(piece.reasoning)
            if piece.text:
                thinking.end()
                texts.append(piece.text)
                sys.stdout.write(piece.text)
                sys.stdout.flush()
            num_tokens = num_tokens if piece.num_tokens is None else piece.num_tokens
            num_prompt = num_prompt if piece.num_prompt_tokens is None else piece.num_prompt_tokens
    except KeyboardInterrupt:
        is_cut = True
    finally:
        thinking.end()
        pieces.close()
    context = None if num_tokens is None or num_prompt is None else num_tokens + num_prompt
    answer = Answer("".join(texts), num_tokens, first, clock() - start, is_cut, context)
    if not answer.text.endswith("\n"):
        print()
    sys.stdout.flush()
    print(f"    {answer.summary()}", file=sys.stderr)
    return answer


class _Thinking:
    """Writes thinking to stderr, dimmed at a terminal."""

    def __init__(self) -> None:
        self._last = ""
        self._dim, self._plain = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")

    def show(self, text: str) -> None:
        sys.stdout.flush()
        sys.stderr.write(f"{self._dim}{text}{self._plain}")
        sys.stderr.flush()
        self._last = text

    def end(self) -> None:
        """Begin a new line for what follows, if any thinking was written."""
        if self._last and not self._last.endswith("\n"):
            print(file=sys.stderr)
        self._last = ""


def ask_lines() -> Iterator[str]:
    """Lines that are not blank, until Ctrl-D or the end of the input. Ctrl-C drops what was typed;
    the second in a row ends too. At a terminal they can be edited and called back."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        _allow_editing()
    was_interrupted = False
    mark = "\ufeff"  # of byte order, which a file may begin with
    while True:
        try:
            line = input(PROMPT if is_terminal else "")
        except EOFError:
            if is_terminal:
                print()
            return
        except KeyboardInterrupt:
            print()
            if was_interrupted or not is_terminal:
                return
            was_interrupted = True
            print("Ctrl-C once more, or Ctrl-D, ends.", file=sys.stderr)
            continue
        was_interrupted = False
        line, mark = line.removeprefix(mark), ""
        if line.strip():
            yield line


def pieces_of(text: str) -> Iterator[str | Path]:
    """Yield what a person typed in order: texts, and the paths of images among them that exist. A
    path begins with `/`, `./`, `../` or `~/`, or is in quotes."""
    end = 0
    for found in _IMAGE_PATHS.finditer(text):
        quoted = found["single"] or found["double"]
        path = Path(os.path.expanduser(quoted)) if quoted else as_path(found["bare"])
        if not os.path.isfile(path):  # it takes any name, unlike that of Path
            continue
        yield text[end : found.start()].strip()
        yield path
        end = found.end()
    yield text[end:].strip()


def as_path(name: str) -> Path:
    """Return a path as a shell reads it: a backslash before any sign stands for the sign."""
    return Path(os.path.expanduser(re.sub(r"\\(.)", r"\1", name)))


def _allow_editing() -> None:
    """Importing it gives `input` arrows and a history, where the system has it."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return
