"""Bounds on the JSON of a body, checked on its bytes before anything is built from them.

The scan goes window by window and yields to other requests in between, so no body, however it is
made, blocks the event loop for long.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

from quire.server.requests.errors import RefusedError
from quire.server.requests.limits import Limits

__all__ = ["check_shape", "check_shape_by_turns"]

WINDOW_BYTES = 16 * 1024
"""Bytes per window. The worst one (only brackets) takes about 2 ms."""

# A string, or the part of one within the window, or a bracket. The quantifiers are
# possessive: nothing is tried twice.
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+("?+)|[\[\]{}]', re.DOTALL)
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+', re.DOTALL)
_REST_OF_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+("?+)', re.DOTALL)
_SPACE = re.compile(rb"\s*+")
_MATCHES_PER_NODE = 3
"""A value has at most three matches: its key and two brackets."""


def check_shape(body: bytes, limits: Limits) -> None:
    """Refuse JSON that nests too deep or has too many values or too long keys. Linear in the size
    of the body."""
    for _ in _Scan(body, limits).windows():
        pass


async def check_shape_by_turns(body: bytes, limits: Limits) -> None:
    """Run `check_shape`, yielding to other tasks after every window but the first."""
    for number, _ in enumerate(_Scan(body, limits).windows()):
        if number:
            await asyncio.sleep(0)


class _Scan:
    """One pass over one body. State at the end of a window: the depth, the count of values, the
    start of the current string (-1: outside of strings), and True if the last token was a string
    too long for a key."""

    def __init__(self, body: bytes, limits: Limits) -> None:
        self._body = body
        self._limits = limits
        self._depth = 0
        self._num_matches = 0
        self._num_commas = 0
        self._string_start = -1
        self._may_be_key = False
        # Commas in strings do not count; telling them apart is worth it only if there are many.
        self._counts_commas = body.count(b",") > limits.max_json_nodes

    def windows(self) -> Iterator[None]:
        """Scan, yielding after each window. Raises RefusedError as soon as a limit is passed."""
        start = 0
        while start < len(self._body):
            end = _window_end(self._body, start)
            self._scan(start, end)
            start = end
            yield

    def _scan(self, start: int, end: int) -> None:
        body, limits = self._body, self._limits
        if self._may_be_key:
            self._check_is_no_key(start, end)
        if self._string_start >= 0:
            start = self._leave_string(start, end)
        most = _MATCHES_PER_NODE * limits.max_json_nodes
        for match in _STRING_OR_BRACKET.finditer(body, start, end):
            self._num_matches += 1
            if self._num_matches > most:
                raise _too_much("number of values", "max_json_nodes", limits)
            first = body[match.start()]
            if first == 0x22:  # a quote
                if not match.group(1):
                    self._string_start = match.start()
                elif match.end() - match.start() > limits.max_json_key_bytes + 2:
                    self._check_is_no_key(match.end(), end)
            elif first in b"[{":
                self._depth += 1
                if self._depth > limits.max_json_depth:
                    raise _too_much("nesting", "max_json_depth", limits)
            else:
                self._depth -= 1
        if self._counts_commas:
            self._num_commas += _STRING.sub(b"", body[start:end]).count(b",")
            if self._num_commas > limits.max_json_nodes:
                raise _too_much("number of values", "max_json_nodes", limits)

    def _leave_string(self, start: int, end: int) -> int:
        """Return the end of a string that was cut off, or of the window if it goes on."""
        match = _REST_OF_STRING.match(self._body, start, end)
        assert match is not None, "it matches nothing at least"
        if match.group(1):
            if match.end() - self._string_start > self._limits.max_json_key_bytes + 2:
                self._check_is_no_key(match.end(), end)
            self._string_start = -1
        return match.end()

    def _check_is_no_key(self, start: int, end: int) -> None:
        """Check the text behind a string that is too long for a key, up to the end of the
        window."""
        space = _SPACE.match(self._body, start, end)
        assert space is not None, "it matches nothing at least"
        self._may_be_key = space.end() == end
        if not self._may_be_key and self._body[space.end()] == 0x3A:
            raise _too_much("key length in bytes", "max_json_key_bytes", self._limits)


def _window_end(body: bytes, start: int) -> int:
    """Return a window's end that is not between a backslash and the character that it escapes."""
    end = start + WINDOW_BYTES
    if end >= len(body):
        return len(body)
    window = body[start:end]
    num_backslashes = len(window) - len(window.rstrip(b"\\"))
    return end + num_backslashes % 2


def _too_much(what: str, limit: str, limits: Limits) -> RefusedError:
    return RefusedError(f"The body's {what} is over {limit}, {getattr(limits, limit)}. Send less.")
