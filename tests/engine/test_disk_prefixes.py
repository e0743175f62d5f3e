"""K/V on a disk, on the real engine: a new engine reads the numbers that the old one computed."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from quire import LLM, LoRARequest, RequestOutput
from quire.base.errors import ConfigError
from quire.config.checkpoint import Checkpoint, TensorInfo
from quire.config.kv_disk.records import HEADER_BYTES, RECORD, read_records
from quire.engine.disk_tier import weights_digest
from tests.engine.test_host_prefixes import LENGTH, PROMPT, ask
from tests.engine.test_laws import assert_same
from tests.lora.adapters import write_adapter
from tests.models.families import CASES, Case, write_checkpoint
from tests.pairs import BY_PAIRS
from tests.small_engines import Maker, small_engines
from tests.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.usefixtures("patient_disk", "cached_disk")

OTHERS = np.random.default_rng(3).integers(5, 900, (12, 50)).tolist()
HIT = LENGTH - 1
LLAMA = Case("base", "llama", {"vocab_size": 1024, "num_key_value_heads": 4, "head_dim": 64})
"""Has a block of 16 KiB, so that few prompts fill a small disk."""


@pytest.fixture
def disk(tmp_path: Path) -> str:
    return str(tmp_path / "kv")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("llama")
    write_checkpoint(LLAMA, path)
    return path


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    """A checkpoint of its own."""
    return shutil.copytree(model, tmp_path / "model")


@pytest.fixture
def make(model: Path, disk: str) -> Iterator[Maker]:
    with small_engines(str(model), kv_disk=disk, kv_disk_bytes="64MB") as maker:
        yield maker


def once(make: Maker, prompt: list[int] = PROMPT, **settings: Any) -> RequestOutput:
    """The answer of an engine that starts for it, and ends."""
    llm = make(**settings)
    found = ask(llm, prompt)
    llm.engine.client._core.check_invariants()  # type: ignore[attr-defined]
    llm.shutdown()
    return found


def assert_hit(found: RequestOutput, cold: RequestOutput, fault: str = "") -> None:
    """All blocks of the prompt that can be read were read, and the answer is the cold one."""
    assert found.num_cached_tokens == HIT, fault
    assert_same([found], [cold])


def files(disk: str, name: str) -> list[Path]:
    return sorted(Path(disk).glob(f"*/{name}"))


@BY_PAIRS
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hit_on_the_disk_is_cold(
    make: Maker, n: int, kv_cache_dtype: str, quantization: str | None, depth: int, dtype: str
) -> None:
    settings: dict[str, Any] = {
        "kv_cache_dtype": kv_cache_dtype,
        "quantization": quantization,
        "depth": depth,
        "dtype": dtype,
    }
    llm = make(**settings)
    cold = ask(llm, n=n)
    assert cold.num_cached_tokens == 0
    if kv_cache_dtype.startswith("fp8"):  # its attention rounds by the rows of a step
        cold = ask(llm, n=n)
        assert cold.num_cached_tokens == HIT
    llm.shutdown()
    llm = make(**settings)
    assert_hit(ask(llm, n=n), cold)
    stats = llm.engine.client.stats()
    assert (stats.blocks_loaded_total, stats.blocks_lost_total) == (HIT // 4, 0)
    assert stats.loads_started_total == 1


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-mixed", "gemma4", "opt"])
def test_other_families_come_back(tmp_path: Path, disk: str, name: str) -> None:
    """Sliding windows, layer groups of two sizes, positions that are learnt."""
    write_checkpoint(next(each for each in CASES if each.name == name), tmp_path / "model")
    prompt = [token % 120 for token in PROMPT]
    with small_engines(str(tmp_path / "model"), kv_disk=disk) as make:
        cold, warm = once(make, prompt), once(make, prompt)
    assert warm.num_cached_tokens > 0
    assert_same([warm], [cold])


@BY_PAIRS
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("depth", [1, 2])
def test_ranks_have_files_of_their_own(
    make: Maker, disk: str, kv_cache_dtype: str, dtype: str, depth: int
) -> None:
    """A hit of two ranks is theirs to the bit, and never that of one."""
    settings: dict[str, Any] = {
        "tensor_parallel_size": 2, "num_threads": 1, "kv_cache_dtype": kv_cache_dtype,
        "dtype": dtype, "depth": depth,
    }  # fmt: skip
    cold, warm = once(make, **settings), once(make, **settings)
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, HIT)
    assert_same([warm], [cold])
    assert len(files(disk, "slots*")) == 2
    assert once(make, **{**settings, "tensor_parallel_size": 1}).num_cached_tokens == 0


@pytest.mark.parametrize("fault", ["payload", "records", "no files"])
def test_damage_to_one_rank_is_damage_to_all(make: Maker, disk: str, fault: str) -> None:
    """Both ranks compute a block that one of them lacks, and write it again."""
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "num_threads": 1}
    cold = once(make, **settings)
    [slots], [records] = files(disk, "slots.1"), files(disk, "header.1")
    if fault == "payload":
        data = bytearray(slots.read_bytes())
        data[len(data) // 2] ^= 1
        slots.write_bytes(data)
    elif fault == "records":
        records.write_bytes(records.read_bytes()[: HEADER_BYTES + 3 * RECORD.itemsize + 5])
    else:
        slots.unlink()
        records.unlink()
    found = once(make, **settings)
    assert found.num_cached_tokens < HIT
    assert_same([found], [cold])
    assert_hit(once(make, **settings), cold, "what was lost was not written again")


def test_evicted_blocks_come_back_from_the_disk(make: Maker) -> None:
    """They were written when they were computed, and not when they were evicted."""
    llm = make(num_kv_blocks=30)
    cold = ask(llm)
    wait_for(lambda: is_saved(llm), "the saves to end")  # a disk that is slow keeps no pace
    for prompt in OTHERS:
        ask(llm, prompt)
    assert_hit(ask(llm), cold)


def test_memory_and_disk_together(make: Maker) -> None:
    """A prefix is read from both."""
    llm = make(num_kv_blocks=30, swap_space="64MiB")
    cold = ask(llm)
    for _ in range(3):
        for prompt in OTHERS:
            ask(llm, prompt)
        assert_hit(ask(llm), cold)
    llm.engine.client._core.check_invariants()  # type: ignore[attr-defined]


def test_another_tenants_prefix_is_not_loaded(make: Maker) -> None:
    llm = make()
    cold = ask(llm, salt="one")
    llm.shutdown()
    llm = make()
    assert ask(llm, salt="other").num_cached_tokens == 0
    assert_hit(ask(llm, salt="one"), cold)


def test_an_adapter_has_its_own_prefixes(tmp_path: Path, folder: Path, disk: str) -> None:
    """An adapter that was written anew under its name is another one."""
    path = str(write_adapter(tmp_path / "adapter", folder, ("q_proj", "v_proj")))
    adapter = LoRARequest("adapter", 1, path)
    with small_engines(str(folder), enable_lora=True, kv_disk=disk) as make:
        llm = make()
        plain, adapted = ask(llm), ask(llm, adapter=adapter)
        llm.shutdown()
        llm = make()
        for cold, own in ((plain, None), (adapted, adapter)):
            assert_hit(ask(llm, adapter=own), cold)
        llm.shutdown()
        write_adapter(tmp_path / "adapter", folder, ("k_proj", "o_proj"))
        llm = make()
        assert ask(llm, adapter=adapter).num_cached_tokens == 0


def test_changed_weights_never_hit(folder: Path, disk: str) -> None:
    """One number of one tensor differs, which no sample of the tensor sees."""
    weights = folder / "model.safetensors"
    old = weights.read_bytes()
    with small_engines(str(folder), kv_disk=disk) as make:
        cold = once(make)
        changed = bytearray(old)
        changed[len(old) * 2 // 3 + 1] ^= 1
        weights.write_bytes(changed)
        assert once(make).num_cached_tokens == 0
        weights.write_bytes(old)
        assert_hit(once(make), cold)
    assert len(files(disk, "slots")) == 2


def test_weights_beside_the_text_model_count(tmp_path: Path) -> None:
    """Image encoders may have a file of their own."""
    text, tower = tmp_path / "text", tmp_path / "tower"
    text.write_bytes(b"text")
    parts = {
        path: {"w": TensorInfo("w", (4,), "U8", path, start=0, end=4)} for path in (text, tower)
    }
    checkpoint = Checkpoint((text, tower), parts[text], others=parts[tower])
    digests: list[bytes] = []
    for data in (b"old", b"newer"):
        tower.write_bytes(data)
        digests.append(weights_digest(str(tmp_path), checkpoint))
    assert digests[0] != digests[1]


def test_another_key_never_hits(make: Maker, disk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    once(make)
    assert (Path(disk) / "key").stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("QUIRE_BLOCK_NAME_SECRET", "another secret of a fleet, long enough")
    assert once(make).num_cached_tokens == 0
    assert once(make).num_cached_tokens == HIT


def test_another_version_or_attention_never_hits(
    make: Maker, disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their K/V may differ in bits."""
    cold = once(make)
    assert once(make, attention_backend="reference").num_cached_tokens == 0
    monkeypatch.setattr("quire.__version__", "99.0")
    assert once(make).num_cached_tokens == 0
    monkeypatch.undo()
    assert_hit(once(make), cold)
    assert len(files(disk, "slots")) == 3


