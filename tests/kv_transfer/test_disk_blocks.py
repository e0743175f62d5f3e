"""Blocks go to slots of a file and come back whole, or are lost by name."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.compute.kv_transfer import disk_blocks
from quire.compute.kv_transfer.block_file import SystemFile
from quire.compute.kv_transfer.disk_blocks import DiskBlocks, open_disk
from quire.compute.kv_transfer.pool_memory import PoolMemory
from quire.config.kv_disk.records import HEADER_BYTES, RECORD, read_records
from quire.protocol.block_moves import BlockMove, MoveKind, MoveOutcome, SavedBlock
from tests.waiting import WAIT_S

NUM_BLOCKS, NUM_SLOTS, SEGMENT, PIECES = 6, 4, 4096, 3
SLOT = SEGMENT * PIECES
PLENTY = 2**60


def ints(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def names(*numbers: int) -> tuple[SavedBlock, ...]:
    return tuple(SavedBlock(0, bytes([each]) * 16) for each in numbers)


def make_pages(seed: int = 0) -> torch.Tensor:
    """Pages that no file may be read past the page cache into, as few allocators align so."""
    generator = torch.Generator().manual_seed(seed)
    shape = (PIECES, NUM_BLOCKS, SEGMENT)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("slots", "header"):
        (tmp_path / name).write_bytes(bytes(HEADER_BYTES * (name == "header")))
    return tmp_path / "slots", tmp_path / "header"


def opened(paths: tuple[Path, Path]) -> DiskBlocks:
    return open_disk(*paths, SLOT, NUM_SLOTS, is_writer=True, lock=os.open(paths[0], os.O_RDONLY))


def move(disk: DiskBlocks, pages: torch.Tensor, *of: Any) -> list[int]:
    """Destinations that a move lost. of: kind, blocks, slots, names."""
    done = Future[MoveOutcome]()
    disk.start(BlockMove(0, *of), PoolMemory(pages), done)
    return done.result(WAIT_S).lost.tolist()


def test_blocks_come_back_into_others(paths: tuple[Path, Path]) -> None:
    pages, disk = make_pages(), opened(paths)
    before = pages.clone()
    assert move(disk, pages, MoveKind.SAVE, ints(1, 4, 2), ints(3, 0, 1), names(1, 4, 2)) == []
    pages.zero_()
    assert move(disk, pages, MoveKind.LOAD, ints(0, 5), ints(0, 3), names(4, 1)) == []
    assert torch.equal(pages[:, 0], before[:, 4])
    assert torch.equal(pages[:, 5], before[:, 1])
    assert not pages[:, 1:5].any(), "a block was written that nobody asked for"
    disk.close()
    assert np.count_nonzero(read_records(paths[1], NUM_SLOTS)["seal"]) == 3
    again = opened(paths)
    assert move(again, pages, MoveKind.LOAD, ints(2), ints(1), names(2)) == []
    assert torch.equal(pages[:, 2], before[:, 2])
    again.close()


def test_what_is_not_there_is_lost_and_the_rest_is_not(paths: tuple[Path, Path]) -> None:
    pages, disk = make_pages(), opened(paths)
    assert move(disk, pages, MoveKind.SAVE, ints(0, 1), ints(0, 1), names(1, 2)) == []
    assert move(disk, pages, MoveKind.LOAD, ints(3, 4, 5), ints(0, 1, 2), names(1, 9, 3)) == [4, 5]
    with paths[0].open("r+b") as file:
        file.seek(SLOT + 7)
        file.write(b"changed")
    assert move(disk, pages, MoveKind.LOAD, ints(3, 4), ints(0, 1), names(1, 2)) == [4]
    assert move(disk, pages, MoveKind.SAVE, ints(0), ints(NUM_SLOTS), names(1)) == [NUM_SLOTS]
    assert move(disk, pages, MoveKind.CLEAR, ints(), ints(), ()) == []
    assert move(disk, pages, MoveKind.LOAD, ints(3), ints(0), names(1)) == [3]
    assert paths[0].stat().st_size == 0
    disk.close()


def test_hits_are_noted_in_the_records_of_their_blocks(paths: tuple[Path, Path]) -> None:
    """Payloads stay, and so does what another block has in its slot meanwhile."""
    pages, disk = make_pages(), opened(paths)
    assert move(disk, pages, MoveKind.SAVE, ints(0, 1), ints(0, 2), names(1, 2)) == []
    noted = [SavedBlock(0, bytes([each]) * 16, value=4.5, hits=3) for each in (1, 9, 7)]
    assert move(disk, pages, MoveKind.NOTE, ints(), ints(0, 2, 3), tuple(noted)) == []
    records = read_records(paths[1], NUM_SLOTS)
    assert (records["hits"].tolist(), records["value"].tolist()) == ([3, 0, 0], [4.5, 0.0, 0.0])
    assert np.count_nonzero(records["seal"]) == 2
    before = pages.clone()
    assert move(disk, pages, MoveKind.LOAD, ints(3, 4), ints(0, 2), names(1, 2)) == []
    assert torch.equal(pages[:, 3:5], before[:, :2])
    disk.close()


def test_a_reserve_of_the_file_system_stays_free(paths: tuple[Path, Path]) -> None:
    """Slots that are there may be written again; nothing grows."""
    pages, room = make_pages(), [PLENTY]
    files = [SystemFile(path, is_writer=True) for path in paths]
    disk = DiskBlocks(files[0], files[1], SLOT, NUM_SLOTS, lambda: (room[0], PLENTY), 0)
    assert move(disk, pages, MoveKind.SAVE, ints(0), ints(0), names(1)) == []
    room[0] = PLENTY // 100
    assert move(disk, pages, MoveKind.SAVE, ints(1, 2), ints(0, 1), names(2, 3)) == [1]
    assert paths[0].stat().st_size == SLOT
    disk.close()


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_without_direct_writes(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """It takes the flag, and refuses the call."""
    refused = 0

    def refusing(call: Any) -> Any:
        def made(file: int, pieces: Sequence[memoryview], offset: int) -> int:
            nonlocal refused
            if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
                refused += 1
                raise OSError(error, "refused")
            return call(file, pieces, offset)

        return made

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    pages, disk = make_pages(), opened(paths)
    before = pages.clone()
    assert move(disk, pages, MoveKind.SAVE, ints(1, 2), ints(0, 1), names(1, 2)) == []
    pages.zero_()
    assert move(disk, pages, MoveKind.LOAD, ints(1), ints(0), names(1)) == []
    assert torch.equal(pages[:, 1], before[:, 1])
    assert refused <= 1, "it asked again and again"
    disk.close()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.ESTALE])
def test_errors_of_a_disk_lose_blocks_alone(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    pages, disk = make_pages(), opened(paths)
    assert move(disk, pages, MoveKind.SAVE, ints(0), ints(0), names(1)) == []

    def fails(*_: Any) -> int:
        raise OSError(error, "no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fails)
        patch.setattr(os, "preadv", fails)
        assert move(disk, pages, MoveKind.SAVE, ints(1), ints(1), names(2)) == [1]
        assert move(disk, pages, MoveKind.LOAD, ints(5), ints(0), names(1)) == [5]
    assert move(disk, pages, MoveKind.LOAD, ints(5), ints(0), names(1)) == []
    assert torch.equal(pages[:, 5], pages[:, 0])
    disk.close()


def test_a_read_that_hangs_does_not_hold_the_end_up(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine may write then."""
    monkeypatch.setattr(disk_blocks, "SECONDS_TO_CLOSE", 0.1)
    pages, disk = make_pages(), opened(paths)
    assert move(disk, pages, MoveKind.SAVE, ints(0), ints(0), names(1)) == []
    fcntl.flock(disk._lock or -1, fcntl.LOCK_EX)
    event = threading.Event()
    monkeypatch.setattr(disk._slots, "read", lambda *_: event.wait(WAIT_S))
    disk.start(BlockMove(0, MoveKind.LOAD, ints(1), ints(0), names(1)), PoolMemory(pages), Future())
    closing = threading.Thread(target=disk.close)
    closing.start()
    closing.join(WAIT_S / 2)
    is_closed = not closing.is_alive()
    event.set()
    closing.join(WAIT_S)
    assert is_closed
    with paths[0].open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


