"""Exchange between hosts, over gloo: ranks as threads of one process here."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch

from quire.base.errors import EngineLostError
from quire.ops.distributed import Collectives
from quire.ops.distributed.gloo import GlooCollectives, GlooMeeting, GlooStore
from tests.distributed.test_collectives import Ranks, given

T = TypeVar("T")
HOST = "127.0.0.1"


def do(groups: list[GlooCollectives], work: Callable[[int, Collectives], T]) -> list[T]:
    """Results of each rank."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(work, range(len(groups)), groups))


@pytest.fixture(params=[2, 3])
def groups(request: pytest.FixtureRequest) -> list[GlooCollectives]:
    size = request.param
    store = GlooStore(HOST)
    meeting = GlooMeeting(size, HOST, store.port, HOST)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(meeting.join, range(size)))


def test_hosts_give_the_bits_of_one_host(groups: list[GlooCollectives]) -> None:
    """Turns red when ranks of several hosts add in another order, or get the parts of another
    rank."""
    size = len(groups)
    wide, whole = given(size, 5, 37), given(size, 3, 8, dtype=torch.int32)
    halves, weight = given(size, 4, 9, dtype=torch.bfloat16), torch.randn(37)
    table, ids = torch.randn(4 * size, 6), torch.tensor([0, 4 * size - 1, 3, 4])

    def work(rank: int, group: Collectives) -> list[Any]:
        own = range(4 * rank, 4 * rank + 4)
        x = wide[rank].clone()
        group.norm_rows(x, weight, 1e-5)
        return [
            x,
            group.all_reduce(wide[rank]),
            group.all_reduce(halves[rank], "max"),
            group.all_reduce(whole[rank]),
            group.sum_rows(wide[rank], weight, torch.bfloat16),
            group.all_gather(halves[rank]),
            group.look_up(ids, own, 4, lambda local: table[own.start : own.stop][local]),
        ]

    one_host = Ranks(size, None)
    for got, wanted in zip(do(groups, work), one_host.do(work), strict=True):
        assert [each.dtype for each in got] == [each.dtype for each in wanted]
        assert all(map(torch.equal, got, wanted))
    one_host.region.close()


def test_ranks_that_decide_differently_are_lost(groups: list[GlooCollectives]) -> None:
    """Turns red when ranks go on whose rows hold different tokens."""

    def work(rank: int, group: Collectives) -> None:
        group.note(b"7")
        assert group.agree(is_fine=True)
        group.note(bytes([rank // 2]))
        group.note(bytes([rank]))
        with pytest.raises(EngineLostError, match="have drawn different tokens"):
            group.agree(is_fine=True)

    do(groups, work)


def test_a_rank_that_failed_ends_the_group(groups: list[GlooCollectives]) -> None:
    """Turns red when it waits for peers that wait for it in another exchange."""
    with pytest.raises(EngineLostError):
        groups[0].agree(is_fine=False)


def test_whoever_waits_for_a_peer_learns_of_its_loss() -> None:
    """Turns red when a start waits for a rank that has ended."""

    def check() -> None:
        raise EngineLostError("the host of rank 1 is lost")

    store = GlooStore(HOST)
    with pytest.raises(EngineLostError, match="the host of rank 1 is lost"):
        GlooMeeting(2, HOST, store.port, HOST, check).join(0)
