"""With the C++ kernels a model gives a sequence the same bits whatever shares its steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.models.families import CASES, random_sequences, write_checkpoint
from tests.models.harness import PagedModel, set_biases

from quire.base.platform import detect_platform
from quire.bundled import bundled_model_path
from quire.config.quantization import INT4_FORMATS
from quire.ops import build_op_set

BY_NAME = {case.name: case for case in CASES}


NAMES = ["llama", "mistral-window", "qwen2-tied", "qwen3", "opt", "gpt2", "qwen2-moe", "mixtral"]


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        *((name, None) for name in NAMES),
        ("llama-bias", "int8"),
        ("qwen2-tied", "int8"),
        ("qwen2-tied", "int4"),
        ("qwen3-moe", "int8"),
        ("mixtral", "int4"),
        ("gpt2", "int4"),
    ],
)
def test_logits_alone_in_a_batch_and_in_chunks(
    name: str, quantization: str | None, tmp_path: Path
) -> None:
    """Turns red when any operation between token ids and logits rounds by the batch's size."""
    skip_without_kernels()
    case = BY_NAME[name]
    write_checkpoint(case, tmp_path)
    assert_same_bits(
        lambda: PagedModel(tmp_path, "best", case.max_positions, quantization),
        random_sequences(case.lengths),
    )


def assert_same_bits(new_model: Callable[[], PagedModel], sequences: dict[int, list[int]]) -> None:
    """Sequences have the same logits in a batch, alone, and token by token."""
    batched = new_model().step(sequences)
    for seq, tokens in sequences.items():
        alone = new_model()
        assert torch.equal(alone.step({seq: tokens})[seq], batched[seq])
        chunked = new_model()
        pieces = [chunked.step({seq: [token]})[seq] for token in tokens]
        assert torch.equal(torch.cat(pieces), batched[seq])


@pytest.mark.parametrize("name", ["qwen2-tied", "gpt2"])
def test_biases_outside_an_int8_cache(name: str, tmp_path: Path) -> None:
    """The same where attention adds them."""
    skip_without_kernels()
    case = BY_NAME[name]
    write_checkpoint(case, tmp_path, torch.bfloat16)
    for part in "kv":
        set_biases(tmp_path, part, lambda bias: bias * 50)
    assert_same_bits(lambda: PagedModel(tmp_path, "best", 64, kv_dtype="int8"), random_sequences())


@pytest.mark.parametrize("quantization", INT4_FORMATS)
def test_every_group_size_alone_and_in_a_batch(quantization: str) -> None:
    """The same for the bundled model, whose matrices have groups of every size: a batch of 60
    tokens takes other kernels than one token."""
    skip_without_kernels()
    sequences = random_sequences((1, 40, 19))

    def new_model() -> PagedModel:
        return PagedModel(bundled_model_path(), "best", quantization=quantization)

    batched = new_model().step(sequences)
    alone = new_model()
    for seq, tokens in sequences.items():
        assert torch.equal(alone.step({seq: tokens})[seq], batched[seq])
    last = max(sequences)
    chunked = new_model()
    pieces = [chunked.step({last: [token]})[last] for token in sequences[last]]
    assert torch.equal(torch.cat(pieces), batched[last])


def skip_without_kernels() -> None:
    if not build_op_set(detect_platform()).chosen["linear"].startswith("cpu_"):
        pytest.skip("no C++ kernels here")