ENDS = """
import sys, time
from tests.kv_transfer.test_disk_blocks import *

disk_blocks.SECONDS_TO_CLOSE = float(sys.argv[3])
disk = opened((Path(sys.argv[1]), Path(sys.argv[2])))
write = disk._slots.write
disk._slots.write = lambda *given: (time.sleep(float(sys.argv[4])), write(*given))
save = BlockMove(0, MoveKind.SAVE, ints(0), ints(0), names(1))
disk.start(save, PoolMemory(make_pages()), Future())
"""
"""A program that does not close its disk. Arguments: paths, seconds to close, seconds of a call."""


@pytest.mark.parametrize(("to_close", "of_call", "lost"), [(0.1, 3600, [1]), (60, 0.5, [])])
def test_a_process_ends_with_its_saves_but_not_with_a_disk_that_hangs(
    paths: tuple[Path, Path], to_close: float, of_call: float, lost: list[int]
) -> None:
    """Would catch a thread that the interpreter waits for at its end."""
    given = [*map(str, paths), str(to_close), str(of_call)]
    subprocess.run([sys.executable, "-c", ENDS, *given], check=True, timeout=WAIT_S)
    pages, disk = make_pages(), opened(paths)
    assert move(disk, pages, MoveKind.LOAD, ints(1), ints(0), names(1)) == lost
    disk.close()


