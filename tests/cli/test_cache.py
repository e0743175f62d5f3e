"""`quire cache`: readings of a folder that an engine has written, and an end to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quire.entrypoints.cli.main import main
from tests.engine.test_laws import params
from tests.small_engines import Maker, small_engines

PROMPT = np.random.default_rng(2).integers(5, 900, 41).tolist()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def make(folder: Path) -> Iterator[Maker]:
    with small_engines(None, kv_disk=str(folder)) as maker:
        yield maker


def written(make: Maker) -> None:
    llm = make()
    llm.generate({"prompt_token_ids": PROMPT}, params(1, 8), use_tqdm=False)
    llm.shutdown()


def shown(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert main(["cache", *arguments]) == status
    out, err = capsys.readouterr()
    return out + err


def test_info_and_clear(make: Maker, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(make)
    [found] = json.loads(shown(capsys, "info", str(folder), "--json"))
    assert found["num_blocks"] == 12
    assert found["model"].endswith("bundled")
    assert not found["is_in_use"]
    assert 0 < found["num_bytes"] < found["max_bytes"]
    assert "12 of " in shown(capsys, "info", str(folder))
    assert "removed" in shown(capsys, "clear", str(folder))
    assert shown(capsys, "info", str(folder)) == "no stores\n"
    assert (folder / "key").exists()


def test_info_counts_pins(make: Maker, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm = make()
    llm.pin_prefix({"prompt_token_ids": PROMPT})
    llm.pin_prefix({"prompt_token_ids": PROMPT[1:]})
    llm.shutdown()
    [found] = json.loads(shown(capsys, "info", str(folder), "--json"))
    assert found["pins"] == 2
    assert "; 2 pinned prefixes" in shown(capsys, "info", str(folder))
    [pins] = folder.glob("*/pins")
    pins.write_bytes(b"")
    assert "its list of pinned prefixes is damaged" in shown(capsys, "info", str(folder))


def test_verify_finds_one_changed_bit(
    make: Maker, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(make)
    assert "; whole" in shown(capsys, "verify", str(folder))
    [slots] = folder.glob("*/slots")
    data = bytearray(slots.read_bytes())
    data[len(data) // 2] ^= 1
    slots.write_bytes(data)
    assert "; 1 damaged" in shown(capsys, "verify", str(folder), status=1)


def test_a_folder_in_use_is_read_and_not_cleared(
    make: Maker, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(make)
    llm = make()
    assert "an engine writes it" in shown(capsys, "info", str(folder))
    assert "Stop it first" in shown(capsys, "clear", str(folder), status=2)
    llm.generate({"prompt_token_ids": PROMPT}, params(1, 8), use_tqdm=False)
    assert llm.engine.client.stats().blocks_loaded_total == 10


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is no folder" in shown(capsys, "info", str(tmp_path / "none"), status=2)
