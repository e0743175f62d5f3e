"""KV events of the real engine: a subscriber predicts what each prompt finds in the cache."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, LoRARequest
from quire.base.telemetry.kv_events import block_hash
from tests.engine.test_disk_prefixes import is_saved
from tests.engine.test_laws import params
from tests.kv_subscriber import Subscriber
from tests.lora.adapters import write_adapter
from tests.models.families import CASES, Case, write_checkpoint
from tests.small_engines import small_engines
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("patient_disk")

PROMPTS = np.random.default_rng(7).integers(5, 120, (12, 41)).tolist()

Opened = tuple[LLM, Subscriber]
Open = Callable[..., Opened]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Open]:
    """Start engines with a subscriber each."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))
        numbers = iter(range(100))

        def start(model: Path | None = None, **settings: Any) -> Opened:
            number = next(numbers)
            events, replay = (f"ipc://{folder}/{each}{number}" for each in "er")
            config = {"enable_kv_cache_events": True, "endpoint": events, "replay_endpoint": replay}
            maker: AbstractContextManager[Callable[..., LLM]] = small_engines(
                None if model is None else str(model), kv_events_config=config
            )
            llm = stack.enter_context(maker)(**settings)
            return llm, stack.enter_context(Subscriber(events, replay))

        yield start


def ask(
    opened: Opened,
    prompt: list[int],
    *,
    adapter: LoRARequest | None = None,
    salt: str | None = None,
    media: tuple[str, ...] = ("GPU",),
) -> int:
    """Cached tokens of a prompt, which the subscriber predicts."""
    llm, subscriber = opened
    follow(opened)
    name = None if adapter is None else adapter.lora_name
    predicted = subscriber.mirror.predict(prompt, media=media, salt=salt, adapter=name)
    given: dict[str, Any] = {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}
    (found,) = llm.generate(given, params(1, 8), use_tqdm=False, lora_request=adapter)
    assert found.num_cached_tokens == predicted
    return predicted


def follow(opened: Opened) -> None:
    """Wait until the subscriber has the books of the engine."""
    llm, subscriber = opened
    wait_for(lambda: publisher_of(llm).stats()["kv_event_batches_total"] > 0, "first batch")
    wait_for(lambda: not publisher_of(llm)._waiting, "batches")
    subscriber.catch_up()
    assert {each for each in subscriber.mirror.held if each[0] == "GPU"} == of_device(llm)


def core_of(llm: LLM) -> Any:
    return llm.engine.client._core  # type: ignore[attr-defined]


def publisher_of(llm: LLM) -> Any:
    return core_of(llm)._publisher


def of_device(llm: LLM) -> set[tuple[str, int, int]]:
    index = core_of(llm)._scheduler.state.kv.pool._index
    return {("GPU", group, block_hash(name)) for group, names in enumerate(index) for name in names}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_hits_are_predicted_through_evictions_and_resets(start: Open, depth: int) -> None:
    opened = start(num_kv_blocks=40, depth=depth)
    llm, subscriber = opened
    assert ask(opened, PROMPTS[0]) == 0
    assert ask(opened, PROMPTS[0]) == 40
    assert ask(opened, [*PROMPTS[0][:20], *PROMPTS[1]]) == 20
    for prompt in PROMPTS:
        ask(opened, prompt)
    assert ask(opened, PROMPTS[-1]) == 40
    llm.reset_prefix_cache()
    follow(opened)
    assert not subscriber.mirror.held
    assert ask(opened, PROMPTS[-1]) == 0
    llm.sleep(level=1)
    llm.wake_up()
    follow(opened)
    assert not subscriber.mirror.held
    assert ask(opened, PROMPTS[-1]) == 0


def test_ranks_are_one_engine(start: Open) -> None:
    """All of them have the blocks that rank 0 plans."""
    opened = start(tensor_parallel_size=2, num_kv_blocks=40)
    for prompt in [*PROMPTS[:3], *PROMPTS[1:3]]:
        ask(opened, prompt)
    assert ask(opened, PROMPTS[2]) == 40


def test_samples_and_answers_are_told_too(start: Open) -> None:
    opened = start()
    llm, _ = opened
    found = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS[:4]], params(1, 12, n=3), use_tqdm=False
    )
    for each in found:
        assert each.prompt_token_ids is not None
        for sample in each.outputs:
            assert ask(opened, [*each.prompt_token_ids, *sample.token_ids, 5]) >= 48


def test_tenants_and_adapters_have_prefixes_of_their_own(start: Open, tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_checkpoint(Case("base", "llama", {"vocab_size": 1024}), base)
    folder = write_adapter(tmp_path / "adapter", base, ("q_proj", "v_proj"))
    adapter = LoRARequest("french", 1, str(folder))
    opened = start(base, enable_lora=True)
    for _ in range(2):
        for own in (None, adapter):
            for salt in (None, "one", "other"):
                ask(opened, PROMPTS[0], adapter=own, salt=salt)
    assert ask(opened, PROMPTS[0], adapter=adapter, salt="one") == 40


def test_host_memory_and_disk_are_media(start: Open, tmp_path: Path) -> None:
    """A prompt on the disk counts after a restart as soon as somebody has asked for it."""
    disk: dict[str, Any] = {"kv_disk": str(tmp_path / "kv"), "kv_disk_bytes": "64MB"}
    opened = start(num_kv_blocks=30, swap_space="64MiB", **disk)
    llm, subscriber = opened
    anywhere = ("GPU", "CPU", "STORAGE")
    for prompt in [*PROMPTS, *PROMPTS]:
        ask(opened, prompt, media=anywhere)
        wait_for(lambda: is_saved(llm), "the saves to end")
    assert subscriber.mirror.hashes("CPU")
    stats = llm.engine.client.stats()
    follow(opened)
    assert len(subscriber.mirror.hashes("CPU")) == stats.num_named_host_blocks
    llm.shutdown()
    again = start(num_kv_blocks=30, **disk)
    follow(again)
    stored = again[1].mirror.hashes("STORAGE")
    assert len(stored) == again[0].engine.client.stats().num_named_disk_blocks >= 10 * len(PROMPTS)
    assert again[1].mirror.predict(PROMPTS[0], media=anywhere) == 0, "nobody knows its tokens"
    (found,) = again[0].generate({"prompt_token_ids": PROMPTS[0]}, params(1, 8), use_tqdm=False)
    assert found.num_cached_tokens == 40
    assert ask(again, PROMPTS[0], media=anywhere) == 40
    again[0].reset_prefix_cache()
    follow(again)
    assert not again[1].mirror.held


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-mixed", "gemma4"])
def test_groups_are_told_of_with_their_attention(start: Open, tmp_path: Path, name: str) -> None:
    """Windows, and pages of more than one length."""
    write_checkpoint(next(each for each in CASES if each.name == name), tmp_path / "model")
    opened = start(tmp_path / "model")
    llm, subscriber = opened
    for prompt in [*PROMPTS[:4], *PROMPTS[:4]]:
        llm.generate({"prompt_token_ids": prompt}, params(1, 8), use_tqdm=False)
    follow(opened)
    groups = core_of(llm)._scheduler.state.kv.layout.groups
    assert subscriber.mirror.lengths == {i: g.tokens_per_block for i, g in enumerate(groups)}
    for group, (kind, window) in subscriber.mirror.kinds.items():
        assert window == groups[group].window
        assert kind == ("full_attention" if window is None else "sliding_window")
        if window is None:
            size = groups[group].tokens_per_block
            found = subscriber.mirror.predict(PROMPTS[3], group=group)
            assert found == (len(PROMPTS[3]) - 1) // size * size
