"""Row kernels: a row has the same bits alone and in any batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.pairs import BY_PAIRS
from tests.profiles import examples

from quire.base.errors import EngineError
from quire.base.platform import detect_platform
from quire.ops import ALL_OPS, Team, select
from quire.ops.random_tensors import DTYPES, normal

PLATFORM = detect_platform()
TOKENS, WIDTH = 300, 200


def normed(call: Callable[..., Any], rows: slice, x: torch.Tensor) -> torch.Tensor:
    return call(x[rows], x[0], 1e-6)


def added(call: Callable[..., Any], rows: slice, x: torch.Tensor) -> torch.Tensor:
    return torch.stack(call(x[rows], x.flip(-1)[rows], x[0], 1e-6), dim=1)


def layer_normed(call: Callable[..., Any], rows: slice, x: torch.Tensor) -> torch.Tensor:
    return call(x[rows], x[0], x[1], 1e-5)


def added_layer_normed(call: Callable[..., Any], rows: slice, x: torch.Tensor) -> torch.Tensor:
    return torch.stack(call(x[rows], x.flip(-1)[rows], x[0], x[1], 1e-5), dim=1)


def gated(call: Callable[..., Any], rows: slice, x: torch.Tensor) -> torch.Tensor:
    return call(x[rows], "silu")


def activated(call: Callable[..., Any], rows: slice, x: torch.Tensor) -> torch.Tensor:
    return call(x[rows], "gelu")


def summed(call: Callable[..., Any], rows: slice, x: torch.Tensor) -> torch.Tensor:
    return call(x[rows], x.flip(-1)[rows])


def gathered(call: Callable[..., Any], rows: slice, x: torch.Tensor) -> torch.Tensor:
    return call(torch.arange(TOKENS).flip(0)[rows] - 5, x, 5)


CALLS = {
    "rms_norm": normed,
    "add_rms_norm": added,
    "layer_norm": layer_normed,
    "add_layer_norm": added_layer_normed,
    "activation": activated,
    "activation_and_mul": gated,
    "add": summed,
    "embedding": gathered,
}


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


@BY_PAIRS
@pytest.mark.parametrize(
    "provider", [pytest.param(p, id=p.name) for p in ALL_OPS["embedding"].providers]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("wrong", "offset"), [(-1, 0), (7, 0), (-3, 2), (5, 2), (2**31 - 1, 2)])
def test_an_id_outside_the_table_is_refused(
    provider: Any, dtype: torch.dtype, wrong: int, offset: int
) -> None:
    """Turns red when a wrong token id, or a position beyond the learned ones, reads the memory of
    another tensor."""
    reason = provider.unavailable(PLATFORM)
    if reason is not None:
        pytest.skip(f"{provider.name}: {reason}")
    call, table = provider.load(), torch.arange(21.0).view(7, 3)
    with pytest.raises(EngineError, match="code 3"):
        call(torch.tensor([0, wrong], dtype=dtype), table, offset)
    edges = torch.tensor([-offset, 6 - offset], dtype=dtype)
    assert torch.equal(call(edges, table, offset), table[[0, 6]])


def available(name: str) -> list[Any]:
    return [p.load() for p in ALL_OPS[name].providers if p.unavailable(PLATFORM) is None]


@examples(40)
@given(
    rows=st.integers(0, 9),
    width=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    mean=st.sampled_from([0.0, 1.0, -300.0]),
    seed=st.integers(0, 2**31),
)
def test_layer_norm_of_any_row_is_near_the_formula(
    rows: int, width: int, dtype: torch.dtype, mean: float, seed: int
) -> None:
    """In float64. Turns red when the mean of a row far from zero is lost in its squares, and when
    the lanes after the end of a row count."""
    generator = torch.Generator().manual_seed(seed)
    x = (normal(generator, rows, width) + mean).to(dtype)
    weight, bias = normal(generator, 2, width, dtype=dtype)
    exact = x.double()
    centred = exact - exact.mean(-1, keepdim=True)
    deviation = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = centred / deviation * weight.double() + bias.double()
    # Cost of rounding the mean, in units of the deviation.
    slack = (exact.abs().amax(-1, keepdim=True) / deviation * 2**-21 + 2**-19) * (
        1 + weight.double().abs()
    )
    ulp = torch.finfo(dtype).eps
    for call in available("layer_norm"):
        got = call(x, weight, bias, 1e-5).double()
        assert ((got - expected).abs() <= slack + ulp * expected.abs()).all()


@examples(40)
@given(
    x=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    kind=st.sampled_from(["gelu", "gelu_tanh", "relu", "silu"]),
)
def test_an_activation_of_any_number_is_near_the_formula(x: list[float], kind: str) -> None:
    """In float64. Turns red when a polynomial is used outside its range, or an exp overflows."""
    given_x = torch.tensor(x)
    wide = given_x.double()
    expected = {
        "gelu": 0.5 * wide * torch.erfc(-wide * 0.5**0.5),
        "gelu_tanh": wide * torch.sigmoid(wide * (1 + 0.044715 * wide**2) * (8 / torch.pi) ** 0.5),
        "relu": wide.clamp(min=0),
        "silu": wide * torch.sigmoid(wide),
    }[kind]
    # silu saturates at 2**-126 of its argument.
    slack = 1e-6 + 2e-6 * expected.abs() + wide.abs() * 2**-125
    for call in available("activation"):
        assert ((call(given_x, kind).double() - expected).abs() <= slack).all()


@pytest.mark.parametrize("name", ["add_rms_norm", "add_layer_norm"])
def test_sums_of_tensors_that_lie_differently(name: str) -> None:
    """Catches strides of one operand with the sizes of the other, and operands of two shapes."""
    _, call = select(ALL_OPS[name], detect_platform())
    reference = ALL_OPS[name].reference
    x, weight = torch.randn(2, 3, 8), torch.ones(8)
    rest = (weight, 1e-6) if name == "add_rms_norm" else (weight, None, 1e-6)
    turned = torch.randn(2, 8, 3).transpose(1, 2)
    for pair in ((x, turned), (turned, x)):
        for got, expected in zip(call(*pair, *rest), reference(*pair, *rest), strict=True):
            torch.testing.assert_close(got, expected)
    if call is not reference:
        with pytest.raises(EngineError, match="one shape and dtype"):
            call(torch.randn(4, 8), torch.randn(2, 8), *rest)
