"""Adapters in every call that takes prompts, in large batches, and swapped out and in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lora.adapters import merge, write_adapter
from tests.lora.test_adapters import FAMILIES, LLAMA, PROMPTS, answers, assert_close, engine
from tests.models.families import write_checkpoint
from tests.profiles import seeds

from quire import LLM, SamplingParams
from quire.base.errors import RequestError
from quire.base.telemetry import EngineStats
from quire.config.settings import EngineSettings
from quire.entrypoints.async_llm import AsyncLLM
from quire.lora.request import LoRARequest
from quire.protocol.beam_search import BeamSearchParams
from quire.protocol.scheduling_params import SchedulingParams
from quire.server.routes.exposition import adapters_metric
from quire.text.rendering import Prompt

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
KINDS = {"llama": LLAMA, "qwen3": LLAMA, "gemma3": LLAMA, "gpt2": FAMILIES["gpt2"][1]}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_checkpoint(FAMILIES["llama"][0], folder)
    return folder


def many(folder: Path, base: Path, names: Sequence[str], count: int) -> list[LoRARequest]:
    """Adapters of ranks 1 to 8, each of which changes some of the modules."""
    return [
        LoRARequest(
            f"a{i}", i + 1,
            str(write_adapter(folder / f"a{i}", base, names[i % 3 :], rank=1 + i % 8, seed=i)),
        )
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("family", KINDS)
def test_each_target_alone_equals_merged_weights(family: str, tmp_path: Path) -> None:
    """Turns red when a projection takes the matrices of another."""
    base = tmp_path / "base"
    write_checkpoint(FAMILIES[family][0], base)
    with engine(base, enable_lora=True) as llm:
        for i, name in enumerate(KINDS[family]):
            folder = write_adapter(tmp_path / name, base, [name], seed=i)
            got = answers(llm, PROMPTS, lora_request=LoRARequest(name, 1, str(folder)))
            with engine(merge(tmp_path / f"{name}-merged", base, folder, {"": 2})) as merged:
                assert_close(got, answers(merged, PROMPTS))


@pytest.mark.parametrize("family", KINDS)
def test_64_adapters_of_mixed_ranks_in_one_batch(family: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_checkpoint(FAMILIES[family][0], base)
    loras = many(tmp_path, base, KINDS[family], 64)
    prompts = [PROMPTS[i % len(PROMPTS)][: 2 + i % 7] for i in range(64)]
    settings: dict[str, Any] = {
        "dtype": "float32", "skip_tokenizer_init": True, "quiet": True, "max_model_len": 64,
        "num_kv_blocks": 512, "enable_lora": True, "max_lora_rank": 8, "max_loras": 64,
    }  # fmt: skip
    with LLM(str(base), **settings, max_num_seqs=64) as llm:
        together = answers(llm, prompts, lora_request=loras)
    with LLM(str(base), **settings, max_num_seqs=1) as llm:
        alone = [
            answers(llm, [p], lora_request=each)[0]
            for p, each in zip(prompts[::5], loras[::5], strict=True)
        ]
    assert_close(together[::5], alone)
    assert len({tuple(token for token, _ in answer) for answer in together}) > 32


def test_swapped_out_and_in_equals_undisturbed(base: Path, tmp_path: Path) -> None:
    loras = [None, *many(tmp_path, base, LLAMA, 3)]
    asked = [(prompt, lora) for prompt in PROMPTS for lora in loras]
    settings: dict[str, Any] = {
        "dtype": "float32", "skip_tokenizer_init": True, "quiet": True, "max_model_len": 64,
        "block_size": 8, "enable_lora": True, "max_lora_rank": 8, "max_loras": 3,
    }  # fmt: skip
    expected, got = ([], [])
    for num_blocks, found in ((200, expected), (9, got)):
        with LLM(
            str(base), **settings, num_kv_blocks=num_blocks, preemption_mode="swap", swap_space=0.01
        ) as llm:
            found += answers(llm, [p for p, _ in asked], lora_request=[lora for _, lora in asked])
            swapped = llm.engine.client._core.stats().swapped_in_total  # type: ignore[attr-defined]
    assert swapped > 0
    assert got == expected


def test_vectors_and_beams_have_adapters(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", base, LLAMA)
    lora = LoRARequest("a", 1, str(folder))
    beams = BeamSearchParams(beam_width=2, max_tokens=4)
    with engine(merge(tmp_path / "merged", base, folder, {"": 2})) as llm:
        expected = llm.encode([PROMPTS[0]], use_tqdm=False)[0].outputs.data
        best = llm.beam_search([PROMPTS[0]], beams, use_tqdm=False)[0].sequences[0].tokens
    with engine(base, enable_lora=True) as llm:
        got = llm.encode([PROMPTS[0]], use_tqdm=False, lora_request=lora)[0].outputs.data
        plain = llm.encode([PROMPTS[0]], use_tqdm=False)[0].outputs.data
        found = llm.beam_search([PROMPTS[0]], beams, use_tqdm=False, lora_request=lora)
    assert expected is not None and got is not None and plain is not None
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert not torch.allclose(plain, expected, atol=1e-2)
    assert found[0].sequences[0].tokens == best


def test_queued_prompts_and_streams_have_adapters(base: Path, tmp_path: Path) -> None:
    loras = [None, *many(tmp_path, base, LLAMA, 2)]
    with engine(base, enable_lora=True, max_lora_rank=8) as llm:
        prompts = [PROMPTS[0]] * 3
        expected = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=loras)
        ids = llm.enqueue(prompts, GREEDY, lora_request=loras)
        found = llm.wait_for_completion(use_tqdm=False)
        assert [each.request_id for each in found] == ids
        for lora, queued, whole in zip(loras, found, expected, strict=True):
            assert queued.lora_request == lora
            assert queued.outputs[0].token_ids == whole.outputs[0].token_ids
            last = list(llm.stream(PROMPTS[0], GREEDY, lora_request=lora))[-1]
            assert last.lora_request == lora
            assert last.outputs[0].token_ids == whole.outputs[0].token_ids
        assert len({tuple(each.outputs[0].token_ids) for each in expected}) == 3
        bad = LoRARequest("bad", 5, str(tmp_path / "nowhere"))
        llm.enqueue(prompts[:2], GREEDY, lora_request=[bad, None])
        first, second = llm.wait_for_completion(use_tqdm=False)
        assert "no such folder" in (first.error or "") and second.error is None
        with pytest.raises(RequestError, match="no such folder"):
            next(llm.stream(PROMPTS[0], GREEDY, lora_request=bad))


@pytest.mark.parametrize("kind", ["blocks", "head"])
def test_drafts_change_no_token_of_an_adapter(kind: str, base: Path, tmp_path: Path) -> None:
    """Guesses are the same with any adapter; what is kept of them is by the row's own."""
    loras = [None, *many(tmp_path, base, LLAMA, 2)]
    if kind == "head":
        loras[1] = LoRARequest("head", 9, str(write_adapter(tmp_path / "h", base, ("lm_head",))))
    params = replace(GREEDY, max_tokens=24)
    prompts = [[5, 6, 7, 8] * 5] * 3
    settings: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}

    def tokens(llm: LLM, **more: Any) -> list[list[int]]:
        outputs = llm.generate(prompts, params, use_tqdm=False, **more)
        return [list(output.outputs[0].token_ids) for output in outputs]

    with engine(base, **settings) as llm:
        expected = tokens(llm, lora_request=loras)
    with engine(base, **settings, speculative_config=drafts) as llm:
        assert tokens(llm, lora_request=loras) == expected
        stats = llm.engine.client._core.stats()  # type: ignore[attr-defined]
    assert len({tuple(each) for each in expected}) == 3
    assert stats.draft_tokens_total > 0


