"""Reads a text that is still growing; undecided characters wait for more."""

from __future__ import annotations

from collections.abc import Generator

__all__ = ["CutError", "GrowingText", "Reading", "Waiting"]

Waiting = Generator[None, None, None]
"""A routine that yields where it needs more text."""
Reading = Generator[None, None, bool]
"""A routine that returns whether it found what it looked for."""


class CutError(Exception):
    """The text ended where more of it was needed."""


class GrowingText:
    """Text that has arrived and was not read. Routines yield until there is enough of it, and raise
    CutError if it ends before."""

    def __init__(self) -> None:
        self._text = ""
        self._kept: str | None = None
        self._is_whole = False

    def grow(self, text: str) -> None:
        """Append the next characters."""
        self._text += text

    def end(self) -> None:
        """Mark the end: no more text comes."""
        self._is_whole = True

    @property
    def waiting(self) -> str:
        """The unread text."""
        return self._text

    def take(self, count: int) -> str:
        """Read `count` characters, which must be there."""
        text, self._text = self._text[:count], self._text[count:]
        if self._kept is not None:
            self._kept += text
        return text

    def keep(self) -> None:
        """Keep what is read from here on, until `forget` or `rewind`."""
        self._kept = ""

    def forget(self) -> None:
        """Stop keeping."""
        self._kept = None

    def rewind(self) -> None:
        """Go back to where `keep` was called."""
        self._text = (self._kept or "") + self._text
        self._kept = None

    def more(self) -> Waiting:
        """Wait for the next characters."""
        before = len(self._text)
        while len(self._text) == before:
            if self._is_whole:
                raise CutError
            yield

    def character(self) -> Generator[None, None, str]:
        """Return the next character without reading it."""
        while not self._text:
            yield from self.more()
        return self._text[0]

    def skip_spaces(self) -> Waiting:
        """Read white space, up to a character that is none."""
        while (yield from self.character()).isspace():
            self.take(1)

    def is_at(self, literal: str) -> Reading:
        """Return True if the text goes on with a literal, ignoring white space in both. It is read
        only then."""
        place = 0
        for expected in literal:
            if expected.isspace():
                continue
            while True:
                while place >= len(self._text):
                    yield from self.more()
                if not self._text[place].isspace():
                    break
                place += 1
            if self._text[place] != expected:
                return False
            place += 1
        self.take(place)
        return True

    def is_exactly_at(self, literal: str) -> Reading:
        """Do the same as `is_at`, but with significant white space."""
        while len(self._text) < len(literal) and literal.startswith(self._text):
            yield from self.more()
        if not self._text.startswith(literal):
            return False
        self.take(len(literal))
        return True

    def run(self, allowed: str) -> Generator[None, None, str]:
        """Read characters out of `allowed`, up to another one."""
        found = ""
        while (yield from self.character()) in allowed:
            found += self.take(1)
        return found

    def before(self, *targets: str) -> tuple[str, str]:
        """Read the text that certainly comes before the first of some targets, and the target if it
        is there. Returns the text, and the target or an empty text."""
        places = {place: t for t in targets if (place := self._text.find(t)) >= 0}
        if places:
            found = places[min(places)]
            text = self.take(min(places))
            self.take(len(found))
            return text, found
        most = 0 if self._is_whole else max(map(len, targets)) - 1
        held = min(most, len(self._text))
        while held and not any(target.startswith(self._text[-held:]) for target in targets):
            held -= 1
        return self.take(len(self._text) - held), ""
