"""Stop strings over a stream of text."""

from collections.abc import Iterable
from typing import NamedTuple

from quire.base.errors import RequestError


class StopDelta(NamedTuple):
    """Text that is safe to show, and the stop string that ended the stream, if one did."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Finds the first stop string in text that arrives in pieces.

    The match that ends first wins, and the longest one of those that end together. A reader who
    takes one character at a time would see the same, so the result does not depend on the cuts.
    Text that may still become a stop string is held back, and nothing else.
    """

    def __init__(self, stops: Iterable[str] = (), include_stop_str_in_output: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        if "" in self._stops:
            raise RequestError(
                'A stop string is empty (""), which would match everywhere. '
                "Remove it from `stop`, or leave `stop` out."
            )
        self._include = include_stop_str_in_output
        self._prefixes = frozenset(
            stop[:end] for stop in self._stops for end in range(1, len(stop))
        )
        self._lengths_by_last = _lengths_by_last_character(self._prefixes)
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the stream."""
        return self._matched

    def append(self, delta: str, check: bool = True) -> StopDelta:
        """Take `delta`, return what can be released.

        With `check` false no stop string ends inside `delta`, though one that begins there can
        end in a later delta (`min_tokens`). After a match everything is swallowed.
        """
        if self._matched is not None:
            return StopDelta("", self._matched)
        if not self._stops:
            return StopDelta(delta)
        num_held = len(self._held)
        text = self._held + delta
        match = self._find(text, num_held) if check and delta else None
        if match is not None:
            end, stop = match
            self._held, self._matched = "", stop
            return StopDelta(text[: end if self._include else end - len(stop)], stop)
        cut = len(text) - self._num_to_hold(text)
        self._held = text[cut:]
        return StopDelta(text[:cut])

    def would_match(self, delta: str) -> bool:
        """Return whether a stop string would end inside `delta`, which is not taken."""
        if not delta or self._matched is not None:
            return False
        return self._find(self._held + delta, len(self._held)) is not None

    def end_with(self, stop: str) -> str:
        """End the stream with a stop string that came as a token, unless another one ended it. The
        text still held, and the string if it is to be included."""
        if self._matched is not None:
            return ""
        self._matched = stop
        return self.finish() + (stop if self._include else "")

    def finish(self) -> str:
        """The text still held, released because nothing follows."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, num_seen: int) -> tuple[int, str] | None:
        """(end, stop) of the match that ends first, beyond the first `num_seen` characters."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, num_seen - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[0], best[2])

    def _num_to_hold(self, text: str) -> int:
        """Length of the longest end of `text` that is a proper beginning of a stop string."""
        for length in self._lengths_by_last.get(text[-1:], ()):
            if length <= len(text) and text[-length:] in self._prefixes:
                return length
        return 0


def _lengths_by_last_character(prefixes: frozenset[str]) -> dict[str, tuple[int, ...]]:
    lengths: dict[str, set[int]] = {}
    for prefix in prefixes:
        lengths.setdefault(prefix[-1], set()).add(len(prefix))
    return {last: tuple(sorted(found, reverse=True)) for last, found in lengths.items()}
