"""Pinned prefixes that outlive their engine: the list beside the K/V, and the blocks themselves."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM
from quire.base.telemetry.flight.record import FlightRecorder
from quire.base.telemetry.flight.stacks import StackPlace
from quire.config.kv_disk.folder import KVFolder
from quire.config.kv_disk.pins import read_pins, write_pins
from quire.config.settings import EngineSettings
from quire.engine.build import BuiltCore, build_core
from quire.engine.core import pin_list
from quire.protocol.control import ListPins
from quire.protocol.pins import KeptPin, PinnedPrefix
from tests.engine.test_disk_prefixes import LLAMA, OTHERS, ask, is_saved
from tests.engine.test_laws import assert_same
from tests.forked import REAL, Forked, template_of
from tests.models.families import write_checkpoint
from tests.small_engines import SMALL, Maker, small_engines
from tests.waiting import WAIT_S, wait_for

PREFIX = np.random.default_rng(6).integers(5, 900, 30).tolist()
PROMPT = [*PREFIX, 7, 8]
FULL_BLOCKS = 7
"""Blocks of four tokens; two tokens are the tail."""


@pytest.fixture
def disk(tmp_path: Path) -> str:
    return str(tmp_path / "kv")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("llama")
    write_checkpoint(LLAMA, path)
    return str(path)


@pytest.fixture
def make(model: str, disk: str) -> Iterator[Maker]:
    with small_engines(model, kv_disk=disk, kv_disk_bytes="64MB") as maker:
        yield maker


def pin(llm: LLM, token_ids: list[int] = PREFIX, *, salt: str = "", **more: Any) -> PinnedPrefix:
    prompt: dict[str, Any] = {"prompt_token_ids": token_ids}
    return llm.pin_prefix({**prompt, "cache_salt": salt} if salt else prompt, **more)


def listed(llm: LLM) -> list[tuple[str, str, int]]:
    return [(each.key, each.name, each.num_tokens) for each in llm.pinned_prefixes()]


def loaded(llm: LLM) -> int:
    return llm.engine.client.stats().blocks_loaded_total


def list_of(disk: str) -> Path:
    (store,) = KVFolder(Path(disk)).all_files()
    return store.pins


def in_peace(model: str, prompt: list[int]) -> Any:
    with small_engines(model) as plain:
        return ask(plain(), prompt)


def test_a_pin_outlives_its_engine(make: Maker, model: str, disk: str) -> None:
    """Its K/V come from the disk, and its tail is computed. A request uses all of it."""
    cold = in_peace(model, PROMPT)
    llm = make()
    pin(llm)
    before = listed(llm)
    wait_for(lambda: is_saved(llm), "the saves to end")
    llm.shutdown()
    assert list_of(disk).stat().st_mode & 0o777 == 0o600
    again = make()
    assert listed(again) == before
    assert loaded(again) == FULL_BLOCKS
    assert again.pinned_prefixes()[0].seconds_left == float("inf")
    warm = ask(again, PROMPT)
    assert warm.num_cached_tokens == len(PREFIX)
    assert_same([warm], [cold])
    assert again.pinned_prefixes()[0].hits == 1
    assert again.unpin_prefix(again.pinned_prefixes()[0])
    again.engine.client._core.check_invariants()  # type: ignore[attr-defined]
    again.shutdown()
    assert make().pinned_prefixes() == ()


def test_pins_keep_their_salts_and_times(make: Maker) -> None:
    llm = make()
    pin(llm, salt="one", ttl_s=1000.0)
    pin(llm, salt="two")
    before = listed(llm)
    llm.shutdown()
    again = make()
    assert listed(again) == before
    left = [each.seconds_left for each in again.pinned_prefixes()]
    assert 0 < left[0] < 1000.0 and left[1] == float("inf")
    assert ask(again, PROMPT).num_cached_tokens == 0
    assert ask(again, PROMPT, salt="one").num_cached_tokens == len(PREFIX)
    pin(again, salt="one", ttl_s=5000.0)
    again.shutdown()
    third = make()
    assert {each[0] for each in listed(third)} == {each[0] for each in before}
    assert max(each.seconds_left for each in third.pinned_prefixes()[:2]) > 1000.0


def test_a_pin_that_ended_does_not_come_back(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()
    pin(llm, OTHERS[0], ttl_s=1000.0)
    kept = pin(llm)
    ended = pin(llm, OTHERS[1])
    assert llm.unpin_prefix(ended)
    llm.shutdown()
    later = time.time() + 1000.0
    monkeypatch.setattr(time, "time", lambda: later)
    assert [each.key for each in make().pinned_prefixes()] == [kept.key]


@pytest.mark.parametrize("fault", ["flipped", "cut", "gone"])
def test_lost_blocks_of_a_pin_are_computed_at_the_start(
    make: Maker, model: str, disk: str, fault: str
) -> None:
    llm = make()
    pin(llm)
    before = listed(llm)
    wait_for(lambda: is_saved(llm), "the saves to end")
    llm.shutdown()
    slots = list_of(disk).with_name("slots")
    if fault == "flipped":
        data = bytearray(slots.read_bytes())
        data[100] ^= 1
        slots.write_bytes(data)
    elif fault == "cut":
        with slots.open("r+b") as file:
            file.truncate(0)
    else:
        slots.unlink()
        slots.with_name("header").unlink()
    again = make()
    assert listed(again) == before
    assert loaded(again) == 0 if fault != "flipped" else loaded(again) < FULL_BLOCKS
    warm = ask(again, PROMPT)
    assert warm.num_cached_tokens == len(PREFIX)
    assert_same([warm], [in_peace(model, PROMPT)])
    wait_for(lambda: is_saved(again), "the saves to end")
    again.shutdown()
    assert loaded(make()) == FULL_BLOCKS, "what was lost was not saved again"


@pytest.mark.parametrize("fault", ["cut", "foreign"])
def test_a_list_that_cannot_be_read_is_a_warning(
    make: Maker, disk: str, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make()
    pin(llm)
    llm.shutdown()
    path = list_of(disk)
    if fault == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        make(block_size=8).shutdown()
        other = next(s for s in KVFolder(Path(disk)).all_files() if s.pins != path)
        other.pins.write_bytes(path.read_bytes())
    with caplog.at_level(logging.WARNING, logger="quire"):
        again = make(block_size=4 if fault == "cut" else 8)
    assert again.pinned_prefixes() == ()
    assert "the pins of an earlier engine are lost" in caplog.text
    pin(again)
    again.shutdown()
    assert len(make(block_size=4 if fault == "cut" else 8).pinned_prefixes()) == 1


@pytest.mark.parametrize("is_later", [True, False])
def test_a_list_that_was_not_written_is_tried_again(
    make: Maker,
    disk: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    is_later: bool,
) -> None:
    """Fault: a disk that fails for a moment leaves the list behind, though no pin changes again."""
    llm = make()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="quire"):
        patch.setattr(pin_list, "write_pins", no_space)
        kept = pin(llm)
        wait_for(lambda: "not kept" in caplog.text, "the warning")
    if is_later:
        monkeypatch.setattr(pin_list, "SECONDS_TO_RETRY", 0.0)
        ask(llm, PROMPT)
        wait_for(list_of(disk).exists, "the list")
    llm.shutdown()
    assert [each.key for each in make().pinned_prefixes()] == [kept.key]


def no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_pin_that_does_not_fit_any_more_is_a_warning(
    make: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make()
    small, large = pin(llm, PREFIX[:5]), pin(llm, [*PREFIX, *PREFIX])
    assert large.num_blocks == 15
    llm.shutdown()
    with caplog.at_level(logging.WARNING, logger="quire"):
        again = make(num_kv_blocks=24)
    assert [each.key for each in again.pinned_prefixes()] == [small.key]
    assert "not pinned again" in caplog.text


def test_a_reader_has_its_own_pins(make: Maker) -> None:
    writer = make()
    kept = pin(writer)
    reader = make()
    assert reader.pinned_prefixes() == ()
    pin(reader, OTHERS[0])
    reader.shutdown()
    writer.shutdown()
    assert [each.key for each in make().pinned_prefixes()] == [kept.key]


@pytest.mark.parametrize("is_sibling", [True, False])
def test_a_replica_that_reads_keeps_what_its_server_keeps(
    model: str, disk: str, tmp_path: Path, *, is_sibling: bool
) -> None:
    """Fault: a reader that is ready first names no store, so a front begins without sessions."""
    given: dict[str, Any] = {**SMALL, "kv_disk": disk, "kv_disk_bytes": 2**26}
    settings = EngineSettings(model=model, data_parallel_size=2, **given)

    def replica() -> BuiltCore:
        flight, stacks = FlightRecorder(), StackPlace(str(tmp_path), "core")
        return build_core(settings, print, lambda _: None, print, flight=flight, stacks=stacks)

    replica().core.shutdown()
    ((files, header),) = KVFolder(Path(disk)).stores()
    kept = KeptPin("kept", "", "", np.asarray(PREFIX, np.int32), None)
    write_pins(files.pins, header.identity, [kept])
    with contextlib.ExitStack() as cores:
        writer = replica()
        cores.callback(writer.core.shutdown)
        if not is_sibling:
            (files.folder / "lock").write_text("1")
        reader = replica()
        cores.callback(reader.core.shutdown)
        for each, holds in ((writer, True), (reader, is_sibling)):
            pins = each.core.control(ListPins(), 0.0).pins
            assert [pin.name for pin in pins] == ["kept"] * holds
            assert each.kv_store == str(files.folder) * holds


def test_pinned_blocks_are_the_last_to_leave_the_disk(make: Maker) -> None:
    """Other prompts are used more, and are more than fit."""
    llm = make(kv_disk_bytes=2**20)
    pin(llm)
    for turn in range(3):
        for prompt in OTHERS:
            ask(llm, [*prompt[:40], turn])
        wait_for(lambda: is_saved(llm), "the saves to end")
    stats = llm.engine.client.stats()
    assert stats.blocks_removed_total > 0, "the disk was never full"
    llm.shutdown()
    assert loaded(make(kv_disk_bytes=2**20)) == FULL_BLOCKS


def victim() -> int:
    """Pin a prefix, say its key, say when it is saved, and wait to be killed."""
    disk, model = sys.argv[1:]
    with small_engines(model, kv_disk=disk, kv_disk_bytes="64MB") as make:
        llm = make()
        sys.stdout.write(f"{pin(llm).key}\n")
        wait_for(lambda: is_saved(llm), "the saves to end")
        ((files, header),) = KVFolder(Path(disk)).stores()
        wait_for(lambda: read_pins(files.pins, header.identity), "the list")
        sys.stdout.write("saved\n")
        sys.stdout.flush()
        signal.pause()
    return 0


def test_a_pin_outlives_a_kill(make: Maker, model: str, disk: str) -> None:
    read, write = os.pipe()
    with os.fdopen(read) as lines:
        try:
            given = {0: 0, 1: write, 2: 2}
            function = f"{victim.__module__}:{victim.__name__}"
            killed = Forked(template_of(REAL).start(function, [disk, model], given))
        finally:
            os.close(write)
        key, saved = lines.readline().strip(), lines.readline()
        assert saved == "saved\n"
        killed.kill()
        killed.wait(WAIT_S)
    llm = make()
    assert [each.key for each in llm.pinned_prefixes()] == [key]
    assert loaded(llm) == FULL_BLOCKS


def test_a_start_that_ends_early_loses_no_pin(
    make: Maker, disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: the list is written while pins come back one by one."""
    llm = make()
    keys = {pin(llm, prompt).key for prompt in OTHERS[:3]}
    llm.shutdown()

    def fails(core: Any, scheduler: Any, pins: Any) -> None:
        from quire.engine.disk_tier import pin_again

        pin_again(core, scheduler, pins[:1])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("quire.engine.build.pin_again", fails)
        with pytest.raises(KeyboardInterrupt):
            make()
    assert {each.key for each in make().pinned_prefixes()} == keys


NEWS = """
import os, sys
from pathlib import Path
from quire.config.kv_disk.folder import KVFolder
from quire.engine import disk_tier

disk_tier.LOOK_SECONDS = 0.0
((files, header),) = KVFolder(Path(sys.argv[1])).stores()
news = disk_tier.StoreNews(files, header)
files.header.unlink()
os.mkfifo(files.header)
assert news() is None and news() is None and news._looking.is_busy
"""


def test_a_reader_ends_although_its_disk_hangs(make: Maker, disk: str) -> None:
    """Fault: the interpreter waits for the thread that looks for news, which hangs in a read."""
    make().shutdown()
    subprocess.run([sys.executable, "-c", NEWS, disk], check=True, timeout=WAIT_S)
