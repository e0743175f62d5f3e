"""`LLM.encode`: vectors equal the hidden states of `transformers` after the final norm."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, AsyncLLM, PoolingParams, RequestError, SamplingParams
from tests.models.families import CASES, write_checkpoint
from tests.pairs import LAWS_BY_PAIRS
from tests.small_engines import SMALL, Maker, small_engines

pytestmark = LAWS_BY_PAIRS

NAMES = ("mistral-window", "qwen2-mixed", "gemma2", "gpt2")
POOLINGS = pytest.mark.parametrize("pooling", ["last", "cls", "mean"])
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    write_checkpoint(next(case for case in CASES if case.name == request.param), folder)
    return folder


@pytest.fixture(scope="module")
def hidden(folder: Path) -> list[torch.Tensor]:
    """Return the states of each prompt by `transformers`, [tokens, hidden size]."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return [model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts()]


@pytest.fixture
def make(folder: Path) -> Iterator[Maker]:
    with small_engines(str(folder)) as maker:
        yield maker


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(3, 120, length).tolist() for length in (17, 1, 30, 8, 9, 63)]


def asks() -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts()]


def encode(llm: LLM, pooling: Any, **more: Any) -> list[torch.Tensor]:
    params = PoolingParams(pooling=pooling, **more)
    outputs = llm.encode(asks(), pooling_params=params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    assert all(output.finished for output in outputs)
    assert [output.prompt_token_ids for output in outputs] == prompts()
    return [output.outputs.data for output in outputs]


def assert_same(llm: LLM, one: torch.Tensor, other: torch.Tensor) -> None:
    """To the bit where our own kernels compute all sums."""
    report = llm.engine.client.report
    is_exact = report.kernel_family != "reference" and "attention: reference" not in report.kernels
    torch.testing.assert_close(one, other, rtol=0, atol=0 if is_exact else 2e-6)


@POOLINGS
def test_vectors_are_those_of_transformers(make: Maker, hidden: list[torch.Tensor], pooling: str):
    vectors = encode(make(), pooling, normalize=False)
    of = {"last": lambda h: h[-1], "cls": lambda h: h[0], "mean": lambda h: h.mean(0)}[pooling]
    for vector, states in zip(vectors, hidden, strict=True):
        torch.testing.assert_close(vector, of(states), rtol=2e-5, atol=2e-5)
    for scaled, vector in zip(encode(make(), pooling), vectors, strict=True):
        torch.testing.assert_close(scaled, torch.nn.functional.normalize(vector, dim=0))


@DEPTHS
@POOLINGS
def test_chunks_batches_and_the_cache_change_no_bit(make: Maker, depth: int, pooling: str) -> None:
    """Fault: a sum that rounds with the chunk; a row that waits in a captured decode step."""
    whole = encode(make(max_num_batched_tokens=512), pooling)
    llm = make(depth=depth, max_num_batched_tokens=11)
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    drawn = llm.generate(asks()[:5], sampling, use_tqdm=False)
    for _ in range(2):
        for one, other in zip(encode(llm, pooling), whole, strict=True):
            assert_same(llm, one, other)
    llm.enqueue(asks()[:5], sampling)
    mixed = encode(llm, pooling)
    found = llm.wait_for_completion(use_tqdm=False)
    for one, other in zip(mixed, whole, strict=True):
        assert_same(llm, one, other)
    for one, other in zip(found, drawn, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids


@pytest.mark.parametrize("name", ["qwen2-mixed", "llama-tied", "gpt2"])
def test_attention_in_both_directions(name: str, tmp_path: Path) -> None:
    """`is_causal` of config.json, which models for vectors have that were decoders. The tokens that
    such a model draws see its whole prompt; the cache of `transformers` forgets some of a window's.
    """
    from transformers import AutoModelForCausalLM

    case = next(case for case in CASES if case.name == name)
    write_checkpoint(replace(case, extra={**case.extra, "is_causal": False}), tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    assert not model.config.is_causal
    with small_engines(str(tmp_path)) as maker:
        llm = maker()
        vectors = encode(llm, "mean", normalize=False)
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        drawn = llm.generate(asks()[: 5 if "mixed" not in name else 0], params, use_tqdm=False)
    for ids, vector in zip(prompts(), vectors, strict=True):
        with torch.inference_mode():
            states = model.base_model(torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(vector, states.mean(0), rtol=2e-5, atol=2e-5)
    for ids, output in zip(prompts(), drawn, strict=False):
        wanted = model.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=6, eos_token_id=None
        )
        assert list(output.outputs[0].token_ids) == wanted[0, len(ids) :].tolist()


def test_only_last_reads_the_cache(make: Maker) -> None:
    llm = make()
    ask = asks()[2]
    for pooling, expected in (("mean", 0), ("last", 28), ("cls", 0)):
        (output,) = llm.encode(ask, PoolingParams(pooling=pooling), use_tqdm=False)  # type: ignore[arg-type]
        assert output.num_cached_tokens == expected


def test_what_means_nothing_is_refused() -> None:
    ids = {"prompt_token_ids": [1, 2, 3]}
    with LLM(quiet=True, max_model_len=64, num_kv_blocks=32) as llm:
        with pytest.raises(RequestError, match="SamplingParams: give PoolingParams"):
            llm.encode(ids, SamplingParams())  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="takes no sampling_params"):
            llm.encode(ids, sampling_params=SamplingParams())
        with pytest.raises(RequestError, match="2 pooling_params"):
            llm.encode(ids, [PoolingParams(), PoolingParams()])
        for call in (llm.generate, llm.enqueue, lambda p, s: next(llm.stream(p, s))):
            with pytest.raises(RequestError, match="PoolingParams"):
                call(ids, PoolingParams())  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="give SamplingParams"):
            llm.llm_engine.add_request("1", ids, PoolingParams())  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="the context holds 64"):
            llm.encode({"prompt_token_ids": [3] * 65}, use_tqdm=False)
        with pytest.raises(RequestError, match="pooling is 'max'"):
            PoolingParams(pooling="max")  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="normalize is 1"):
            PoolingParams(normalize=1)  # type: ignore[arg-type]
        cut = PoolingParams(truncate_prompt_tokens=-1)
        (output,) = llm.encode({"prompt_token_ids": [3] * 65}, cut, use_tqdm=False)
        assert len(output.prompt_token_ids) == 64
        bad, good = llm.encode([{"prompt_token_ids": []}, "import "], use_tqdm=False)
        assert bad.error
        assert bad.outputs.data is None
        assert abs(float(good.outputs.data.norm()) - 1) < 1e-6


