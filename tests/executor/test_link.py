"""The connection between hosts: the most that a peer that nobody knows may take."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from quire.base.errors import EngineLostError
from quire.compute.executor.ray.link import Link
from quire.compute.executor.ray.messages import HostMessage
from tests.waiting import WAIT_S

Ends = tuple[Link, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = socket.create_connection(server.getsockname())
        own, _ = server.accept()
    link = Link(own)
    yield link, peer
    link.close()
    peer.close()


def test_a_message_of_another_length_is_not_read(ends: Ends) -> None:
    """Turns red when a peer's length decides how much memory is taken."""
    link, peer = ends
    peer.sendall(struct.pack("<IB", 2**32 - 1, HostMessage.HELLO))
    with pytest.raises(EngineLostError, match="4294967295 bytes, where 4096 are the most"):
        link.receive(most=4096, within=WAIT_S)


def test_beats_do_not_lengthen_the_wait(ends: Ends) -> None:
    """Turns red when a peer that only says that it lives holds up a start."""
    link, peer = ends
    other = Link(peer)  # it beats
    with pytest.raises(EngineLostError, match="did not come in time"):
        link.receive(most=4096, within=0.3)
    other.close()


def test_a_message_within_the_bounds_is_read(ends: Ends) -> None:
    link, peer = ends
    peer.sendall(struct.pack("<IB", 2, HostMessage.HELLO) + b"hi")
    assert link.receive(most=2, within=WAIT_S) == (HostMessage.HELLO, b"hi")
