"""Weights of few bits in blocks: their definition, any shape, the same bits in any batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.test_linear_quantized import BLOCK_EDGES, rows_with_trouble
from tests.profiles import examples

from quire.base.errors import EngineError
from quire.base.platform import detect_platform
from quire.config.packed.block_kinds import BLOCK_KINDS, BlockKind
from quire.ops import ALL_OPS, Case, Op, Provider, Team
from quire.ops.check import compare
from quire.ops.linear.blocks.cases import block_weight
from quire.ops.linear.blocks.contract import pack_scales
from quire.ops.random_tensors import DTYPES, normal

OP = ALL_OPS["linear_blocks"]
PLATFORM = detect_platform()
KINDS = tuple(BLOCK_KINDS.values())
PROVIDERS = [each for each in OP.providers if each.unavailable(PLATFORM) is None]
each_kernel = pytest.mark.parametrize(
    "kernel",
    [pytest.param((OP, provider), id=provider.name) for provider in OP.providers],
    indirect=True,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_weight_is_its_definition(kind: BlockKind) -> None:
    """Number by number, and every provider gives those rows to the bit. Turns red when a code, a
    factor or an offset belongs to another group."""
    generator = torch.Generator().manual_seed(1)
    weight = block_weight(generator, kind, 5, 2, 2)
    numbers, size = weight.numbers(), kind.group_size
    for output in range(5):
        for i in range(4 * size):
            block, group = i // (2 * size), i // size
            code = int(weight.codes[output, i])
            scale = float(weight.scale[output, block])
            level = code - kind.zero_code if kind.levels is None else kind.levels[code]
            offset = 0.0
            if weight.factors is not None:
                scale *= int(weight.factors[output, group])
            if weight.minimum is not None:
                low = 1 if weight.lows is None else int(weight.lows[output, group])
                offset = float(weight.minimum[output, block]) * low
            elif weight.lows is not None:
                offset = -scale * int(weight.lows[output, block])
            assert float(numbers[output, i]) == pytest.approx(scale * level + offset, rel=1e-6)
    ids = torch.tensor([4, 0, 2])
    for make in (OP.reference, *(provider.load() for provider in PROVIDERS)):
        assert torch.equal(make(weight).rows(ids), numbers[ids])


@examples(25)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(0, 60),
    outputs=st.integers(1, 150),
    blocks=st.integers(1, 4),
    groups=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_shape_equals_the_reference(
    kind: BlockKind,
    rows: int,
    outputs: int,
    blocks: int,
    groups: int,
    dtype: torch.dtype,
    with_bias: bool,
    seed: int,
) -> None:
    """Turns red when a group takes another's scale, and on a wrong tail of rows or outputs."""
    generator = torch.Generator().manual_seed(seed)
    weight = block_weight(generator, kind, outputs, blocks, groups)
    # up to about 1: offsets cancel sums, of which large rows leave few digits
    x = rows_with_trouble(generator, rows, weight.codes.shape[1], dtype) * 1e-5
    ids = torch.randint(outputs, (5,), generator=generator)
    bias = normal(generator, outputs) if with_bias else None
    for provider in PROVIDERS:
        difference = compare(OP, provider.load(), Case("random", (x, weight, bias, ids)))
        assert difference is None, f"{provider.name}: {difference}"


@each_kernel
@pytest.mark.parametrize("name", ["w8", "e2m1", "w4_k", "w6_k"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    kernel: tuple[Op, Provider], name: str
) -> None:
    """Turns red when a sum depends on the tile, on the block of rows, or on the threads."""
    generator = torch.Generator().manual_seed(0)
    weight = block_weight(generator, BLOCK_KINDS[name], 97, 2, 2)
    x = normal(generator, BLOCK_EDGES[-1], weight.codes.shape[1])
    matrix = kernel[1].load()(weight)
    alone = torch.cat([matrix(row) for row in x.split(1)])
    for threads in (1, 2):
        matrix = kernel[1].load(Team(threads))(weight)
        for rows in (*range(1, 70), *BLOCK_EDGES):
            assert torch.equal(matrix(x[:rows]), alone[:rows]), f"{rows} rows, {threads} threads"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_all_instruction_sets_give_the_same_bits(kind: BlockKind) -> None:
    """With the largest codes and activations, whose sums are the largest too."""
    generator = torch.Generator().manual_seed(0)
    weight = block_weight(generator, kind, 70, 3, 2)
    weight.codes[:40] = (1 << kind.bits) - 1
    for x in (normal(generator, 70, weight.codes.shape[1]), torch.ones(3, weight.codes.shape[1])):
        found = [provider.load()(weight)(x) for provider in PROVIDERS]
        for other in found[1:]:
            assert torch.equal(other, found[0])


def test_scales_that_float16_does_not_hold_keep_11_bits() -> None:
    """Turns red when weights far above or below 1 become infinite or zero."""
    weight = block_weight(torch.Generator().manual_seed(0), BLOCK_KINDS["w4_min"], 4, 3, 1)
    for size in (1.0, 1e-12, 1e12):
        scale, minimum = weight.scale * size, torch.ones_like(weight.scale) * size / 7
        packed = pack_scales(weight._replace(scale=scale, minimum=minimum))
        for half, wanted in ((packed.scale, scale), (packed.minimum, minimum)):
            assert half is not None
            found = half.float() * packed.power[:, None]
            torch.testing.assert_close(found, wanted, rtol=2**-11, atol=size * 2**-24)
    assert torch.equal(pack_scales(weight).power, torch.ones(4))


@each_kernel
def test_tensors_that_break_the_contract_are_refused(kernel: tuple[Op, Provider]) -> None:
    """Turns red when a wrong tensor reaches a kernel that reads by pointer."""
    make = kernel[1].load()
    weight = block_weight(torch.Generator().manual_seed(0), BLOCK_KINDS["w4_k"], 71, 2, 2)
    for wrong in (
        weight._replace(codes=weight.codes.int()),
        weight._replace(codes=weight.codes[:0], scale=weight.scale[:0]),
        weight._replace(codes=weight.codes + 1),
        weight._replace(scale=weight.scale[:70]),
        weight._replace(scale=weight.scale[:, :0]),
        weight._replace(minimum=None),
        weight._replace(factors=None),
        weight._replace(lows=weight.scale),
    ):
        with pytest.raises(EngineError, match="linear_blocks"):
            make(wrong)
    with pytest.raises(EngineError, match="bias of 71"):
        make(weight, torch.zeros(70))
    with pytest.raises(EngineError, match="128 inputs"):
        make(weight)(torch.zeros(4, 127))
    for outside in (-1, 71):
        with pytest.raises(EngineError, match="code 3"):
            make(weight).rows(torch.tensor([0, outside]))
