"""Memory of the fake executor beyond its device, and copies; see `tests.executor.fake`."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.protocol.step import HOST_TIER, NO_TICKET, IntArray, StepPlan, TicketFailure
from tests.executor.fake_model import Words


@dataclass(slots=True)
class Copies:
    """Copies under a ticket that ends after `steps_left`: from places `src` of tiers to device
    blocks `dst`, or what is in `content` to places `dst` of a tier."""

    ticket: int
    tiers: IntArray
    src: IntArray
    dst: IntArray
    steps_left: int
    content: tuple[Words, npt.NDArray[np.bool_]] | None = None


class Tier:
    """Places beyond the device. words: [2, places, tokens]. garbage: [places, tokens]. corrupt:
    picks, of the places that are read, those whose words have changed."""

    def __init__(self, words: Words, corrupt: Callable[[IntArray], IntArray]) -> None:
        self.words = words
        self.garbage = np.zeros(words.shape[1:], np.bool_)
        self._corrupt = corrupt
        self._checksums: dict[int, int] = {}

    def write(self, places: IntArray, words: Words, garbage: npt.NDArray[np.bool_]) -> None:
        self.words[:, places], self.garbage[places] = words, garbage
        for place in places.tolist():
            self._checksums[place] = self._checksum(place)

    def damaged(self, places: IntArray) -> list[int]:
        """Return the places whose words are not those that were written."""
        self.words[:, self._corrupt(places)] ^= np.uint64(1)
        return [p for p in places.tolist() if self._checksums.get(p) != self._checksum(p)]

    def _checksum(self, place: int) -> int:
        return zlib.crc32(self.words[:, place].tobytes())


class FakeTiers:
    """Tiers of places, and copies between them and the blocks of the device."""

    def __init__(
        self,
        cache: Words,
        garbage: npt.NDArray[np.bool_],
        tiers: Sequence[Tier],
        ticket_steps: Callable[[int], int],
        lose: Callable[[IntArray], IntArray],
    ) -> None:
        """cache, garbage: blocks of the device, which copies change in place."""
        self._cache = cache
        self._garbage = garbage
        self.by_number = tiers
        self.ticket_steps = ticket_steps
        self.lose = lose
        self._tickets: list[Copies] = []

    def lose_all(self, noise: Callable[[tuple[int, ...]], Words]) -> None:
        """Fill all places with garbage, and forget the copies."""
        for tier in self.by_number:
            tier.words = noise(tier.words.shape)
            tier.garbage[:] = True
        self.drop_copies()

    def drop_copies(self) -> None:
        self._tickets.clear()

    def end_tickets(self, plan: StepPlan) -> tuple[tuple[int, ...], tuple[TicketFailure, ...]]:
        """Start the tickets of this plan and end those that are due."""
        for ticket in plan.started:
            own = plan.load_ticket == ticket
            if own.any():
                src, dst = plan.load_src[own], plan.load_dst[own]
                steps = self.ticket_steps(ticket)
                self._tickets.append(Copies(ticket, plan.load_tier[own], src, dst, steps))
        done: list[int] = []
        failed: list[TicketFailure] = []
        for copies in [copies for copies in self._tickets if not copies.steps_left]:
            lost = self._end_copies(copies)
            if len(lost):
                failed.append(TicketFailure(copies.ticket, lost, "the copy failed"))
            else:
                done.append(copies.ticket)
        self._tickets = [copies for copies in self._tickets if copies.steps_left]
        for copies in self._tickets:
            copies.steps_left -= 1
        return tuple(done), tuple(failed)

    def _end_copies(self, copies: Copies) -> IntArray:
        """Make the copies of a ticket; return the destinations that were not filled."""
        is_lost = np.isin(copies.dst, self.lose(copies.dst))
        for number in set(copies.tiers.tolist()):
            tier, own = self.by_number[number], copies.tiers == number
            if copies.content is not None:
                arrives = own & ~is_lost
                words, garbage = copies.content
                tier.write(copies.dst[arrives], words[:, arrives], garbage[arrives])
                continue
            is_lost |= own & np.isin(copies.src, tier.damaged(copies.src[own]))
            arrives = own & ~is_lost
            src, dst = copies.src[arrives], copies.dst[arrives]
            self._cache[:, dst], self._garbage[dst] = tier.words[:, src], tier.garbage[src]
        return copies.dst[is_lost]

    def copy_blocks(self, plan: StepPlan) -> None:
        """Copy blocks out, and within the device. Copies in are made when their tickets end; what
        goes out under a ticket is read now, and is in its place then."""
        for ticket in sorted(set(plan.store_ticket.tolist())):
            own = plan.store_ticket == ticket
            src, dst, tiers = plan.store_src[own], plan.store_dst[own], plan.store_tier[own]
            content = self._cache[:, src], self._garbage[src]
            if ticket == NO_TICKET:
                self.by_number[HOST_TIER].write(dst, *content)
            else:
                steps = self.ticket_steps(ticket)
                self._tickets.append(Copies(ticket, tiers, src, dst, steps, content))
        src, dst = plan.copy_src, plan.copy_dst
        self._cache[:, dst], self._garbage[dst] = self._cache[:, src], self._garbage[src]
