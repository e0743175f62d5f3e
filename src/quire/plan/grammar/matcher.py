"""The door through which the engine asks for masks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from quire.protocol.request import EngineRequest
from quire.protocol.step import IntArray, MaskArray

__all__ = ["ANY_TOKEN", "Grammar", "Grammars", "Mask", "Matcher"]

Mask = MaskArray | None
"""Mask of one position, [ceil(V / 32)]; `ANY_TOKEN` allows every token."""

ANY_TOKEN: Mask = None


class Matcher(Protocol):
    """Follows one sequence. What it answers depends on the output that it is given, on nothing that
    it was asked before: a sequence may start again, and drafts may be rejected."""

    def masks(self, output: IntArray, drafts: IntArray) -> Sequence[Mask]:
        """Return masks of the tokens that may follow `output` int32 [N], and of those after each of
        `drafts` int32 [D]: 1 + D masks, `ANY_TOKEN` after a draft that is not allowed.

        The masks are not changed any more. What is raised ends the request.
        """
        ...

    def forced(self, output: IntArray) -> IntArray:
        """The tokens after `output` int32 [N] that have no alternative, int32 [F], perhaps none."""
        ...


class Grammar(Protocol):
    """The language of one request's outputs."""

    def matcher(self) -> Matcher:
        """A new one, for one of the request's sequences."""
        ...


class Grammars(Protocol):
    """Makes grammars, in threads and processes of its own."""

    def bounded(self, request: EngineRequest) -> EngineRequest:
        """The request as the grammar that it states ends it: `min_tokens` and `ignore_eos` have no
        say where nothing else may follow. RequestError if nothing could end it."""
        ...

    def open(self, request: EngineRequest) -> Future[Grammar]:
        """The grammar of a request, of which `bounded` was asked. The future raises RequestError if
        it is none, or one that would take too much time or memory."""
        ...

    def close(self) -> None:
        """Free everything. May be called twice."""
        ...
