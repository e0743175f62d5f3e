"""Laws of docs/architecture.md for a model that `transformers` computes, at depth 1, 2 and 3.

Torch rounds a row by its batch, so that two runs may part where the two best tokens are close.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire.base.errors import ConfigError
from tests.engine.test_laws import DEPTHS, assert_same, run, run_alone, workload
from tests.models.families import CASES, Case, write_checkpoint
from tests.small_engines import Maker, small_engines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Qwen2 with windows, which quire has a file for too."""
    path: Path = tmp_path_factory.mktemp("generic")
    case: Case = next(case for case in CASES if case.name == "qwen2-mixed")
    write_checkpoint(case, path)
    return str(path)


@pytest.fixture
def make(folder: str) -> Iterator[Maker]:
    with small_engines(folder, model_impl="transformers") as maker:
        yield maker


@DEPTHS
def test_batched_is_alone(make: Maker, depth: int) -> None:
    llm = make(depth=depth, enable_prefix_caching=False)
    assert_same(run(llm, workload()), run_alone(llm, workload()), exact=False)


@DEPTHS
def test_chunked_is_whole(make: Maker, depth: int) -> None:
    whole = run(make(depth=depth, max_num_batched_tokens=512), workload())
    assert_same(run(make(depth=depth, max_num_batched_tokens=11), workload()), whole, exact=False)


@DEPTHS
def test_a_prefix_hit_is_cold(make: Maker, depth: int) -> None:
    """The second run finds all prompts in the cache."""
    llm = make(depth=depth)
    assert_same(run(llm, workload()), run(llm, workload()), exact=False)


@DEPTHS
def test_preempted_is_not(make: Maker, depth: int) -> None:
    ample, tight = make(depth=depth), make(depth=depth, num_kv_blocks=60)
    assert_same(run(tight, workload()), run(ample, workload()), exact=False)
    assert tight.engine.client.stats().preempted_total > 0


def test_generic_is_native(make: Maker) -> None:
    """Turns red when the two ways to compute a model part."""
    native = run(make(model_impl="quire"), workload())
    assert_same(run(make(), workload()), native, exact=False)


def test_vectors_are_those_of_the_last_hidden_states(make: Maker) -> None:
    """Turns red when what stands for hidden states is something else."""
    prompts = [{"prompt_token_ids": prompt} for prompt in workload(3)]
    found, wanted = (
        make(model_impl=name).encode(prompts, use_tqdm=False) for name in ("transformers", "quire")
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.outputs.data, other.outputs.data, rtol=1e-3, atol=1e-4)


def test_adapters_are_refused(make: Maker) -> None:
    with pytest.raises(ConfigError, match="enable_lora"):
        make(enable_lora=True)
