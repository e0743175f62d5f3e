"""A fixture that saves the time in which processes import torch and quire: one to three seconds of
a core, hundreds of times.

Each module and script starts as usual once in a run, and always when soaking. So does code on a
command line, and each process with variables that may change what imports do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.nursery import Nursery
from tests.profiles import SCALE

__all__ = ["quick_starts"]


NURSERY = pytest.StashKey[Nursery]()


@pytest.fixture(scope="module", autouse=True)
def quick_starts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start processes of a file from a nursery, in rooms whose `conftest.py` names this."""
    if SCALE > 1 or sys.platform != "linux":
        yield
        return
    stash = request.config.stash
    if NURSERY not in stash:
        stash[NURSERY] = nursery = Nursery()
        request.config.add_cleanup(nursery.close)
    with stash[NURSERY]:
        yield
