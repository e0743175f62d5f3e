"""Exchange through shared memory, by kernels and in plain Python: ranks as threads of one process
here, which release the interpreter while they wait."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch

from quire.base.errors import EngineError, EngineLostError
from quire.base.platform import detect_platform
from quire.base.platform.shared_region import SLOT_BYTES, SharedRegion
from quire.ops.distributed import Collectives, PlainCollectives, together
from quire.ops.exchange import join_region
from quire.ops.native.binding import load_native, native_unavailable
from quire.ops.native.capture import CaptureArena, record_calls, replay_list
from quire.ops.native.team import Team
from quire.ops.norm.norm_rows.reference import norm_rows
from quire.ops.sampling.draw.cpu import bind
from tests.pairs import BY_PAIRS
from tests.waiting import WAIT_S

T = TypeVar("T")
SMALL = 4096
"""Bytes of a place, so that exchanges take several turns."""
KERNELS = [None] + ["avx2"] * (native_unavailable("avx2", detect_platform()) is None)


@pytest.fixture(params=KERNELS, ids=lambda isa: isa or "plain")
def isa(request: pytest.FixtureRequest) -> str | None:
    return request.param


class Ranks:
    """Ranks that meet in one region."""

    def __init__(self, size: int, isa: str | None, slot_bytes: int = SMALL) -> None:
        self.region = SharedRegion.create(size, slot_bytes)
        kernels = "reference" if isa is None else f"cpu_{isa}"
        self.teams = [Team(1) for _ in range(size)]
        self.collectives: list[Collectives] = [
            join_region(self.region, rank, kernels, team) for rank, team in enumerate(self.teams)
        ]

    def do(self, work: Callable[[int, Collectives], T]) -> list[T]:
        """Results of each rank."""
        with ThreadPoolExecutor(len(self.collectives)) as pool:
            return list(pool.map(work, range(len(self.collectives)), self.collectives))

    def num_exchanges(self) -> int:
        """Return the number of times that all ranks have met so far."""
        (count,) = {int(self.region.counts(rank)[0]) for rank in range(self.region.size)}
        return count


@pytest.fixture
def ranks(isa: str | None) -> Iterator[Callable[[int], Ranks]]:
    made: list[Ranks] = []

    def make(size: int) -> Ranks:
        made.append(Ranks(size, isa))
        return made[-1]

    yield make
    for each in made:
        each.region.close()


def given(size: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(size)
    if dtype == torch.int32:
        return [torch.randint(-(2**20), 2**20, shape, dtype=dtype) for _ in range(size)]
    return [torch.randn(shape).to(dtype) for _ in range(size)]


def as_tree(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce the parts in a tree, split at the largest power of two below their number."""
    if len(parts) == 1:
        return parts[0]
    left = 1 << (len(parts) - 1).bit_length() - 1
    one, other = as_tree(parts[:left], op), as_tree(parts[left:], op)
    return one + other if op == "sum" else torch.maximum(one, other)


@BY_PAIRS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_all_reduce(ranks: Any, op: Any, dtype: torch.dtype) -> None:
    """Turns red when ranks add in an order of their own, so that other numbers of ranks give other
    bits of a tree, or a part of a long tensor is lost."""
    for size, shape in ((2, (3, 37)), (2, (5, 1500)), (4, (1,)), (3, (2, 1025)), (7, (40,))):
        parts = given(size, *shape, dtype=dtype)
        got = ranks(size).do(lambda rank, group, x=parts: group.all_reduce(x[rank], op))
        assert all(torch.equal(each, as_tree(parts, op)) for each in got)


def test_nan_stays(ranks: Any) -> None:
    """Turns red when a maximum hides a NaN of one rank."""
    parts = given(2, 4)
    parts[0][1] = parts[1][2] = float("nan")
    for op in ("sum", "max"):
        for got in ranks(2).do(lambda rank, group, op=op: group.all_reduce(parts[rank], op)):
            assert got.isnan().tolist() == [False, True, True, False]


