"""Row kernels: a row has the same bits alone and in any batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.ops import ALL_OPS, Team
from quire.platform import detect_platform

PLATFORM = detect_platform()
TOKENS, WIDTH = 300, 200


def normed(call: Callable[..., Any], rows: slice, x: torch.Tensor) -> torch.Tensor:
    return call(x[rows], x[0], 1e-6)


def added(call: Callable[..., Any], rows: slice, x: torch.Tensor) -> torch.Tensor:
    return torch.stack(call(x[rows], x.flip(-1)[rows], x[0], 1e-6), dim=1)


def gated(call: Callable[..., Any], rows: slice, x: torch.Tensor) -> torch.Tensor:
    return call(x[rows])


def turned(call: Callable[..., Any], rows: slice, x: torch.Tensor) -> torch.Tensor:
    q, k = x.clone()[rows].view(-1, 5, 40).split((3, 2), dim=1)
    call(q, k, torch.arange(TOKENS)[rows], x[:, :20].float(), x[:, 20:40].float())
    return torch.cat((q, k), dim=1)


CALLS = {"rms_norm": normed, "add_rms_norm": added, "silu_and_mul": gated, "rope": turned}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "provider"),
    [
        pytest.param(name, provider, id=f"{name}-{provider.name}")
        for name in CALLS
        for provider in ALL_OPS[name].providers
    ],
)
def test_a_row_does_not_depend_on_the_batch(name: str, provider: Any, dtype: torch.dtype) -> None:
    """Turns red when work is cut so that a row's sums change their order with the batch."""
    reason = provider.unavailable(PLATFORM)
    if reason is not None:
        pytest.skip(f"{provider.name}: {reason}")
    call, alone = provider.load(Team(2)), provider.load()
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = CALLS[name](call, slice(None), x)
    for rows in (slice(0, 1), slice(7, 8), slice(150, 153), slice(TOKENS - 1, TOKENS)):
        assert torch.equal(CALLS[name](alone, rows, x), whole[rows])