def test_an_async_engine_takes_adapters(base: Path, tmp_path: Path) -> None:
    lora = LoRARequest("a", 1, str(write_adapter(tmp_path / "a", base, LLAMA)))
    with engine(base, enable_lora=True) as llm:
        expected = [
            llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=each)[0].outputs[0]
            for each in (None, lora)
        ]
    settings: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "quiet": True}
    made = AsyncLLM(str(base), **settings, num_kv_blocks=64, max_model_len=64, enable_lora=True)

    async def last(lora: LoRARequest | None) -> list[int]:
        found: list[int] = []
        async for output in made.generate(
            {"prompt_token_ids": PROMPTS[0]}, GREEDY, lora_request=lora
        ):
            found = list(output.outputs[0].token_ids)
        return found

    async def both() -> list[list[int]]:
        """And the adapter twice, whose files are looked up at the same time."""
        plain, first, second = await asyncio.gather(last(None), last(lora), last(lora))
        assert first == second
        return [plain, first]

    async def bad() -> None:
        with pytest.raises(RequestError, match="no such folder"):
            await last(LoRARequest("bad", 2, str(tmp_path / "nowhere")))

    try:
        assert asyncio.run(both()) == [list(each.token_ids) for each in expected]
        asyncio.run(bad())
    finally:
        made.shutdown()


