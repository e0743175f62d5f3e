"""The ring that carries plans to the ranks."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator

import pytest

from quire.base.errors import EngineError
from quire.compute.executor.processes.ring import RingReader, RingWriter, create_ring
from tests.waiting import WAIT_S

CAPACITY = 4096


class Ring:
    """A ring with readers in this process."""

    def __init__(self, num_readers: int) -> None:
        self.descriptor = create_ring(CAPACITY)
        self.wakeups = [os.eventfd(0) for _ in range(num_readers)]
        self.is_over = False
        self.writer = RingWriter(self.descriptor, self.wakeups, lambda: self.is_over)
        self.readers = [
            RingReader(self.descriptor, i, wakeup) for i, wakeup in enumerate(self.wakeups)
        ]


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring(2)
    yield made
    for descriptor in (made.descriptor, *made.wakeups):
        os.close(descriptor)


def test_all_readers_get_all_messages_in_order(ring: Ring) -> None:
    """Turns red when a message is lost or torn where the ring begins again, or one is longer than
    the ring."""
    rng = random.Random(3)
    sizes = [0, 1, CAPACITY - 5, CAPACITY, 5 * CAPACITY, *(rng.randrange(900) for _ in range(300))]
    wanted = [(i % 3 + 1, rng.randbytes(size)) for i, size in enumerate(sizes)]
    got: list[list[tuple[int, bytes]]] = [[], []]

    def read(index: int) -> None:
        for _ in wanted:
            got[index].append(ring.readers[index].read())

    threads = [threading.Thread(target=read, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for kind, message in wanted:
        ring.writer.write(kind, message)
    for thread in threads:
        thread.join(WAIT_S)
    assert got == [wanted, wanted]


def test_a_writer_does_not_wait_for_the_dead(ring: Ring) -> None:
    """Turns red when a core hangs because a rank reads no more."""
    ring.writer.write(1, bytes(CAPACITY - 100))
    ring.is_over = True
    with pytest.raises(EngineError, match="take no more steps"):
        ring.writer.write(1, bytes(200))
