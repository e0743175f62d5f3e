"""Log-probabilities by kernels: the bits of a row depend on that row alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.base.platform import detect_platform
from quire.ops import ALL_OPS, Team
from quire.ops.native.cpu_provider import is_cpu_kernel

OP = ALL_OPS["token_logprobs"]
PLATFORM = detect_platform()
KERNELS = [
    each for each in OP.providers if is_cpu_kernel(each.name) and each.unavailable(PLATFORM) is None
]

pytestmark = pytest.mark.skipif(not KERNELS, reason="no compiled kernels run here")


@pytest.mark.parametrize("vocab_size", [1, 15, 64, 1023, 4096, 50_257])
def test_bits_depend_on_neither_batch_nor_threads_nor_instruction_set(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(24, vocab_size, generator=generator) * 6
    logits[5, ::2] = -torch.inf
    logits[5, 0] = 1.0
    token_ids = torch.randint(vocab_size, (24,), generator=generator).int()
    token_ids[5] = 0
    k = min(7, vocab_size)
    first, *others = (each.load(Team(2)) for each in KERNELS)
    wanted = first(logits, torch.arange(24), token_ids, k)
    alone = KERNELS[0].load()
    for row in range(24):
        got = alone(logits[row : row + 1], torch.zeros(1, dtype=torch.int64), token_ids[[row]], k)
        assert same(got, [each[row : row + 1] for each in wanted])
    for other in others:
        assert same(other(logits, torch.arange(24), token_ids, k), wanted)


def test_tokens_of_one_row_share_its_sum() -> None:
    """Rows of samples of one prompt come one after the other, or apart."""
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(1))
    rows = torch.tensor([2, 2, 2, 0, 1, 1, 0, 2])
    token_ids = torch.tensor([5, 699, 5, 0, 17, 3, 44, 8], dtype=torch.int32)
    call: Callable[..., Any] = KERNELS[0].load(Team(2))
    together = call(logits, rows, token_ids, 4)
    for i in range(len(rows)):
        got = call(logits, rows[i : i + 1], token_ids[i : i + 1], 4)
        assert same(got, [each[i : i + 1] for each in together])


def same(got: Any, wanted: Any) -> bool:
    return all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