def test_vectors_for_asyncio(folder: Path, make: Maker) -> None:
    """Vectors of several prompts at once equal those of `LLM`; a request that is ended early says
    so."""
    expected = make().encode(prompts(), use_tqdm=False)

    async def vector(llm: AsyncLLM, prompt: list[int], request_id: str) -> Any:
        (found,) = [each async for each in llm.encode(prompt, None, request_id)]
        return found

    async def use(llm: AsyncLLM) -> None:
        asked = [vector(llm, prompt, f"{i}") for i, prompt in enumerate(prompts())]
        for found, output in zip(await asyncio.gather(*asked), expected, strict=True):
            assert torch.equal(found.outputs.data, output.outputs.data)
            assert found.prompt_token_ids == output.prompt_token_ids
        await llm.pause_generation()
        late = asyncio.create_task(vector(llm, prompts()[0], "late"))
        while "late" not in llm._open:
            await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match="is open already"):
            await vector(llm, prompts()[0], "late")
        await llm.abort("late")
        with pytest.raises(RequestError, match="aborted"):
            await late
        await llm.resume_generation()
        with pytest.raises(RequestError, match="no classes"):
            async for _ in llm.encode(prompts()[0], PoolingParams(pooling="classify")):
                pass
        assert (await vector(llm, prompts()[0], "again")).finished

    with AsyncLLM(str(folder), **SMALL) as llm:
        asyncio.run(use(llm))
