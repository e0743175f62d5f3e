"""Recurrent states on a disk: a conversation goes on after a restart where it ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, ConfigError, RequestOutput
from quire.config.kv_disk.check import verify
from quire.config.kv_disk.folder import KVFolder
from tests.engine.greedy import chosen_names
from tests.engine.test_disk_prefixes import is_saved
from tests.engine.test_laws import assert_same, params
from tests.models.families import Case, write_checkpoint
from tests.small_engines import Maker, small_engines
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("patient_disk", "cached_disk")

NAMES = ("lfm2", "qwen3_5_text", "qwen3_next", "granitemoehybrid", "mamba2")
KINDS = ("lfm2", "qwen3_5_text", "mamba2")
"""States of convolutions, of the delta rule, and those of a model that has no K/V."""
BY_KIND = (
    "test_a_damaged_state_costs_time_alone",
    "test_few_checkpoints_serve_as_well",
    "test_the_prompt_of_many_conversations_comes_back",
    "test_a_pin_keeps_its_state",
    "test_the_state_of_a_pin_is_the_last_to_leave_the_disk",
)
"""Laws that families of a kind keep or break alike."""
SETTINGS: dict[str, Any] = {
    "block_size": 16,
    "max_model_len": 1024,
    "num_kv_blocks": 256,
    "max_num_batched_tokens": 256,
    "kv_disk_bytes": "64MB",
}
FIRST_TURN, LATER_TURN, NEW_TOKENS = 700, 60, 36


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model" in metafunc.fixturenames:
        names = chosen_names(metafunc, NAMES, KINDS, BY_KIND)
        metafunc.parametrize("model", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    write_checkpoint(Case("it", request.param, {"max_position_embeddings": 1024}), path)
    return path


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Iterator[Maker]:
    with small_engines(str(model), kv_disk=str(tmp_path / "kv"), **SETTINGS) as maker:
        yield maker


def text_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 120, length).tolist()


def ask(llm: LLM, prompt: list[int], seed: int = 7, count: int = NEW_TOKENS) -> RequestOutput:
    (found,) = llm.generate({"prompt_token_ids": prompt}, params(seed, count), use_tqdm=False)
    llm.engine.client._core.check_invariants()  # type: ignore[attr-defined]
    return found


def next_turn(prompt: list[int], output: RequestOutput, seed: int) -> list[int]:
    return [*prompt, *output.outputs[0].token_ids, *text_of(LATER_TURN, seed)]


@pytest.mark.parametrize("settings", [{}, {"depth": 1}, {"kv_cache_dtype": "int8", "depth": 3}])
def test_a_third_turn_goes_on_after_a_restart(
    make: Maker, model: Path, settings: dict[str, Any]
) -> None:
    """All of the second turn but its last block comes back, answers too, to the bit."""
    if "mamba2" in model.name and "kv_cache_dtype" in settings:
        pytest.skip("no layer has K/V")
    llm = make(**settings)
    prompt = text_of(FIRST_TURN)
    for turn in range(2):
        prompt = next_turn(prompt, ask(llm, prompt), turn)
    cold = ask(llm, prompt)
    llm.shutdown()
    llm = make(**settings)
    warm = ask(llm, prompt)
    assert_same([warm], [cold])
    assert cold.num_cached_tokens is not None
    assert warm.num_cached_tokens >= max(784, cold.num_cached_tokens)
    stats = llm.engine.client.stats()
    assert (stats.blocks_lost_total, stats.loads_started_total) == (0, 1)


def test_the_prompt_of_many_conversations_comes_back(make: Maker) -> None:
    """Each of several starts from the same state, which is loaded once."""
    llm, system = make(), text_of(700)
    prompts = [[*system, *text_of(50, seed)] for seed in range(1, 5)]
    cold = [ask(llm, prompt) for prompt in prompts]
    shared = cold[-1].num_cached_tokens or 0
    assert shared > 600
    llm.shutdown()
    llm = make()
    warm = [ask(llm, prompt) for prompt in prompts]
    assert_same(warm, cold)
    assert min(each.num_cached_tokens or 0 for each in warm) >= shared
    assert llm.engine.client.stats().loads_started_total >= 1


@pytest.mark.parametrize("fault", ["state", "every second block"])
def test_a_damaged_state_costs_time_alone(make: Maker, tmp_path: Path, fault: str) -> None:
    """A part that does not have its checksum takes its state with it, and is written again."""
    prompt = text_of(300)
    llm = make()
    cold = ask(llm, prompt)
    group = llm.engine.client._core._scheduler.state.kv.disk_states._group  # type: ignore[attr-defined]
    llm.shutdown()
    [(files, header)] = KVFolder(tmp_path / "kv").stores()
    assert verify(files, header) == 0
    records, data = files.read_records(header), bytearray(files.slots.read_bytes())
    for slot in np.flatnonzero(records["seal"]).tolist():
        is_state = records[slot]["group"] == group
        if records[slot]["num_bytes"] and (is_state if fault == "state" else slot % 2):
            data[slot * header.slot_bytes] ^= 1
    files.slots.write_bytes(data)
    assert verify(files, header) > 0
    for _ in range(2):
        llm = make()
        found = ask(llm, prompt)
        assert_same([found], [cold])
        llm.shutdown()
    llm = make()
    again = ask(llm, prompt)
    assert_same([again], [cold])
    assert (again.num_cached_tokens or 0) >= 208, "what was lost was not written again"


def test_few_checkpoints_serve_as_well(make: Maker) -> None:
    """Saves hold some of them, and loads need one."""
    prompts = [text_of(120 + 20 * i, seed=i) for i in range(6)]
    for count in (1, 2):
        llm = make(num_state_checkpoints=count)
        cold = [ask(llm, prompt, count=20) for prompt in prompts]
        llm.shutdown()
        llm = make(num_state_checkpoints=count)
        warm = [ask(llm, prompt, count=20) for prompt in prompts]
        assert_same(warm, cold)
        assert sum(each.num_cached_tokens or 0 for each in warm) > 0
        llm.shutdown()


def test_new_weights_and_resets_drop_states(make: Maker) -> None:
    llm, prompt = make(), text_of(300)
    cold = ask(llm, prompt)
    llm.reset_prefix_cache()
    found = ask(llm, prompt)
    assert found.num_cached_tokens == 0
    assert_same([found], [cold])
    llm.reset_prefix_cache()
    llm.shutdown()
    assert ask(make(), prompt).num_cached_tokens == 0


def test_ranks_keep_their_shares_of_a_state(make: Maker, model: Path) -> None:
    if "next" in model.name:
        pytest.skip("as the others")
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "num_threads": 1}
    llm = make(**settings)
    prompt = text_of(300)
    prompt = next_turn(prompt, ask(llm, prompt), 1)
    cold = ask(llm, prompt)
    llm.shutdown()
    llm = make(**settings)
    warm = ask(llm, prompt)
    assert_same([warm], [cold])
    assert (warm.num_cached_tokens or 0) >= (cold.num_cached_tokens or 0) > 300


def test_a_pin_keeps_its_state(make: Maker) -> None:
    """In the engine that was asked, where others fill the checkpoints, and in the next one."""
    prefix = text_of(307)
    asked = [*prefix, *text_of(30, 5)]
    cold = ask(make(kv_disk=None), asked)
    llm = make(num_state_checkpoints=6)
    pin = llm.pin_prefix({"prompt_token_ids": prefix})
    for seed in range(10, 20):
        ask(llm, text_of(120, seed), count=20)
    found = ask(llm, asked)
    assert_same([found], [cold])
    assert found.num_cached_tokens == 304
    assert llm.pinned_prefixes()[0].hits == 1
    llm.shutdown()
    again = make(num_state_checkpoints=6)
    assert [each.key for each in again.pinned_prefixes()] == [pin.key]
    found = ask(again, asked)
    assert_same([found], [cold])
    assert found.num_cached_tokens == 304
    assert again.unpin_prefix(again.pinned_prefixes()[0])
    again.engine.client._core.check_invariants()  # type: ignore[attr-defined]


def test_the_state_of_a_pin_is_the_last_to_leave_the_disk(make: Maker, model: Path) -> None:
    """All of its parts, also those that no block has the name of."""
    if "mamba2" in model.name:
        pytest.skip("a tiny state has one part, and few fill no disk")
    llm = make(kv_disk_bytes=2**20)
    prefix = text_of(207)
    llm.pin_prefix({"prompt_token_ids": prefix})
    for seed in range(60):
        ask(llm, text_of(200, 100 + seed), count=2)
    wait_for(lambda: is_saved(llm), "the saves to end")
    assert llm.engine.client.stats().blocks_removed_total > 0, "the disk was never full"
    llm.shutdown()
    again = make(kv_disk_bytes=2**20)
    stats = again.engine.client.stats()
    assert (stats.num_pins, stats.loads_started_total) == (1, 1)
    assert again.pinned_prefixes()[0].num_tokens == 207
    found = ask(again, [*prefix, 9])
    assert found.num_cached_tokens == 192


def test_the_plan_says_what_the_disk_holds(make: Maker, model: Path) -> None:
    reasons = {each.name: each.reason for each in make().engine.resolved.decisions}
    held = "recurrent states in" if "mamba2" in model.name else "tokens in"
    assert held in reasons["kv_disk"]


def test_without_checkpoints_it_is_refused(make: Maker) -> None:
    with pytest.raises(ConfigError, match="num_state_checkpoints is 0"):
        make(num_state_checkpoints=0)
