from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ops.tile_emulator import build_emulator, emulation

from quire.base.platform import detect_platform
from quire.ops import Op, Provider


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> tuple[Op, Provider]:
    """An operation and one of its providers, given indirectly; skips where that cannot run."""
    op, provider = request.param
    reason = provider.unavailable(detect_platform())
    if reason is not None:
        pytest.skip(f"{provider.name}: {reason}")
    return op, provider


@pytest.fixture(scope="session")
def emulator_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_emulator(tmp_path_factory.mktemp("emulator"))


@pytest.fixture(scope="module")
def tiles(emulator_library: Path) -> Iterator[ctypes.CDLL]:
    with emulation(emulator_library) as emulator:
        yield emulator