def test_loading_anew_under_load(base: Path, tmp_path: Path) -> None:
    """Adapters come and go while streams run, each by the same few names, over two slots and room
    for four in host memory: no wrong token, and the bank keeps four."""
    loras = many(tmp_path, base, LLAMA, 6)
    num_rounds = len(seeds(50))
    with engine(
        base, enable_lora=True, max_loras=2, max_lora_rank=8, max_cpu_loras=4, max_num_seqs=200
    ) as llm:

        def ask(which: Sequence[LoRARequest | None]) -> list[list[int]]:
            outputs = llm.generate(
                [PROMPTS[1]] * len(which), GREEDY, use_tqdm=False, lora_request=which
            )
            return [list(output.outputs[0].token_ids) for output in outputs]

        expected = {lora: ask([lora])[0] for lora in (None, *loras)}
        threads = threading.active_count()
        for number in range(num_rounds):
            which = [(None, *loras)[(number + i) % 7] for i in range(10)]
            assert ask(which) == [expected[lora] for lora in which]
        bank = llm.engine.client._core._executor._worker._bank  # type: ignore[attr-defined]
        assert len(bank._in_host) <= 4 and len(bank._in_slots) <= 2
        assert threading.active_count() <= threads + 1


def test_the_memory_plan_counts_adapters_in_host_memory(base: Path) -> None:
    assert EngineSettings(model=str(base), max_loras=3).adapters_in_host == 3
    assert EngineSettings(model=str(base), max_loras=3, max_cpu_loras=7).adapters_in_host == 7


def test_metrics_name_the_adapters_of_requests(base: Path, tmp_path: Path) -> None:
    loras = many(tmp_path, base, LLAMA, 2)
    prompt: Prompt = {"prompt_token_ids": PROMPTS[0]}
    with engine(base, enable_lora=True, max_lora_rank=8) as llm:
        core = llm.engine.client._core  # type: ignore[attr-defined]
        assert core.adapter_stats()["running_adapters"] == ()
        inner = llm._llm_engine
        for lora in loras:
            rendered = inner.adapters.put(inner.engine.renderer.render_prompt(prompt), lora)
            inner.add(rendered, GREEDY, SchedulingParams())
        while not core.adapter_stats()["running_adapters"]:
            inner.run_step()
        stats = EngineStats(**core.adapter_stats())
        while inner.has_unfinished_requests():
            inner.run_step()
        assert core.adapter_stats()["waiting_adapters"] == ()
    (sample,) = adapters_metric(stats).samples
    assert sample.name == "vllm:lora_requests_info"
    assert sample.labels == {
        "max_lora": "1", "running_lora_adapters": "a0", "waiting_lora_adapters": "a1",
    }  # fmt: skip
