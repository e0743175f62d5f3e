"""Gated linear layers equal `activation_and_mul` of the same layer, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.pairs import BY_PAIRS
from tests.profiles import examples

from quire.base.errors import ConfigError, EngineError
from quire.base.platform import detect_platform
from quire.ops import ALL_OPS, REFERENCE, Op, PackedMatrix, Provider, Team, build_op_set
from quire.ops.linear.int4.cases import int4_weight
from quire.ops.linear.int4.contract import GROUP_SIZES
from quire.ops.linear.int8.cases import int8_weight
from quire.ops.linear.plain.contract import GatedPacked
from quire.ops.pointwise.activation.contract import NAMES
from quire.ops.random_tensors import DTYPES, normal

LINEAR, INT8, INT4 = (ALL_OPS[name] for name in ("linear", "linear_int8", "linear_int4"))
GATE = ALL_OPS["activation_and_mul"]
PLATFORM = detect_platform()
each_kernel = pytest.mark.parametrize(
    "kernel",
    [
        pytest.param((op, provider), id=f"{op.name}-{provider.name}")
        for op in (LINEAR, INT8, INT4)
        for provider in op.providers
        if "gate" not in provider.lacks
    ],
    indirect=True,
)
Arguments = tuple[torch.Tensor | None, ...]


def arguments_of(
    op: Op,
    generator: torch.Generator,
    outputs: int,
    depth: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    group_size: int = 32,
    zeros: bool = False,
    bias: bool = False,
) -> Arguments:
    added = normal(generator, outputs, dtype=dtype) if bias else None
    if op is LINEAR:
        return normal(generator, outputs, depth, dtype=dtype) / depth**0.5, added
    if op is INT8:
        return *int8_weight(generator, outputs, depth), added
    weight, scale, zero = int4_weight(generator, outputs, depth, group_size)
    return weight, scale, zero if zeros else None, added


def gate_of(provider: Provider, team: Team) -> Callable[..., torch.Tensor]:
    """`activation_and_mul` of the same instruction set."""
    same = GATE.provider(provider.name)
    assert same is not None
    return same.load(team)


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor, label: str) -> None:
    bits = {2: torch.int16, 4: torch.int32}[expected.element_size()]
    assert got.dtype == expected.dtype and got.shape == expected.shape, label
    assert torch.equal(got.view(bits), expected.view(bits)), label


TEAMS = [Team(1), Team(2)]


@examples(80)
@given(
    op=st.sampled_from([LINEAR, INT8, INT4]),
    rows=st.integers(0, 130),
    width=st.integers(1, 150),
    groups=st.integers(1, 5),
    group_size=st.sampled_from(GROUP_SIZES),
    odd_depth=st.integers(1, 300),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    gate=st.sampled_from(sorted(NAMES)),
    size=st.sampled_from([1e-30, 1e-3, 1.0, 30.0, 1e4]),
    zeros=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_gated_layer_is_its_two_operations(
    op: Op,
    rows: int,
    width: int,
    groups: int,
    group_size: int,
    odd_depth: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    gate: str,
    size: float,
    zeros: bool,
    bias: bool,
    seed: int,
) -> None:
    """Turns red when a column meets another's gate, a tail is wrong, or what would have been stored
    between the two is not rounded, or otherwise, denormals among it."""
    generator = torch.Generator().manual_seed(seed)
    depth = groups * group_size if op is INT4 else odd_depth
    arguments = arguments_of(
        op,
        generator,
        2 * width,
        depth,
        dtype=dtypes[1],
        group_size=group_size,
        zeros=zeros,
        bias=bias,
    )
    x = (normal(generator, rows, depth + 3) * size).to(dtypes[0])[:, :depth]
    for provider in op.providers:
        if "gate" in provider.lacks or provider.unavailable(PLATFORM) is not None:
            continue
        for team in TEAMS:
            pack, apply = provider.load(team), gate_of(provider, team)
            gated, plain = pack(*arguments, gate=gate), pack(*arguments)
            assert_same_bits(gated(x), apply(plain(x), gate), provider.name)
            assert isinstance(gated, GatedPacked)
            assert_same_bits(gated.ungated(x), plain(x), f"{provider.name}, apart")
            wide = plain(x, torch.float32)
            assert_same_bits(gated(x, torch.float32), apply(wide, gate), f"{provider.name}, wide")


@each_kernel
@pytest.mark.parametrize("width", [1032, 1040])
def test_outputs_whose_second_half_begins_within_a_line(
    kernel: tuple[Op, Provider], width: int
) -> None:
    """Turns red when what is stored past the caches takes whole rows of y for whole lines."""
    op, provider = kernel
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        arguments = arguments_of(op, generator, 2 * width, 1024, dtype=dtype, group_size=32)
        gated, plain = (provider.load(TEAMS[1])(*arguments, gate=gate) for gate in ("silu", None))
        assert isinstance(gated, GatedPacked)
        x = normal(generator, 64, 1024, dtype=dtype)
        assert_same_bits(gated.ungated(x), plain(x), provider.name)


@each_kernel
@pytest.mark.parametrize(("width", "depth"), [(1, 32), (33, 96), (320, 512)])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    kernel: tuple[Op, Provider], width: int, depth: int
) -> None:
    """Turns red when two tasks share a pair of panels, or a block of rows writes into another."""
    op, provider = kernel
    generator = torch.Generator().manual_seed(0)
    arguments = arguments_of(op, generator, 2 * width, depth, bias=True)
    x = normal(generator, 500, depth, dtype=torch.bfloat16)
    plain = provider.load()(*arguments)
    alone = gate_of(provider, Team(1))(torch.cat([plain(row) for row in x.split(1)]), "silu")
    for team in TEAMS:
        matrix = provider.load(team)(*arguments, gate="silu")
        for rows in (*range(1, 131), 239, 241, 500):
            assert_same_bits(matrix(x[:rows]), alone[:rows], f"{rows} rows, {team}")


@BY_PAIRS
@each_kernel
@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("width", [32, 225])
def test_threads_share_the_rows_of_the_last_panels(
    kernel: tuple[Op, Provider], width: int, gate: str | None
) -> None:
    """So much work that panels are shared in parts. Turns red when a part is left out or computed
    by another panel, and when one of a pair of panels is taken for the other."""
    op, provider = kernel
    generator = torch.Generator().manual_seed(0)
    depth, group_size = (1056, 32) if gate else (1152, 128)
    arguments = arguments_of(
        op, generator, 2 * width, depth, group_size=group_size, zeros=True, bias=True
    )
    x, other = normal(generator, 600, depth, dtype=torch.bfloat16).split(300)
    alone = provider.load()(*arguments, gate=gate)
    expected = torch.cat([alone(row) for row in x.split(1)])
    for threads in (2, 5):
        matrix = provider.load(Team(threads))(*arguments, gate=gate)
        for rows in (150, 255, 300):
            matrix(other[:rows])  # what is left in memory that is not written
            assert_same_bits(matrix(x[:rows]), expected[:rows], f"{rows} rows, {threads} threads")


@each_kernel
def test_not_finite_rows_stay_alone(kernel: tuple[Op, Provider]) -> None:
    """Turns red when NaN or infinity reaches another row, or is lost by the gate."""
    op, provider = kernel
    generator = torch.Generator().manual_seed(0)
    arguments = arguments_of(op, generator, 128, 64)
    x = normal(generator, 9, 64, dtype=torch.bfloat16)
    x[2, 5], x[4, 7], x[7] = torch.nan, torch.inf, 0.0
    got = provider.load()(*arguments, gate="silu")(x)
    expected = gate_of(provider, Team(1))(provider.load()(*arguments)(x), "silu")
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    assert got[2].isnan().all() and got[[0, 1, 3, 5, 6, 7, 8]].isfinite().all()


@each_kernel
def test_what_cannot_be_gated_is_refused(kernel: tuple[Op, Provider]) -> None:
    """Turns red when halves of different size reach a kernel, an activation that nobody knows is
    computed as another, or rows of a gated matrix come from other columns."""
    op, provider = kernel
    generator = torch.Generator().manual_seed(0)
    for pack in (provider.load(), op.reference):
        with pytest.raises(EngineError, match="an even number of outputs, not 7"):
            pack(*arguments_of(op, generator, 7, 32), gate="silu")
        with pytest.raises(ConfigError, match="softplus"):
            pack(*arguments_of(op, generator, 8, 32), gate="softplus")
    matrix: PackedMatrix = provider.load()(*arguments_of(op, generator, 8, 32), gate="silu")
    with pytest.raises(EngineError, match="rows"):
        matrix.rows(torch.tensor([0]))


@pytest.mark.parametrize("op", [LINEAR, INT8, INT4], ids=lambda op: op.name)
@pytest.mark.parametrize("forced", [{}, {"activation_and_mul": REFERENCE}])
def test_the_operations_of_an_engine_gate_as_their_providers_can(
    op: Op, forced: dict[str, str]
) -> None:
    """Turns red when a layer is gated by another provider's activation than the chosen one, or not
    at all."""
    ops = build_op_set(PLATFORM, forced)
    generator = torch.Generator().manual_seed(0)
    arguments = arguments_of(op, generator, 68, 64)
    x = normal(generator, 5, 64, dtype=torch.bfloat16)
    plain = ops.gated_linear(op.name, None)(*arguments)(x)
    assert plain.shape == (5, 68)
    got = ops.gated_linear(op.name, "silu")(*arguments)(x)
    assert_same_bits(got, ops.activation_and_mul(plain, "silu"), op.name)


@pytest.mark.parametrize("op", [LINEAR, INT8, INT4], ids=lambda op: op.name)
def test_a_captured_step_has_one_call_for_a_gated_layer(op: Op) -> None:
    """Turns red when the gate of a layer becomes a kernel call of its own again."""
    team = Team(2)
    ops = build_op_set(PLATFORM, team=team)
    if ops.chosen[op.name] == REFERENCE:
        pytest.skip("no C++ kernels on this machine")
    arguments = arguments_of(op, torch.Generator().manual_seed(0), 68, 64)
    matrix = ops.gated_linear(op.name, "silu")(*arguments)
    with team.recording() as calls:
        matrix(torch.ones(5, 64, dtype=torch.bfloat16))
    assert [call.name for call in calls] == [op.name]
