"""Adapters are loaded and unloaded under 200 streams: no wrong token, and nothing is left over.

`make soak ROOMS=tests/lora/test_soak.py NAME=lora` runs twenty times the rounds, a thousand.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.lora.adapters import write_adapter
from tests.lora.test_parts import RANK, noise, written
from tests.models.families import Case, write_checkpoint
from tests.profiles import SCALE, seeds
from tests.waiting import wait_for

from quire import LoRARequest, SamplingParams
from quire.compute.lora.bank import HostAdapter
from quire.entrypoints.async_llm import AsyncLLM
from quire.server.generation.adapters import ServedAdapters

NUM_STREAMS, NUM_NAMES, NUM_SLOTS, NUM_IN_HOST = 200, 6, 3, 5
NUM_ROUNDS = len(seeds(50))
ANSWERS_PER_ROUND = 8
PROMPTS = tuple(list(range(start, start + 9 + start)) for start in (3, 8, 21))
MODULES = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
MAX_GROWTH_BYTES = 32 << 20
"""Growth of resident memory from the first fifth of a thousand rounds on. It would be twice as much
if each load of the largest adapter stayed behind."""


def asked(prompt: int) -> dict[str, Any]:
    """Sampling of a prompt, greedy or seeded."""
    is_greedy = prompt % 2 == 0
    temperature = 0.0 if is_greedy else 1.0
    return {"temperature": temperature, "top_p": 1.0, "seed": prompt, "max_tokens": 8}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the bundled one's vocabulary, and else so small that requests are what takes
    time."""
    folder = tmp_path_factory.mktemp("base")
    write_checkpoint(Case("soak", "llama", {"vocab_size": 4096}), folder)
    return folder


@pytest.fixture(scope="module")
def folder(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters of projections, and two that steps are computed call by call for."""
    root = tmp_path_factory.mktemp("adapters")
    for i in range(5):
        write_adapter(root / f"v{i}", base, MODULES[i % 3 :], rank=2 + i, seed=i)
    written(root / "v5", {"model.embed_tokens.weight": noise(4096, 32)})
    a, b = noise(RANK, 32, seed=1), noise(4096, RANK, seed=2)
    written(root / "v6", {"lm_head.lora_A.weight": a, "lm_head.lora_B.weight": b})
    return root


@pytest.fixture
def llm(base: Path) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(
        str(base), skip_tokenizer_init=True, quiet=True, dtype="float32", num_kv_blocks=1024,
        block_size=16, max_model_len=64, max_num_seqs=NUM_STREAMS, enable_lora=True,
        max_loras=NUM_SLOTS, max_cpu_loras=NUM_IN_HOST,
    )  # fmt: skip
    try:
        yield engine
    finally:
        engine.shutdown()


@dataclass(slots=True)
class Soak:
    """Streams that ask for names, and rounds that bind these to other adapters meanwhile."""

    llm: AsyncLLM
    adapters: ServedAdapters
    variants: list[str]
    expected: dict[tuple[str, int], list[int]] = field(default_factory=dict[Any, Any])
    num_answers: int = 0
    num_not_found: int = 0
    is_over: bool = False

    async def tokens(self, name: str, path: str, prompt: int) -> list[int]:
        """Return the tokens that an adapter gives for a prompt."""
        params = SamplingParams(ignore_eos=True, **asked(prompt))
        found: list[int] = []
        async for output in self.llm.generate(
            {"prompt_token_ids": PROMPTS[prompt]}, params, lora_request=LoRARequest(name, 1, path)
        ):
            found = list(output.outputs[0].token_ids)
        return found

    async def run(self, folder: Path, measure: Callable[[], None]) -> None:
        for variant in self.variants:
            for prompt in range(len(PROMPTS)):
                alone = await self.tokens(variant, str(folder / variant), prompt)
                self.expected[variant, prompt] = alone
        assert len({tuple(each) for each in self.expected.values()}) == len(self.expected)
        for number in range(NUM_NAMES):
            await self.adapters.load(f"name-{number}", self.variants[number], replace=False)
        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_STREAMS):
                tasks.create_task(self._stream(random.Random(number)))
            await self._load_and_unload(measure)
            self.is_over = True

    async def _load_and_unload(self, measure: Callable[[], None]) -> None:
        chance = random.Random(1)
        for number in range(NUM_ROUNDS):
            name = f"name-{number % NUM_NAMES}"
            self.adapters.unload(name)
            await asyncio.sleep(0.001)
            await self.adapters.load(name, chance.choice(self.variants), replace=False)
            while self.num_answers < ANSWERS_PER_ROUND * number:
                await asyncio.sleep(0.001)
            if number == NUM_ROUNDS // 5:
                measure()

    async def _stream(self, chance: random.Random) -> None:
        while not self.is_over:
            name, prompt = f"name-{chance.randrange(NUM_NAMES)}", chance.randrange(len(PROMPTS))
            if not self.adapters.has(name):
                self.num_not_found += 1
                await asyncio.sleep(0.001)
                continue
            path = self.adapters.path(name)
            got = await self.tokens(name, path, prompt)
            assert got == self.expected[Path(path).name, prompt], (name, path, prompt)
            self.num_answers += 1


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def host_adapters() -> int:
    gc.collect()
    return sum(type(each) is HostAdapter for each in gc.get_objects())


def test_loads_and_unloads_under_streams(
    llm: AsyncLLM, folder: Path, record_property: Callable[[str, object], None]
) -> None:
    adapters = ServedAdapters({}, folder, 16, [])
    soak = Soak(llm, adapters, sorted(each.name for each in folder.iterdir()))
    num_threads, resident = threading.active_count(), list[int]()

    def measure() -> None:
        resident.append(resident_bytes())

    started = time.monotonic()
    asyncio.run(soak.run(folder, measure))
    seconds = time.monotonic() - started
    measure()
    assert_nothing_is_left(llm, adapters)
    assert threading.active_count() <= num_threads + 1  # that which reads adapters
    figures = {
        "rounds": NUM_ROUNDS, "streams": NUM_STREAMS, "answers": soak.num_answers,
        "not_found": soak.num_not_found, "seconds": round(seconds, 1),
        "resident_growth_bytes": resident[1] - resident[0], "host_adapters": host_adapters(),
    }  # fmt: skip
    for name, value in figures.items():
        record_property(name, value)
    assert soak.num_not_found > 0 and soak.num_answers >= NUM_STREAMS
    if SCALE >= 20:
        assert resident[1] - resident[0] < MAX_GROWTH_BYTES


def assert_nothing_is_left(llm: AsyncLLM, adapters: ServedAdapters) -> None:
    core: Any = llm.engine.client._core  # type: ignore[attr-defined]
    wait_for(lambda: not core.has_unfinished, "end of the last request")
    bank = core._executor._worker._bank
    assert len(bank._in_host) <= NUM_IN_HOST and len(bank._in_slots) <= NUM_SLOTS
    assert host_adapters() <= NUM_IN_HOST + NUM_SLOTS
    assert not core._opening and not core._adapters._waiting
    assert len(core._adapters._slots) <= NUM_SLOTS
    assert set(adapters._paths) == {f"name-{number}" for number in range(NUM_NAMES)}
    contents = bank._layers._contents
    assert all(set(each._by_slot) <= set(range(1, NUM_SLOTS + 1)) for each in contents)
    stats = core.stats()
    assert stats.num_used_blocks == 0