def test_all_files_belong_to_their_user_alone(make: Maker, disk: str) -> None:
    once(make)
    for path in (Path(disk), *Path(disk).rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize("fault", ["payload", "record", "cut slots", "cut records", "no header"])
def test_damage_costs_time_alone(make: Maker, disk: str, fault: str) -> None:
    cold = once(make)
    [slots], [header] = files(disk, "slots"), files(disk, "header")
    damaged = slots if "slots" in fault or fault == "payload" else header
    data = bytearray(damaged.read_bytes())
    if fault == "payload":
        data[len(data) // 2] ^= 1
    elif fault == "record":
        data[HEADER_BYTES + 5 * RECORD.itemsize + 40] ^= 1
    elif fault == "no header":
        data = bytearray()
    else:
        del data[HEADER_BYTES + (len(data) - HEADER_BYTES) // 2 + 1 :]
    damaged.write_bytes(data)
    llm = make()
    found = ask(llm)
    assert found.num_cached_tokens < HIT
    assert_same([found], [cold])
    if damaged is slots:
        assert llm.engine.client.stats().blocks_lost_total > 0
    llm.shutdown()
    assert_hit(once(make), cold, "what was lost was not written again")


def test_the_limit_holds_and_what_is_used_most_stays(make: Maker, disk: str) -> None:
    """Ten times as much is written as there is room for."""
    limit = 2**20
    llm = make(kv_disk_bytes=limit)
    num_slots = llm.engine.client.stats().num_disk_blocks
    cold = ask(llm)
    for seed in range(10 * num_slots // 12 + 1):
        ask(llm, np.random.default_rng(100 + seed).integers(5, 900, 50).tolist())
        if seed % 2 == 0:
            assert ask(llm).num_cached_tokens == HIT
        held = files(disk, "slots") + files(disk, "header")
        assert sum(path.stat().st_size for path in held) <= limit
    stats = llm.engine.client.stats()
    assert stats.blocks_stored_total > 8 * num_slots
    llm.shutdown()
    assert_hit(once(make, kv_disk_bytes=limit), cold)


def test_hits_outlive_the_engine(make: Maker, disk: str) -> None:
    """Else what is used most would be as new after each restart."""
    llm = make()
    for _ in range(4):
        ask(llm)
    ask(llm, OTHERS[0])
    llm.shutdown()
    [header] = files(disk, "header")
    hits = sorted(read_records(header, 1000)["hits"].tolist())
    assert hits[-HIT // 4 :] == [3] * (HIT // 4)
    once(make)
    assert sorted(read_records(header, 1000)["hits"].tolist())[-HIT // 4 :] == [4] * (HIT // 4)


def test_a_smaller_limit_cuts_the_files(make: Maker, disk: str) -> None:
    llm = make()
    for prompt in OTHERS:
        ask(llm, prompt)
    llm.shutdown()
    once(make, kv_disk_bytes=2**20)
    held = files(disk, "slots") + files(disk, "header")
    assert sum(path.stat().st_size for path in held) <= 2**20


def test_a_second_engine_reads_what_the_first_writes(make: Maker) -> None:
    cold = once(make)
    first, second = make(), make()
    assert_hit(ask(second), cold)
    assert ask(second, OTHERS[0]).num_cached_tokens == 0
    assert ask(first, OTHERS[1]).num_cached_tokens == 0
    first.shutdown()
    second.shutdown()
    assert once(make, OTHERS[1]).num_cached_tokens > 0
    assert once(make, OTHERS[0]).num_cached_tokens == 0, "a reader has written"


def test_a_reader_finds_what_is_written_later(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of several engines on one folder share what any prompt has cost."""
    monkeypatch.setattr("quire.engine.disk_tier.LOOK_SECONDS", 0.05)
    writer, reader = make(), make()
    cold = ask(writer)
    wait_for(lambda: is_saved(writer), "the saves to end")

    def has_looked() -> bool:
        ask(reader, OTHERS[0])
        return reader.engine.client.stats().num_named_disk_blocks > 0

    wait_for(has_looked, "the reader to look")
    assert_hit(ask(reader), cold)
    writer.reset_prefix_cache()
    wait_for(lambda: is_saved(writer), "the store to be cleared")

    def has_none() -> bool:
        ask(reader, OTHERS[1])
        return reader.engine.client.stats().num_named_disk_blocks == 0

    wait_for(has_none, "the reader to look again")
    assert_same([ask(reader)], [cold])
    reader.engine.client._core.check_invariants()  # type: ignore[attr-defined]


def test_new_weights_never_hit(folder: Path, disk: str) -> None:
    """Neither in this engine nor in the next one, which has the old weights again."""
    tensors = load_file(folder / "model.safetensors")
    name = next(each for each in tensors if "q_proj" in each)
    with small_engines(str(folder), kv_disk=disk) as make:
        llm = make()
        cold = ask(llm)
        llm.update_weights({name: tensors[name] * 2})
        changed = ask(llm)
        assert changed.num_cached_tokens == 0
        assert changed.outputs[0].logprobs != cold.outputs[0].logprobs
        llm.shutdown()
        assert_hit(once(make), cold)


def is_saved(llm: LLM) -> bool:
    """Return whether no move is under way."""
    core: Any = llm.engine.client._core  # type: ignore[attr-defined]
    core.take_moved()
    return not core.is_moving


def test_sleep_keeps_the_disk_and_a_reset_does_not(make: Maker) -> None:
    llm = make()
    cold = ask(llm)
    wait_for(lambda: is_saved(llm), "the saves to end")
    llm.sleep(level=1)
    llm.wake_up()
    assert_hit(ask(llm), cold, "the disk was forgotten in a sleep")
    llm.reset_prefix_cache()
    assert ask(llm).num_cached_tokens == 0
    llm.reset_prefix_cache()
    llm.shutdown()
    assert once(make).num_cached_tokens == 0


@pytest.mark.parametrize("has_new_weights", [False, True])
def test_a_save_that_waits_does_not_see_another_pool(
    folder: Path, disk: str, has_new_weights: bool
) -> None:
    """Its blocks are gone when it could start: nothing goes to the disk under their names."""
    tensors = load_file(folder / "model.safetensors")
    with small_engines(str(folder), kv_disk=disk) as make:
        llm = make()
        scheduler = llm.engine.client._core._scheduler  # type: ignore[attr-defined]
        scheduler.take_moves = list
        cold = ask(llm)
        if has_new_weights:
            llm.update_weights(dict(tensors))
        else:
            llm.sleep(level=1)
            llm.wake_up()
        del scheduler.take_moves
        ask(llm, OTHERS[0])
        llm.engine.client._core.check_invariants()  # type: ignore[attr-defined]
        llm.shutdown()
        found = once(make)
    assert found.num_cached_tokens == 0
    assert_same([found], [cold])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"enable_prefix_caching": False}, "enable_prefix_caching is off"),
        (
            {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
            "Ray places have no common disk",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(make: Maker, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make(**settings)


def test_a_folder_that_is_a_file_is_refused(make: Maker, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be used .*Give a folder"):
        make(kv_disk=str(tmp_path / "file"))


def hanging(monkeypatch: pytest.MonkeyPatch, llm: LLM, call: str) -> threading.Event:
    """Have an engine's disk hang in each "read" or "write" until the event is set."""
    slots: Any = llm.engine.client._core._executor._worker._disk._slots  # type: ignore[attr-defined]
    event, answers = threading.Event(), getattr(slots, call)
    monkeypatch.setattr(slots, call, lambda *given: (event.wait(WAIT_S), answers(*given))[1])
    return event


def test_a_disk_that_hangs_is_not_waited_for(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt is computed. No other waits, and the disk is used again when it answers."""
    monkeypatch.setattr("quire.plan.scheduler.loads.SECONDS_PER_TOKEN", 0.0)
    cold, llm = once(make), make()
    event = hanging(monkeypatch, llm, "read")
    assert_same([ask(llm)], [cold])
    stats = llm.engine.client.stats()
    assert (stats.late_loads_total, stats.loads_started_total) == (1, 1)
    assert ask(llm, OTHERS[0]).num_cached_tokens == 0
    event.set()
    assert_same([ask(llm)], [cold])
    llm.shutdown()
    assert_same([once(make)], [cold])


def test_writes_that_hang_hold_nobody_up(
    model: Path, make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold an eighth of the device's blocks at most, in a pool that is full."""
    with small_engines(str(model)) as plain:
        llm = plain()
        cold = [ask(llm, prompt) for prompt in OTHERS[:6]]
    llm = make(num_kv_blocks=24)
    event = hanging(monkeypatch, llm, "write")
    assert_same([ask(llm, prompt) for prompt in OTHERS[:6]], cold)
    assert llm.engine.client.stats().blocks_stored_total == 0
    event.set()


def num_used(llm: LLM) -> int:
    """Blocks of the device that are not free, when what has ended was taken in."""
    llm.engine.client._core.take_moved()  # type: ignore[attr-defined]
    return llm.engine.client.stats().num_used_blocks


@pytest.mark.parametrize("call", ["read", "write"])
def test_a_disk_that_hangs_for_ever_keeps_no_blocks(
    model: Path, make: Maker, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A prompt as large as the pool is computed meanwhile, and the blocks of moves that hang have
    other contents when the disk answers."""
    monkeypatch.setattr("quire.plan.scheduler.loads.SECONDS_PER_TOKEN", 0.0)
    monkeypatch.setattr("quire.plan.kv_cache.sources.SAVE_SECONDS", 0.1)
    cold = once(make)
    with small_engines(str(model)) as plain:
        llm = plain(num_kv_blocks=16)
        large = [ask(llm, prompt) for prompt in OTHERS[:4]]
    llm = make(num_kv_blocks=16)
    event = hanging(monkeypatch, llm, call)
    assert_same([ask(llm)], [cold])
    assert_same([ask(llm, prompt) for prompt in OTHERS[:4]], large)
    wait_for(lambda: ask(llm, OTHERS[5]) and num_used(llm) == 0, "the disk's blocks to be free")
    assert not event.is_set()
    event.set()
    wait_for(lambda: is_saved(llm), "the disk to answer")
    assert_same([ask(llm, prompt) for prompt in (PROMPT, *OTHERS[:4])], [cold, *large])
    llm.engine.client._core.check_invariants()  # type: ignore[attr-defined]
    llm.shutdown()
    assert_same([once(make)], [cold])


def test_a_running_request_waits_for_blocks_that_saves_hold(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not preempted for them: they come free when the saves end, or their time is over."""
    llm = make(num_kv_blocks=16)
    event = hanging(monkeypatch, llm, "write")
    ask(llm, OTHERS[0])
    assert num_used(llm) == 2, "no blocks wait to be saved"
    llm.engine.client._core._scheduler.state.kv.sources._deadlines.clear()  # type: ignore[attr-defined]
    monkeypatch.setattr("quire.plan.kv_cache.sources.SAVE_SECONDS", 0.3)
    ask(llm, OTHERS[1])
    assert llm.engine.client.stats().preempted_total == 0
    event.set()


@pytest.mark.parametrize("has_new_weights", [False, True])
def test_sleep_does_not_wait_for_a_disk_that_hangs(
    folder: Path, disk: str, monkeypatch: pytest.MonkeyPatch, has_new_weights: bool
) -> None:
    """The pool's memory is given back, and what the disk writes later is whole or is not found."""
    monkeypatch.setattr("quire.engine.core.moving_blocks.SECONDS_TO_SAVE", 0.1)
    tensors = load_file(folder / "model.safetensors")
    with small_engines(str(folder), kv_disk=disk) as make:
        llm = make()
        worker: Any = llm.engine.client._core._executor._worker  # type: ignore[attr-defined]
        event = hanging(monkeypatch, llm, "write")
        cold = ask(llm)
        pool = weakref.ref(worker._assembly.memory)
        if has_new_weights:
            llm.update_weights(dict(tensors))
        else:
            llm.sleep(level=1)
        assert pool() is None, "a move keeps the pool"
        if not has_new_weights:
            llm.wake_up()
        assert_same([ask(llm)], [cold])
        event.set()
        llm.engine.client._core.check_invariants()  # type: ignore[attr-defined]
        llm.shutdown()
        assert_same([once(make)], [cold])


def test_a_load_that_costs_more_than_it_saves_is_declined(make: Maker) -> None:
    cold = once(make)
    llm = make()
    ask(llm, OTHERS[0])  # how fast it computes is known now
    llm.engine.client._core._scheduler.state.kv.disk._seconds_per_block = 1e3  # type: ignore[attr-defined]
    found = ask(llm)
    stats = llm.engine.client.stats()
    assert (stats.loads_declined_total, stats.loads_started_total) == (1, 0)
    assert found.num_cached_tokens == 0
    assert_same([found], [cold])


def mounted(folder: Path, size: str) -> bool:
    """Return whether a file system of memory is at `folder` now."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def test_a_full_disk_costs_nothing_else(make: Maker, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    if os.geteuid() != 0 or not mounted(folder, "400k"):
        pytest.skip("no file system can be mounted here")
    try:
        llm = make(kv_disk=str(folder))
        cold = [ask(llm, prompt) for prompt in OTHERS]
        stats = llm.engine.client.stats()
        assert stats.blocks_unstored_total > 0
        assert stats.num_named_disk_blocks > 0
        llm.shutdown()
        llm = make(kv_disk=str(folder))
        assert_same([ask(llm, prompt) for prompt in OTHERS], cold)
        llm.shutdown()
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)