@BY_PAIRS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_sums_of_rows_are_rounded_once(ranks: Any, has_bias: bool, dtype: torch.dtype) -> None:
    """Turns red when the bias meets another column in a later turn, or each rank adds it."""
    parts, bias = given(2, 7, 700), torch.randn(700) if has_bias else None
    got = ranks(2).do(lambda rank, group: group.sum_rows(parts[rank], bias, dtype))
    total = parts[0] + parts[1]
    wanted = (total if bias is None else total + bias).to(dtype)
    assert all(torch.equal(each, wanted) for each in got)


def test_all_gather(ranks: Any) -> None:
    """Turns red when rows of several turns are put together wrongly."""
    for size, shape in ((2, (3, 5)), (3, (4, 700)), (2, (1, 3000))):
        parts = given(size, *shape)
        got = ranks(size).do(lambda rank, group, x=parts: group.all_gather(x[rank]))
        assert all(torch.equal(each, torch.cat(parts, -1)) for each in got)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_rows_of_a_shared_table(ranks: Any, id_dtype: torch.dtype) -> None:
    """Turns red when an id is looked up in another rank's part, the shorter last one included."""
    size, most, total = 3, 5, 13
    table = torch.randn(total, 600).to(torch.bfloat16)
    ids = torch.tensor([12, 0, 4, 5, 9, 10, 7, 0], dtype=id_dtype)

    def look_up(rank: int, group: Collectives) -> torch.Tensor:
        own = range(rank * most, min((rank + 1) * most, total))
        part = table[own.start : own.stop]
        return group.look_up(ids, own, most, lambda local: part[local.long()])

    assert all(torch.equal(each, table[ids.long()]) for each in ranks(size).do(look_up))


