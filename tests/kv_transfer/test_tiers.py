"""Copies of plans go to the tier and place that they name, and losses are told by ticket."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from quire.base.errors import EngineError
from quire.compute.kv_transfer.block_copies import DirectCopies
from quire.compute.kv_transfer.host_pages import HostPages
from quire.compute.kv_transfer.tiers import Tiers
from quire.ops.kv.swap_blocks.reference import swap_blocks
from quire.protocol.step import NO_TICKET, IntArray, StepPlan

NUM_BLOCKS, NUM_PLACES = 8, 6


def ints(*numbers: int) -> IntArray:
    return np.array(numbers, np.int32)


def broken(*args: torch.Tensor) -> None:
    raise EngineError(f"{len(args)} arguments, and no copy")


def tiers_of(pages: torch.Tensor, *swaps: Callable[..., None]) -> Tiers:
    return Tiers(*(HostPages(DirectCopies(pages, NUM_PLACES, swap)) for swap in swaps))


def make_pages() -> torch.Tensor:
    pages = torch.arange(2 * NUM_BLOCKS * 4, dtype=torch.int64).to(torch.uint8)
    return pages.view(2, NUM_BLOCKS, 4).clone()


def test_each_copy_goes_to_its_tier() -> None:
    """Equal places of two tiers hold different blocks."""
    pages = make_pages()
    before, tiers = pages.clone(), tiers_of(pages, swap_blocks, swap_blocks)
    out = StepPlan(
        0,
        store_src=ints(1, 2, 3),
        store_tier=ints(0, 1, 1),
        store_dst=ints(5, 5, 0),
        store_ticket=ints(NO_TICKET, 4, 4),
    )
    tiers.store(out)
    assert tiers.take_ended(out.started) == ((4,), ())
    pages.fill_(0)
    back = StepPlan(
        1,
        load_tier=ints(1, 0, 1),
        load_src=ints(0, 5, 5),
        load_dst=ints(6, 7, 0),
        load_ticket=ints(8, 9, 9),
    )
    tiers.load(back)
    assert tiers.take_ended(back.started) == ((8, 9), ())
    for was, now in ((3, 6), (1, 7), (2, 0)):
        assert torch.equal(pages[:, now], before[:, was])
    assert not pages[:, 1:6].any()


def test_a_tier_that_fails_loses_its_own_copies() -> None:
    pages = make_pages()
    tiers = tiers_of(pages, swap_blocks, broken)
    plan = StepPlan(
        0,
        store_src=ints(1, 2, 3, 4),
        store_tier=ints(0, 1, 1, 1),
        store_dst=ints(3, 3, 2, 1),
        store_ticket=ints(4, 5, NO_TICKET, 5),
    )
    tiers.store(plan)
    done, failed = tiers.take_ended(plan.started)
    assert done == (4,)
    assert [(each.ticket, each.blocks.tolist()) for each in failed] == [(5, [3, 1])]
    assert tiers.take_ended(()) == ((), ())


def test_a_place_that_was_not_filled_is_told_when_it_is_read() -> None:
    """Also of copies that nobody waited for; a later copy mends it."""
    pages = make_pages()
    calls = iter([broken, swap_blocks, swap_blocks, swap_blocks])
    tiers = tiers_of(pages, lambda *args: next(calls)(*args))
    lost = StepPlan(0, store_src=ints(1), store_tier=ints(0), store_dst=ints(3),
                    store_ticket=ints(NO_TICKET))  # fmt: skip
    back = StepPlan(1, load_tier=ints(0), load_src=ints(3), load_dst=ints(6), load_ticket=ints(7))
    tiers.store(lost)
    tiers.load(back)
    _, (failure,) = tiers.take_ended(back.started)
    assert (failure.ticket, failure.blocks.tolist()) == (7, [6])
    tiers.store(lost)
    tiers.load(back)
    assert tiers.take_ended(back.started) == ((7,), ())
    assert torch.equal(pages[:, 6], pages[:, 1])
