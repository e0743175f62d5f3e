"""Matrices of integers for activations of 16 bits: the bits of `linear` with the same weights, in
any batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.test_linear_quantized import BLOCK_EDGES, rows_with_trouble
from tests.profiles import examples

from quire.base.platform import detect_platform
from quire.config.packed.block_kinds import BLOCK_KINDS
from quire.ops import ALL_OPS, Op, PackedMatrix, Team, build_op_set
from quire.ops.check import compare
from quire.ops.linear.blocks.cases import block_weight
from quire.ops.linear.int4.cases import int4_weight
from quire.ops.linear.int8.cases import int8_weight
from quire.ops.linear.plain.contract import GatedPacked
from quire.ops.linear.plain.partial import PlainPartial
from quire.ops.linear.rotate import rotate
from quire.ops.linear.rotate.reference import rotation_part
from quire.ops.operation import Case
from quire.ops.random_tensors import DTYPES, normal

LINEAR, INT8, INT4, BLOCKS = (
    ALL_OPS[name] for name in ("linear", "linear_int8", "linear_int4", "linear_blocks")
)
PLATFORM = detect_platform()
KINDS = tuple(BLOCK_KINDS.values())
NAMES = [
    each.name
    for each in LINEAR.providers
    if each.name.startswith("cpu") and each.unavailable(PLATFORM) is None
]
FORMATS = ("int8", "int4", "int4 with zero points", *(kind.name for kind in KINDS))


def weights_of(
    generator: torch.Generator, form: str, outputs: int, groups: int
) -> tuple[Op, tuple[Any, ...]]:
    """An operation and the arguments before its bias."""
    if form == "int8":
        return INT8, int8_weight(generator, outputs, 32 * groups)
    if form.startswith("int4"):
        weight, scale, zero = int4_weight(generator, outputs, 32 * groups, 32)
        return INT4, (weight, scale, zero if "zero" in form else None)
    return BLOCKS, (block_weight(generator, BLOCK_KINDS[form], outputs, groups, 2),)


def numbers_of(op: Op, weights: tuple[Any, ...], outputs: int) -> torch.Tensor:
    """The weights [O, I] in float32."""
    return op.reference(*weights).rows(torch.arange(outputs))


def loaded(op: Op, name: str, team: Team) -> Callable[..., PackedMatrix]:
    provider = op.provider(name)
    assert provider is not None
    return provider.load(team)


@examples(60)
@given(
    form=st.sampled_from(FORMATS),
    rows=st.integers(0, 80),
    outputs=st.integers(2, 300),
    groups=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
    rotation=st.sampled_from((1, 16, 32)),
    with_bias=st.booleans(),
    gate=st.sampled_from((None, "silu")),
    threads=st.sampled_from((1, 2)),
    seed=st.integers(0, 2**31),
)
def test_products_have_the_bits_of_plain_weights(
    form: str,
    rows: int,
    outputs: int,
    groups: int,
    dtype: torch.dtype,
    rotation: int,
    with_bias: bool,
    gate: str | None,
    threads: int,
    seed: int,
) -> None:
    """Turns red on a wrong code, scale, offset, zero point or tail, when columns are mixed up, and
    when rotated rows are rounded in another place."""
    generator = torch.Generator().manual_seed(seed)
    outputs += outputs % 2  # halves for a gate
    op, weights = weights_of(generator, form, outputs, groups)
    numbers = numbers_of(op, weights, outputs)
    x = rows_with_trouble(generator, rows, numbers.shape[1], dtype)
    bias = normal(generator, outputs, dtype=dtype) if with_bias else None
    options: dict[str, Any] = {"dtype": dtype, "gate": gate, "activation_bits": 16}
    if op is not BLOCKS:
        options["rotation"] = rotation
        part = rotation_part(rotation)
        numbers = numbers * part
        given_rows = (rotate(x, rotation) / part).to(dtype) if rotation > 1 else x
    else:
        given_rows = x
    for name in NAMES:
        wanted = loaded(LINEAR, name, Team(1))(numbers.to(dtype), bias, gate=gate)
        found = loaded(op, name, Team(threads))(*weights, bias, **options)
        for out_dtype in (dtype, torch.float32):
            torch.testing.assert_close(
                found(x, out_dtype), wanted(given_rows, out_dtype), rtol=0, atol=0, equal_nan=True
            )
        if gate is not None:
            assert isinstance(found, GatedPacked)
            whole = loaded(op, name, Team(1))(*weights, bias, **{**options, "gate": None})
            torch.testing.assert_close(found.ungated(x), whole(x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("depth", [1, 2, 3, 37, 38, 39, 1030])
def test_any_number_of_inputs(depth: int) -> None:
    """Quads of inputs that are not whole, in several panels at once. Turns red when the end of a
    panel is written into the next one."""
    generator = torch.Generator().manual_seed(depth)
    weight, scale = int8_weight(generator, 300, depth)
    numbers, x = weight.float() * scale[:, None], normal(generator, 5, depth)
    for name in NAMES:
        found = loaded(INT8, name, Team(2))(weight, scale, activation_bits=16)
        assert torch.equal(found(x), loaded(LINEAR, name, Team(2))(numbers)(x))


@pytest.mark.parametrize("form", FORMATS)
def test_the_reference_is_the_definition(form: str) -> None:
    """All providers, with and without a gate. Turns red when a provider or the reference takes
    8 bits anyway, or gives other rows of an embedding."""
    generator = torch.Generator().manual_seed(3)
    op, weights = weights_of(generator, form, 48, 2)
    ids = torch.tensor([0, 40, 7, 7])
    rotations = ({}, {"rotation": 16}) if op is not BLOCKS else ({},)
    for rotation in rotations:
        for gate in ({}, {"gate": "silu"}):
            for dtype in DTYPES:
                inputs = numbers_of(op, weights, 48).shape[1]
                x = normal(generator, 6, inputs, dtype=dtype)
                bias = normal(generator, 48, dtype=dtype)
                options = {**rotation, **gate, "activation_bits": 16}
                case = Case(f"{form}, {dtype}", (x, *weights, bias, ids), options)
                for provider in op.providers:
                    if provider.name in NAMES:
                        assert compare(op, provider.load(), case) is None, provider.name
        plain = op.reference(*weights, None, **rotation)
        wide = op.reference(*weights, None, **rotation, activation_bits=16)
        assert torch.equal(plain.rows(ids), wide.rows(ids))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(form: str, dtype: torch.dtype) -> None:
    """Turns red when a sum depends on how many panels are widened at once."""
    generator = torch.Generator().manual_seed(0)
    op, weights = weights_of(generator, form, 97, 2)
    rotation = {} if op is BLOCKS else {"rotation": 32}
    x = normal(generator, BLOCK_EDGES[-1], numbers_of(op, weights, 97).shape[1], dtype=dtype)
    for name in NAMES:
        options: dict[str, Any] = {"dtype": dtype, "activation_bits": 16, **rotation}
        matrix = loaded(op, name, Team(1))(*weights, None, **options)
        alone = torch.cat([matrix(row) for row in x.split(1)])
        for threads in (1, 2):
            matrix = loaded(op, name, Team(threads))(*weights, None, **options)
            for rows in (1, 2, 7, 33, *BLOCK_EDGES):
                assert torch.equal(matrix(x[:rows]), alone[:rows]), (
                    f"{rows} rows, {threads} threads"
                )


def test_an_op_set_has_one_number_of_bits() -> None:
    """Turns red when a caller of the set gets integers of 8 bits anyway, or ranks complete sums of
    floats as those of integers."""
    generator = torch.Generator().manual_seed(0)
    weight, scale = int8_weight(generator, 64, 32)
    x = normal(generator, 3, 32)
    ops = build_op_set(PLATFORM)
    wide = ops.with_activation_bits(16)
    assert ops.with_activation_bits(8) is ops
    exact = x @ (weight.float() * scale[:, None]).t()
    for pack in (wide.linear_int8, wide.gated_linear("linear_int8", None)):
        torch.testing.assert_close(pack(weight, scale)(x), exact, rtol=1e-5, atol=1e-5)
    assert (ops.linear_int8(weight, scale)(x) - exact).abs().max() > 1e-3
    bias = torch.ones(64)
    part = wide.partial_linear("linear_int8")(weight[:, :16].contiguous(), scale, bias)
    rest = wide.partial_linear("linear_int8")(weight[:, 16:].contiguous(), scale, bias)
    assert isinstance(part, PlainPartial)
    sums = part.partial(x[:, :16]) + rest.partial(x[:, 16:])
    torch.testing.assert_close(part.complete(sums, None, x.dtype), exact + 1, rtol=1e-5, atol=1e-5)
