"""Tiny checkpoints of each family for text and images."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.image_writer import write_any_checkpoint

KINDS = ("smolvlm", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3")


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def kind_folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_any_checkpoint(tmp_path_factory.mktemp(kind), kind)
