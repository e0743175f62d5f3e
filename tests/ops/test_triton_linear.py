"""Products in Triton as models need them, compiled for GPUs that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from tests.ops.test_triton import TARGETS
from tests.ops.triton.compiler import AMD, compiled, launches

from quire.ops.linear.plain.tiles import Tiles, candidates, invariant_tiles

CASES = [
    (dtype, tiles)
    for dtype in (torch.bfloat16, torch.float32)
    for tiles in (
        *candidates(64, 4096, 4096, 16, dtype.itemsize),
        invariant_tiles(4096, 4096, dtype.itemsize),
    )
    if tiles.pieces > 1
]


@pytest.mark.parametrize(("dtype", "tiles"), CASES, ids=str)
def test_the_largest_tiles_compile_to_machine_code(
    dtype: torch.dtype, tiles: Tiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Turns red when a tile that may be measured needs more shared memory than a GPU has."""
    from quire.ops.linear.plain.triton_product import multiply

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    weight = torch.empty(4096, 4096, dtype=dtype)
    for target, code, shared in TARGETS:
        monkeypatch.setattr(torch.version, "hip", "6.4" if target == AMD else None)
        with launches() as seen:
            multiply(weight[: tiles.rows], weight, None, dtype, tiles)
        assert len(seen) == 2
        kernel = compiled(seen[0], target)
        assert kernel.asm[code]
        assert kernel.metadata.shared <= shared * 1024, f"{target}: {tiles}"


@pytest.mark.parametrize("bits", [4, 8])
def test_tiles_of_integers_for_many_rows_compile_to_machine_code(
    bits: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same for the tiles that prompts take."""
    from quire.ops.linear.int4.triton import linear_int4
    from quire.ops.linear.int8.triton import linear_int8

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = torch.empty(500, 4096, dtype=torch.bfloat16)
    if bits == 8:
        matrix = linear_int8(torch.zeros(4096, 4096, dtype=torch.int8), torch.ones(4096))
    else:
        zeros = torch.zeros(4096, 32, dtype=torch.uint8)
        weight = torch.zeros(4096, 4096, dtype=torch.uint8)
        matrix = linear_int4(weight, torch.ones(4096, 32), zeros)
    with launches() as seen:
        matrix(x)
    assert [launch.kernel.__name__ for launch in seen] == ["_quantize_kernel", "_product_kernel"]
    for launch in seen:
        for target, code, shared in TARGETS:
            kernel = compiled(launch, target)
            assert kernel.asm[code]
            assert kernel.metadata.shared <= shared * 1024, f"{target}: {launch.label}"
