"""Engines that are killed while they write to a disk, and what the next ones make of it."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

from quire.config.kv_disk.folder import KVFolder
from quire.config.kv_disk.records import read_records
from quire.plan.kv_cache.disk_index import DiskIndex
from tests.engine.disk_victim import NUM_PROMPTS, answer
from tests.engine.test_disk_prefixes import LLAMA
from tests.forked import REAL, Forked, template_of
from tests.models.families import write_checkpoint
from tests.profiles import SCALE
from tests.small_engines import small_engines

NUM_KILLS = 4 if SCALE == 1 else 200
LIMIT = 1_200_000
"""Room for half of the prompts' blocks."""
MIN_LINES, MAX_LINES, MAX_SECONDS = 4, 12, 0.05


VICTIM = "tests.engine.disk_victim:main"


def wanted(model: str) -> dict[int, list[int]]:
    """Answers of an engine without a disk."""
    with small_engines(model) as make:
        llm = make()
        return {index: answer(llm, index) for index in range(NUM_PROMPTS)}


def check_files(folder: Path) -> None:
    """The limit holds, and every block of the index is a whole chain."""
    for files, header in KVFolder(folder).stores():
        assert files.num_bytes <= LIMIT
        assert header.max_bytes <= LIMIT
        index = DiskIndex(header.num_slots, read_records(files.header, header.num_slots))
        index.check_invariants()


def run_and_kill(model: str, folder: Path, seed: int) -> list[dict[str, Any]]:
    """Answers of an engine before it was killed: after some answers, and some time."""
    rng, found = random.Random(seed), list[dict[str, Any]]()
    arguments = [model, str(folder), str(LIMIT), str(seed)]
    read, write = os.pipe()
    with os.fdopen(read) as lines:
        try:
            given = {0: 0, 1: write, 2: 2}
            victim = Forked(template_of(REAL).start(VICTIM, arguments, given))
        finally:
            os.close(write)
        assert lines.readline() == "ready\n"
        for _ in range(rng.randrange(MIN_LINES, MAX_LINES)):
            found.append(json.loads(lines.readline()))
        time.sleep(rng.random() * MAX_SECONDS)
        victim.kill()
        victim.wait()
    return found


def test_no_kill_brings_a_wrong_token(tmp_path: Path) -> None:
    model = str(tmp_path / "model")
    write_checkpoint(LLAMA, Path(model))
    expected, loaded = wanted(model), 0
    for seed in range(10 * NUM_KILLS):
        if seed >= NUM_KILLS and loaded:  # a disk that others keep busy may have saved little yet
            break
        for line in run_and_kill(model, tmp_path / "kv", seed):
            assert line["tokens"] == expected[line["index"]], f"after kill {seed}"
            loaded += line["loaded"]
        check_files(tmp_path / "kv")
    assert loaded > 0, "nothing was ever read"
    with small_engines(model, kv_disk=str(tmp_path / "kv"), kv_disk_bytes=LIMIT) as make:
        llm = make()
        assert {index: answer(llm, index) for index in range(NUM_PROMPTS)} == expected
        llm.engine.client._core.check_invariants()  # type: ignore[attr-defined]
