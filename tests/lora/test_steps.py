"""Steps in which no row has an adapter are those of an engine without LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tests.engine.test_captured import captured_forward, captured_steps, runner_of
from tests.lora.adapters import write_adapter
from tests.lora.test_adapters import FAMILIES, LLAMA, PROMPTS, answers, engine
from tests.models.families import write_checkpoint
from tests.runner.test_token_columns import KERNELS

from quire import LLM
from quire.lora.request import LoRARequest

captured = pytest.mark.skipif(not KERNELS, reason="no compiled kernels here")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_checkpoint(FAMILIES["llama"][0], tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def lora(base: Path, tmp_path: Path) -> LoRARequest:
    return LoRARequest("a", 1, str(write_adapter(tmp_path / "a", base, LLAMA)))


def runner_layers(llm: LLM) -> Any:
    """Blocks of the model."""
    return runner_of(llm)._forward._model._model.blocks


def kernels_of(llm: LLM) -> dict[Any, Any]:
    """Kernels of each captured step of rows without adapters."""
    steps = captured_steps(llm)
    assert steps.logits is not None
    kinds = {"draw": steps.drawing, "logits": steps.logits}
    lists: dict[Any, Any] = {
        (kind, size): known.graph.calls  # type: ignore[attr-defined]
        for kind, graphs in kinds.items()
        for size, known in graphs.recorded.items()
    }
    lists["prompts"] = captured_forward(llm).graphs.calls[()].calls
    return {key: calls._names for key, calls in lists.items()}


@captured
def test_captured_steps_without_adapters_call_the_same_kernels(
    base: Path, lora: LoRARequest
) -> None:
    with engine(base) as plain, engine(base, enable_lora=True) as llm:
        assert answers(llm, PROMPTS) == answers(plain, PROMPTS)
        assert kernels_of(llm) == kernels_of(plain)
        graphs = captured_steps(llm).drawing
        assert set(graphs.of_variants) == {()}
        answers(llm, PROMPTS, lora_request=lora)
        assert set(graphs.of_variants) == {(), ("adapter",)}
        for known in graphs.of_variants["adapter",].values():
            names = [name for _, name in known.graph.calls._names]  # type: ignore[attr-defined]
            assert names.count("low_rank_shrink") == 4 * len(runner_layers(llm))
        assert all(kernels_of(llm)[key] == names for key, names in kernels_of(plain).items())
        assert answers(llm, PROMPTS) == answers(plain, PROMPTS)


def test_call_by_call_the_operation_runs_only_where_a_row_has_an_adapter(
    base: Path, lora: LoRARequest
) -> None:
    with engine(base, enable_lora=True, enforce_eager=True) as llm:
        layers = runner_layers(llm)
        counted: list[Mock] = []
        for block in layers:
            for layer in (block.qkv, block.output, block.mlp.gate_up, block.mlp.down):
                additions = layer._additions
                additions._low_rank = Mock(wraps=additions._low_rank)
                counted.append(additions._low_rank)
        answers(llm, PROMPTS)
        assert not any(each.called for each in counted)
        answers(llm, PROMPTS, lora_request=[None, lora, None, None])
        assert all(each.called for each in counted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_beside_adapters_keep_their_bits(base: Path, lora: LoRARequest, dtype: str) -> None:
    """Their gate is applied after the product there, and in its kernel elsewhere."""
    asked = [None, lora, None, lora]
    with LLM(
        str(base), dtype=dtype, skip_tokenizer_init=True, quiet=True, max_model_len=64,
        num_kv_blocks=64, enable_lora=True,
    ) as llm:  # fmt: skip
        plain = answers(llm, PROMPTS)
        mixed = answers(llm, PROMPTS, lora_request=asked)
    if not KERNELS:
        pytest.skip("torch rounds by the number of rows")
    assert [mixed[0], mixed[2]] == [plain[0], plain[2]]
    assert mixed[1] != plain[1]
