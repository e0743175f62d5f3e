from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ops.tile_emulator import build_emulator, emulation


@pytest.fixture(scope="session")
def emulator_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_emulator(tmp_path_factory.mktemp("emulator"))


@pytest.fixture(scope="module")
def tiles(emulator_library: Path) -> Iterator[ctypes.CDLL]:
    with emulation(emulator_library) as emulator:
        yield emulator
