"""The law that training needs: scoring a sampled sequence gives the log-probabilities that its
tokens had when they were drawn, difference 0.

Each format of weights meets each way to compute: batches with chunked prompts, drafts, preemption,
adapters and branches. The second run scores prompt and answer as one prompt, other requests beside
it, so its sums have other shapes everywhere.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.lora.request import LoRARequest
from tests.engine.test_laws import has_kernels
from tests.gguf_writer import gguf_metadata, gguf_tensors, random_tensor, write_gguf
from tests.lora.adapters import write_adapter
from tests.models.families import Case, write_checkpoint
from tests.pairs import LAWS_BY_PAIRS
from tests.small_engines import SMALL
from tests.speculation.test_laws import eager_policy

pytestmark = [
    LAWS_BY_PAIRS,
    pytest.mark.skipif(not has_kernels(), reason="torch rounds a product by its number of rows"),
]

SHAPE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "vocab_size": 1024}
"""Rows that a superblock of GGUF fits."""

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "gguf": {"dtype": "bfloat16"},
    "kv int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
}
WAYS: dict[str, dict[str, Any]] = {
    "batch": {},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "recomputed": {"num_kv_blocks": 24},
    "swapped": {"num_kv_blocks": 24, "swap_space": "16MiB", "preemption_mode": "swap"},
    "adapter": {"enable_lora": True, "max_lora_rank": 4},
    "branches": {"enable_prefix_caching": True},
    "eager": {"enforce_eager": True},
}
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("base")
    write_checkpoint(Case("base", "llama", SHAPE), base)
    return base


@pytest.fixture(scope="module")
def gguf(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shapes with random blocks of Q4_K and Q6_K in its matrices."""
    config = SimpleNamespace(**json.loads((folder / "config.json").read_text()))
    tensors = gguf_tensors(folder, "llama", config)
    for seed, (name, tensor) in enumerate(tensors.items()):
        if name.startswith("blk.") and len(tensor.shape) == 2:
            kind = "Q6_K" if "ffn_down" in name else "Q4_K"
            rows, columns = tensor.shape
            tensors[name], _ = random_tensor(kind, (rows, columns), seed, 0.002)
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return write_gguf(path, gguf_metadata("llama", config), tensors)


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LoRARequest:
    path = write_adapter(tmp_path_factory.mktemp("adapter"), folder, ("q_proj", "v_proj"))
    return LoRARequest("adapter", 1, str(path))


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def llm(
    form: str, way: str, folder: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LLM]:
    eager_policy(monkeypatch)  # what was measured beside others may make all drafts seem dear
    model = gguf if form == "gguf" else folder
    with LLM(str(model), **{**SMALL, **FORMATS[form], **WAYS[way]}) as made:
        yield made
    gc.collect()


def prompts() -> list[list[int]]:
    """Prompts of few tokens, so that n-grams find drafts where outputs have few, too."""
    rng = np.random.default_rng(4)
    return [rng.integers(5, 9, length).tolist() for length in (9, 30, 3, 17, 22, 12)]


def sampled(llm: LLM, way: str, adapter: LoRARequest | None) -> list[RequestOutput]:
    params = [
        SamplingParams(
            temperature=(0.0, 0.7, 1.3)[i % 3], top_p=(1.0, 0.8)[i % 2], seed=i, logprobs=1,
            max_tokens=NUM_TOKENS, ignore_eos=True, n=3 if way == "branches" else 1,
            allowed_token_ids=[5, 6] if way == "drafts" else None,
        )
        for i in range(len(prompts()))
    ]  # fmt: skip
    asked = [{"prompt_token_ids": prompt} for prompt in prompts()]
    return llm.generate(asked, params, lora_request=adapter, use_tqdm=False)


def test_scores_are_the_log_probabilities_of_the_draws(
    llm: LLM, form: str, way: str, adapter: LoRARequest
) -> None:
    with_adapter = adapter if way == "adapter" else None
    drawn = sampled(llm, way, with_adapter)
    stats = llm.engine.client.stats()
    if way in ("recomputed", "swapped"):
        assert stats.preempted_total > 0
    if way == "drafts":
        assert stats.accepted_drafts_total > 0
    wholes, wanted = list[list[int]](), list[list[float]]()
    for output in drawn:
        assert output.error is None
        assert output.prompt_token_ids is not None
        for sample in output.outputs:
            assert sample.logprobs is not None
            wholes.append([*output.prompt_token_ids, *sample.token_ids])
            pairs = zip(sample.token_ids, sample.logprobs, strict=True)
            wanted.append([entry[token].logprob for token, entry in pairs])
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    asked = [{"prompt_token_ids": whole} for whole in wholes]
    scored = llm.generate(asked, params, lora_request=with_adapter, use_tqdm=False)
    for whole, output, values in zip(wholes, scored, wanted, strict=True):
        assert output.error is None and output.prompt_logprobs is not None
        tail = output.prompt_logprobs[-len(values) :]
        found = [
            entry[token].logprob
            for token, entry in zip(whole[-len(values) :], tail, strict=True)
            if entry is not None
        ]
        assert found == values, (form, way)
