"""Places in a prompt where its recurrent state is worth keeping: other prompts may go on there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.protocol.step import IntArray

__all__ = ["GAP", "STRIDE", "places_of", "spaced"]

GAP = 64
"""Tokens between two places at least. A place costs a step, about as much as so few tokens."""

STRIDE = 2048
"""Tokens between places where no message ends."""

LONG = 512
"""Tokens from which on a prompt ends with a question or an instruction: `GAP` tokens before its
end is a place, so that one with another last line starts from there."""


def spaced(ends: IntArray, grid: int, gap: int) -> tuple[int, ...]:
    """Return the last multiples of `grid` up to `ends` [N], in order, of those closer together than
    `gap` the first. A prompt that begins with another one has the places of that one too."""
    found: list[int] = []
    for place in np.unique(ends // grid * grid).tolist():
        if place >= gap and (not found or place - found[-1] >= gap):
            found.append(place)
    return tuple(found)


def places_of(
    ends: Sequence[int], num_tokens: int, grid: int, gap: int, start: int = 0, branch: int = 0
) -> list[int]:
    """Return the places in a prompt of `num_tokens`, multiples of `grid` behind `start`, in order.

    They are, `gap` tokens apart and the first ones before the others: branches of other prompts;
    the first message's end, which whole conversations share; the last place before the prompt's
    end; of other messages' ends, and of places `STRIDE` apart where there is none, the last one in
    each quadrupling of the distance from the end. ends: ends of messages that `spaced` has chosen.
    branch: number of tokens after which other prompts have branched off; 0 for none.
    """
    chosen: list[int] = []

    def choose(place: int) -> None:
        if place - start >= gap and all(abs(place - each) >= gap for each in chosen):
            chosen.append(place)

    before = [place for place in ends if place < num_tokens]
    choose(branch)
    for place in before[:1]:
        choose(place)
    is_near = bool(before) and num_tokens - before[-1] <= gap + grid
    tail = gap if num_tokens >= LONG else 1
    last = before[-1] if is_near else (num_tokens - tail) // grid * grid
    closest = max((each for each in (start, *chosen) if each <= last), default=0)
    if last > start and (not closest or last - closest >= gap):
        chosen.append(last)
    strides = range(STRIDE, num_tokens, STRIDE)
    last_ones = {_quadrupling(num_tokens - place, gap): place // grid * grid for place in strides}
    last_ones.update((_quadrupling(num_tokens - place, gap), place) for place in before)
    for place in sorted(last_ones.values(), reverse=True):
        choose(place)
    return sorted(chosen)


def _quadrupling(distance: int, gap: int) -> int:
    """Return 0 for a distance below `gap`, and one more for each fourfold one."""
    return ((distance // gap).bit_length() + 1) // 2
