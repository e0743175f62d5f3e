"""The tiers beyond the device: carries out a plan's copies, and says which blocks were lost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np

from quire.compute.kv_transfer.block_copies import BlockCopies
from quire.compute.kv_transfer.host_pages import HostPages
from quire.protocol.step import NO_TICKET, IntArray, StepPlan, TicketFailure

__all__ = ["TierPages", "Tiers", "make_tiers"]

MESSAGE = "K/V were lost on the way to host memory or back"


class TierPages(Protocol):
    """Blocks in the places of one tier. A later copy sees what an earlier one wrote."""

    def copy_out(self, src: IntArray, dst: IntArray) -> Collection[int]:
        """Device blocks `src` to places `dst`, int32 [N]. Return the places that were not
        filled."""
        ...

    def copy_in(self, src: IntArray, dst: IntArray) -> Collection[int]:
        """Places `src` to device blocks `dst`, int32 [N]. Return the blocks that hold nothing of
        worth."""
        ...


class Tiers:
    """Makes the copies of plans, each with the tier that it names. Each has been made, in the order
    of the steps, when the next one is given; so a ticket ends with the plan that starts it.

    host: the first tier.
    """

    def __init__(self, host: HostPages, *others: TierPages) -> None:
        """others: further tiers, in the order of their numbers from 1 on."""
        self.host = host
        self._pages = (host, *others)
        self._lost: dict[int, list[int]] = {}  # by ticket

    def store(self, plan: StepPlan) -> None:
        """Copy blocks out to their places."""
        columns = (plan.store_tier, plan.store_src, plan.store_dst, plan.store_ticket)
        self._move(columns, lambda pages: pages.copy_out)

    def load(self, plan: StepPlan) -> None:
        """Copy places in to blocks."""
        columns = (plan.load_tier, plan.load_src, plan.load_dst, plan.load_ticket)
        self._move(columns, lambda pages: pages.copy_in)

    def _move(
        self,
        columns: tuple[IntArray, IntArray, IntArray, IntArray],
        copy_of: Callable[[TierPages], Callable[[IntArray, IntArray], Collection[int]]],
    ) -> None:
        of_tier, src, dst, tickets = columns
        for tier in sorted(set(of_tier.tolist())):
            own = of_tier == tier
            lost = copy_of(self._pages[tier])(src[own], dst[own])
            if lost:
                is_lost = own & np.isin(dst, list(lost))
                for ticket, place in zip(tickets[is_lost], dst[is_lost], strict=True):
                    self._lost.setdefault(int(ticket), []).append(int(place))

    def take_ended(
        self, started: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[TicketFailure, ...]]:
        """Return, of the tickets that plans have started, those that are done and those that
        failed. Once."""
        lost, self._lost = self._lost, {}
        lost.pop(NO_TICKET, None)
        done = tuple(ticket for ticket in started if ticket not in lost)
        failed = tuple(
            TicketFailure(ticket, np.array(blocks, np.int32), MESSAGE)
            for ticket, blocks in lost.items()
        )
        return done, failed


def make_tiers(copies: BlockCopies) -> Tiers:
    """Return all tiers of an engine, with the numbers that its sources of K/V have. copies: between
    the device and host memory."""
    return Tiers(HostPages(copies))