NORM_SHAPES = ((2, 5, 40), (3, 1, 257), (2, 1100, 19), (4, 3, 1024))
"""Ranks, rows, elements of each rank; 1100 rows take several turns."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_of_rows_that_ranks_share(ranks: Any, dtype: torch.dtype) -> None:
    """Turns red when a rank's mean is that of its own part, a row meets the sum of another one, or
    what lies beside the rows is changed."""
    tolerance = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    for size, rows, width in NORM_SHAPES:
        wide, weights = given(size, rows, width + 7, dtype=dtype), given(size, width, dtype=dtype)
        wanted = torch.cat([each[:, 3:-4] for each in wide], -1)
        norm_rows(wanted, torch.cat(weights), 1e-5)

        def norm(
            rank: int, group: Collectives, wide: Any = wide, weights: Any = weights
        ) -> torch.Tensor:
            x = wide[rank].clone()
            group.norm_rows(x[:, 3:-4], weights[rank], 1e-5)
            assert torch.equal(x[:, :3], wide[rank][:, :3])
            assert torch.equal(x[:, -4:], wide[rank][:, -4:])
            return x[:, 3:-4]

        got = torch.cat(ranks(size).do(norm), -1)
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def test_ranks_with_the_same_part_norm_it_alike(ranks: Any) -> None:
    """Two ranks may have one kv head. Turns red when the sum depends on who asks."""
    part, weight = given(1, 9, 33)[0], torch.randn(33)
    wanted = part.clone()
    norm_rows(wanted, weight, 1e-5)

    def norm(rank: int, group: Collectives) -> torch.Tensor:
        x = part.clone()
        group.norm_rows(x, weight, 1e-5)
        return x

    first, second = ranks(2).do(norm)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, wanted, rtol=1e-6, atol=1e-6)


def test_norms_of_shared_rows_are_captured(isa: str | None) -> None:
    """Turns red when a sum of squares is made, or used, by torch: a replay would leave it out."""
    if isa is None:
        pytest.skip("plain torch is not captured")
    made, parts, weight = Ranks(2, isa), given(2, 3, 40), torch.randn(40)
    before = [each.clone() for each in parts]
    graphs = []
    for team, group, x in zip(made.teams, made.collectives, parts, strict=True):
        with record_calls(team, CaptureArena(4096)) as calls:
            group.norm_rows(x, weight, 1e-5)
        graphs.append(replay_list(calls))
    assert all(map(torch.equal, parts, before))
    made.do(lambda rank, _: graphs[rank].run())
    wanted = torch.cat(before, -1)
    norm_rows(wanted, weight.repeat(2), 1e-5)
    torch.testing.assert_close(torch.cat(parts, -1), wanted, rtol=1e-6, atol=1e-6)
    made.region.close()


def rows_of_logits(total: int) -> torch.Tensor:
    """Rows [6, total] with nothing special, many equal ones, few finite ones, one far above the
    others, a NaN, none that is finite."""
    torch.manual_seed(total)
    rows = torch.randn(6, total) * 3
    rows[1] = rows[1].round()
    rows[2, torch.arange(total) % 97 != 5] = -torch.inf
    rows[3, total - 2] = 500.0
    rows[4, total // 3] = torch.nan
    rows[5] = -torch.inf
    return rows


@pytest.mark.parametrize(("size", "total"), [(2, 1023), (3, 1013), (4, 16), (2, 20_000)])
def test_draws_from_parts_are_those_from_whole_rows(
    ranks: Any, isa: str | None, size: int, total: int
) -> None:
    """With all filters on each row, at vocabularies whose parts begin at multiples of 4 and others.
    Turns red when a token gets other noise in its part, when a filter sees a part alone, or when
    the second of two equal ones wins."""
    if isa is None:
        pytest.skip("plain torch gathers")
    logits = rows_of_logits(total)
    filters = itertools.product(
        (0.0, 0.7, 3.0), (0, 1, 5, 40, 128, 129, total), (1.0, 0.9, 0.3), (0.0, 0.05), range(6)
    )
    *kinds, rows = (torch.tensor(each, dtype=torch.float64) for each in zip(*filters, strict=True))
    count, rows = len(rows), rows.long()
    seeds = torch.randint(-(2**63), 2**63 - 1, (count,))
    places = torch.arange(count), torch.randint(2**31, (count,))
    columns = (kinds[0], kinds[1].long(), kinds[2], kinds[3], seeds, *places)
    most = -(-total // size)
    parts = torch.nn.functional.pad(logits, (0, size * most - total)).split(most, dim=1)

    def draw(rank: int, group: Any) -> torch.Tensor:
        own = range(rank * most, min((rank + 1) * most, total))
        return group.draw(own, total, parts[rank].contiguous(), rows, *columns)

    wanted = bind(load_native(isa, Team(1)))(logits, rows, *columns)
    assert len(wanted.unique()) > 5
    for got in ranks(size).do(draw):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("slot_bytes", "count", "total", "wanted"),
    [(SLOT_BYTES, 40, 1000, 1), (SMALL, 40, 1000, 20), (SMALL, 10, 3000, 12 + 3)],
    ids=["one place holds all", "places hold two each", "none holds one"],
)
def test_rows_that_are_drawn_whole_cross_together(
    isa: str | None, slot_bytes: int, count: int, total: int, wanted: int
) -> None:
    """Fault: ranks met once for each such row. Turns red when they do again, or when greedy rows
    beside them take more than the one exchange that they share."""
    if isa is None:
        pytest.skip("plain torch gathers all rows beforehand")
    torch.manual_seed(count)
    made, most = Ranks(2, isa, slot_bytes), total // 2
    logits, rows = torch.randn(count + 4, total), torch.arange(count + 4)

    def num_exchanges(top_p: float, num_greedy: int) -> int:
        temperature = torch.ones(len(rows), dtype=torch.float64)
        temperature[count : count + num_greedy] = 0.0
        filters = (torch.zeros_like(rows), torch.full_like(temperature, top_p))
        places = (rows, torch.zeros_like(rows), rows)
        columns = (temperature, *filters, torch.zeros_like(temperature), *places)
        asked, parts = rows[: count + num_greedy], logits.split(most, dim=1)
        columns = tuple(each[: len(asked)] for each in columns)

        def draw(rank: int, group: Any) -> torch.Tensor:
            own = range(rank * most, (rank + 1) * most)
            return group.draw(own, total, parts[rank].contiguous(), asked, *columns)

        before, got = made.num_exchanges(), made.do(draw)
        assert torch.equal(got[0], bind(load_native(isa, Team(1)))(logits, asked, *columns))
        return made.num_exchanges() - before

    assert num_exchanges(top_p=0.9, num_greedy=0) == wanted
    assert num_exchanges(top_p=0.9, num_greedy=4) == wanted + 1
    made.region.close()


@pytest.mark.parametrize(
    ("place", "error"),
    [*((place, ValueError()) for place in range(4)), (1, SystemExit(3)), (3, SystemExit(3))],
)
def test_no_rank_skips_what_the_others_do(ranks: Any, place: int, error: BaseException) -> None:
    """One rank fails before, between or after the exchanges of its step: all ranks raise, and agree
    on what comes next. Turns red when one of them waits for another, or reads what was given for
    another exchange."""
    x = torch.ones(600)

    def step(rank: int, group: Collectives, fails: bool) -> torch.Tensor:
        y = x
        for i in range(4):
            if fails and rank == 1 and i == place:
                raise error
            if i < 3:
                y = group.all_reduce(x * (rank + 1) * (i + 1))
        return y

    def work(rank: int, group: Collectives) -> list[str]:
        outcomes: list[str] = []
        for fails in (False, True, True, False):
            try:
                got = together(group, lambda fails=fails: step(rank, group, fails))
            except (ValueError, SystemExit, EngineError) as raised:
                outcomes.append(type(raised).__name__)
            else:
                assert torch.equal(got, x * 18)
                outcomes.append("fine")
        return outcomes

    first, second, third = ranks(3).do(work)
    assert first == third == ["fine", "EngineError", "EngineError", "fine"]
    assert second == ["fine", type(error).__name__, type(error).__name__, "fine"]


def test_whoever_waits_is_told_that_the_group_is_over(ranks: Any) -> None:
    """Turns red when a rank waits for ever for one that has died."""
    group = ranks(2)
    errors: list[Exception] = []

    def wait() -> None:
        try:
            group.collectives[0].all_reduce(torch.ones(3))
        except EngineLostError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.05)  # until it sleeps, most likely; it must be told in any case
    group.region.abort()
    waiting.join(WAIT_S)
    assert len(errors) == 1
    with pytest.raises(EngineLostError):
        group.collectives[1].agree(is_fine=True)


def test_ranks_that_decide_differently_are_lost(ranks: Any) -> None:
    """Turns red when ranks go on whose rows hold different tokens."""

    def work(rank: int, group: Collectives) -> None:
        group.note(b"7")
        assert group.agree(is_fine=True)
        group.note(bytes([rank // 2]))
        with pytest.raises(EngineLostError, match="have drawn different tokens"):
            group.agree(is_fine=True)

    ranks(3).do(work)


def test_kernels_and_plain_python_have_one_layout() -> None:
    """Turns red when one of the two descriptions of the memory changes alone."""
    if "avx2" not in KERNELS:
        pytest.skip("there are no kernels")
    region = SharedRegion.create(2, SMALL)
    mixed = [
        join_region(region, 0, "cpu_avx2", Team(1)),
        PlainCollectives(region, 1),
    ]
    parts = given(2, 5, 400)

    def work(rank: int) -> torch.Tensor:
        total = mixed[rank].all_reduce(parts[rank])
        assert not mixed[rank].agree(is_fine=rank == 0)
        assert mixed[rank].agree(is_fine=True)
        return mixed[rank].all_gather(total)

    with ThreadPoolExecutor(2) as pool:
        for got in pool.map(work, range(2)):
            assert torch.equal(got, torch.cat([parts[0] + parts[1]] * 2, -1))
    region.close()


def test_the_memory_has_no_name() -> None:
    """Turns red when a killed engine leaves something in /dev/shm."""
    region = SharedRegion.create(2)
    assert os.readlink(f"/proc/self/fd/{region.descriptor}") == "/memfd:quire-ranks (deleted)"
    region.close()