@pytest.mark.parametrize("kind", [MoveKind.SAVE, MoveKind.LOAD])
def test_a_cancelled_move_leaves_the_pool_alone(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, kind: MoveKind
) -> None:
    """It ends at once, though the disk hangs; what the call brings later goes nowhere."""
    pages, disk = make_pages(), opened(paths)
    kept = pages.clone()
    assert move(disk, pages, MoveKind.SAVE, ints(0, 1), ints(0, 1), names(1, 2)) == []
    hangs, goes_on = threading.Event(), threading.Event()
    name = "write" if kind is MoveKind.SAVE else "read"
    call = getattr(disk._slots, name)

    def waits(*given: Any) -> None:
        hangs.set()
        goes_on.wait(WAIT_S)
        call(*given)

    with monkeypatch.context() as patch:
        patch.setattr(disk._slots, name, waits)
        done = Future[MoveOutcome]()
        under_way = BlockMove(7, kind, ints(2, 3), ints(0, 2), names(1, 3))
        disk.start(under_way, PoolMemory(pages), done)
        assert hangs.wait(WAIT_S)
        disk.cancel(7)
        assert done.done()
        assert done.result().lost.tolist() == under_way.all_lost.lost.tolist()
        disk.cancel(7)  # twice does no harm
        pages.zero_()  # others have the blocks now
        goes_on.set()
        assert move(disk, pages, kind, ints(), ints(), ()) == [], "the thread has not gone on"
    assert not pages.any(), "a cancelled load has written the pool"
    assert move(disk, pages, MoveKind.SAVE, ints(4), ints(0), names(9)) == []
    assert move(disk, pages, MoveKind.LOAD, ints(5, 3), ints(1, 0), names(2, 9)) == []
    assert torch.equal(pages[:, 5], kept[:, 1])
    assert not pages[:, 3].any()
    disk.close()


def test_a_link_is_not_followed(paths: tuple[Path, Path]) -> None:
    paths[0].rename(paths[0].with_name("other"))
    paths[0].symlink_to("other")
    with pytest.raises(OSError, match="symbolic links"):
        SystemFile(paths[0], is_writer=True)


def test_a_record_has_a_cache_line() -> None:
    """So that no write of one can be cut by another's."""
    assert RECORD.itemsize == 64
    assert HEADER_BYTES % RECORD.itemsize == 0
