"""Parts of quantized matrices hold the numbers of the whole, wherever a format can be cut."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from quire.base.errors import ConfigError
from quire.compute.quantization import StoredMatrix
from quire.compute.quantization.packed import keep
from quire.config import read_checkpoint
from quire.config.gguf import GGML_TYPES
from quire.config.hf import StoredTensor
from quire.config.packed import GGUFBlocks, PackedLayout
from quire.config.shard import Shard
from tests.gguf_writer import PACKERS, TYPE_IDS
from tests.models.harness import new_ops
from tests.packed_writer import FORMATS, Format, all_but_head, stored_matrix, write_pair

MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")
SIZE = 128
OUTPUT_CUT = 96
"""Output at which words of 3 bits end, and blocks of 48 numbers that go on from row to row."""
INPUT_UNITS = {
    "awq-gemm-g16": 16,
    "awq-gemv-g64": 64,
    "compressed-fp8-blocks": 128,
    "compressed-w4a8": 64,
    "compressed-w8a16-groups": 64,
    "fp4": 128,
    "fp8-powers": 128,
    "gptq-2-v2": 64,
    "gptq-4-v2": 64,
    "gptq-8-v2-uneven": 128,
    "nf4": 64,
    "nf4-nested": 128,
}
"""Inputs at whose multiples a matrix can be cut, where these are not 32: groups, blocks, words."""


@pytest.fixture(scope="module", params=FORMATS, ids=lambda chosen: chosen.name)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[StoredMatrix]]:
    chosen: Format = request.param
    folder, _, _ = write_pair(
        tmp_path_factory.mktemp("cuts"), chosen.settings, all_but_head(chosen.write)
    )
    tensors = read_checkpoint(folder).tensors
    layouts = [tensors[f"{module}.weight"].packed for module in MODULES]
    return chosen.name, [stored_matrix(layout) for layout in layouts if layout is not None]


def test_parts_have_the_numbers_of_the_whole(case: tuple[str, list[StoredMatrix]]) -> None:
    """Uneven shares of outputs and inputs, alone and together. Catches scales, zero points and
    indices of groups that belong to other inputs, and a kernel that makes other weights of them."""
    name, matrices = case
    unit = INPUT_UNITS.get(name, 32)
    for stored in matrices:
        whole = stored.numbers()
        for outputs in (range(OUTPUT_CUT), range(OUTPUT_CUT, SIZE), range(SIZE)):
            for inputs in (range(unit), range(unit, SIZE), range(SIZE)):
                if not inputs:
                    continue
                wanted = whole[outputs.start : outputs.stop, inputs.start : inputs.stop]
                part = stored.cut(outputs, inputs)
                assert part.shape == (len(outputs), len(inputs))
                assert torch.equal(part.numbers(), wanted)
                part.check()
                matrix = keep(new_ops("reference"), (part,), None, torch.float32).matrix
                assert torch.equal(matrix.rows(torch.arange(len(outputs))), wanted)
        again = stored.cut(range(SIZE), range(SIZE - unit, SIZE)).cut(
            range(OUTPUT_CUT, SIZE), range(unit)
        )
        assert torch.equal(again.numbers(), whole[OUTPUT_CUT:, SIZE - unit :])


def test_reordered_outputs_have_the_same_numbers(case: tuple[str, list[StoredMatrix]]) -> None:
    """Any order, as of rotated pairs and of heads; before and after a cut. Catches scales, zero
    points, tables and added numbers of other outputs."""
    random = torch.Generator().manual_seed(5)
    for stored in case[1]:
        for outputs in (range(SIZE), range(OUTPUT_CUT)):
            order = torch.randperm(len(outputs), generator=random)
            wanted = stored.numbers()[order]
            part = stored.cut(outputs, range(SIZE)).reordered(order)
            assert torch.equal(part.to(torch.device("cpu")).numbers(), wanted)
            for first, past in ((7, 72), (7, 9), (20, 23), (40, 42)):
                assert torch.equal(part.numbers(first, past), wanted[first:past])
            assert torch.equal(part.defined().numbers(), wanted)
            assert torch.equal(part.reordered(order).numbers(), wanted[order])


def test_a_cut_within_a_group_says_where_one_can_be(
    case: tuple[str, list[StoredMatrix]],
) -> None:
    name, (stored, _) = case
    unit = INPUT_UNITS.get(name, 32)
    try:
        part = stored.cut(range(SIZE), range(unit // 2))
    except ConfigError as error:
        assert str(error).startswith(f"{MODULES[0]} in the format")
        assert "multiples of" in str(error) or "from one output to the next" in str(error)
    else:  # one scale for all inputs
        assert torch.equal(part.numbers(), stored.numbers()[:, : unit // 2])
        assert name not in INPUT_UNITS


@pytest.mark.parametrize("kind", [kind for kind in TYPE_IDS if kind in PACKERS])
def test_blocks_of_gguf(kind: str) -> None:
    """K-quants are cut between blocks of 256 inputs and refuse other places by name."""
    random = Random(4)
    type_of = {each.name: each for each in GGML_TYPES.values()}[kind]
    inputs, size = 1536, type_of.block_size
    rows = [[PACKERS[kind](random, 0.5) for _ in range(inputs // size)] for _ in range(6)]
    data = [b"".join(block for block, _ in row) for row in rows]
    numbers = torch.tensor([[x for _, values in row for x in values] for row in rows]).float()
    blocks = torch.tensor([list(row) for row in data], dtype=torch.uint8)
    info = StoredTensor("blk.0.w", (6, inputs), kind, Path("w.gguf"), 0, blocks.numel())
    scheme = GGUFBlocks(kind)
    kernels = scheme.kernels(inputs)
    layout = PackedLayout("blk.0.w", scheme, 6, inputs, {"blocks": info}, (), kernels)
    stored = StoredMatrix(layout, {"blocks": blocks})
    for outputs, taken in ((range(2, 5), range(size, 1536)), (range(6), range(768))):
        wanted = numbers[outputs.start : outputs.stop, taken.start : taken.stop]
        part = stored.cut(outputs, taken)
        assert torch.equal(part.numbers(), wanted)
        matrix = keep(new_ops("reference"), (part,), None, torch.float32).matrix
        assert torch.equal(matrix.rows(torch.arange(len(outputs))), wanted)
    within = range(384) if size == 256 else range(size // 2)  # a share of 4 ranks
    with pytest.raises(ConfigError, match=rf"blk\.0\.w in the format gguf.*multiples of {size}"):
        stored.cut(range(6), within)


def test_shares_in_units_are_as_even_as_can_be() -> None:
    """576 inputs in blocks of 256 have three, the last of which is short."""
    for total, unit, size in ((576, 256, 2), (576, 64, 4), (100, 1, 7), (96, 32, 3)):
        shares = [Shard(rank, size).in_units(total, unit, "inputs") for rank in range(size)]
        ranges = [share.ranges[0] for share in shares]
        assert [i for each in ranges for i in each] == list(range(total))
        assert all(each.start % unit == 0 for each in ranges)
        lengths = [-(-len(each) // unit) for each in ranges]
        assert max(lengths) - min(lengths) <= 1
    with pytest.raises(ConfigError, match="576 inputs cannot be shared by 4 ranks"):
        Shard(0, 4).in_units(576, 256, "inputs")
