"""Tiny checkpoints of each family for text and images."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.image_writer import MARKS, write_any_checkpoint
from tests.small_engines import forked_ranks

__all__ = ["forked_ranks", "kind", "kind_folder", "mark"]


@pytest.fixture(scope="module", params=MARKS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def mark(kind: str) -> str:
    """Text of an image in a prompt."""
    return MARKS[kind]


@pytest.fixture(scope="module")
def kind_folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_any_checkpoint(tmp_path_factory.mktemp(kind), kind)
