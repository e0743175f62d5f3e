"""The choice between products by measurement: the calls that are measured, kept and ignored."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from quire.config import env
from quire.ops.linear.plain.choice_cache import ChoiceCache
from quire.ops.linear.plain.measured import MeasuredMatrix, ProductChooser
from quire.ops.linear.plain.reference import widened_product
from quire.ops.linear.plain.tiles import Tiles, candidates
from quire.ops.linear.plain.vendor import VendorMatrix

HERE = {"gpu": "A", "torch": "2.11"}
OUTPUTS, DEPTH, PROCESSORS = 1024, 1024, 8
ROWS = [1, 2, 4, 8, 16, 32, 64]


class Bench:
    """A timer that takes each call, and seconds from `speeds`: pairs for the vendor's product and
    for ours, by number of rows; infinity: it does not run."""

    def __init__(self, speeds: Callable[[int, Tiles | None], float]) -> None:
        self.speeds = speeds
        self.measured: list[tuple[int, Tiles | None]] = []
        self.served: list[Tiles] = []

    def time(self, calls: Sequence[Callable[[], object]]) -> float:
        self.served.clear()
        result = calls[0]()
        assert isinstance(result, torch.Tensor)
        tiles = self.served[0] if self.served else None
        self.measured.append((len(result), tiles))
        if (seconds := self.speeds(len(result), tiles)) == float("inf"):
            raise RuntimeError("out of resources")
        return seconds

    def multiply(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        tiles: Tiles,
    ) -> torch.Tensor:
        self.served.append(tiles)
        y = widened_product(x, weight)
        return (y if bias is None else y + bias.float()).to(out_dtype)

    def chooser(self, path: Path, environment: dict[str, str] = HERE) -> ProductChooser:
        return ProductChooser(self.time, self.multiply, ChoiceCache(path, environment), PROCESSORS)


def ours_for_few(rows: int, tiles: Tiles | None) -> float:
    """Ours is faster up to 4 rows, with tiles of 64 columns."""
    if tiles is None:
        return 1.0 if rows > 4 else 3.0
    return 2.0 if tiles.columns == 64 else 2.5


def matrix(outputs: int = OUTPUTS, dtype: torch.dtype = torch.bfloat16) -> VendorMatrix:
    generator = torch.Generator().manual_seed(0)
    return VendorMatrix(torch.randn(outputs, DEPTH, generator=generator).to(dtype))


def test_the_faster_product_serves_each_number_of_rows(tmp_path: Path) -> None:
    """Turns red when a number of rows gets the choice of another, or a slower product wins."""
    bench = Bench(ours_for_few)
    packed = MeasuredMatrix(matrix(), bench.chooser(tmp_path / "c.json"))
    assert {rows for rows, _ in bench.measured} == set(ROWS)
    for rows in (1, 2, 3, 4, 5, 64, 65, 0):
        bench.served.clear()
        x = torch.ones(rows, DEPTH, dtype=torch.bfloat16)
        assert torch.equal(packed(x, torch.float32), matrix()(x, torch.float32))
        assert [tiles.columns for tiles in bench.served] == ([64] if 0 < rows <= 4 else [])
    assert packed(torch.ones(2, 2, DEPTH, dtype=torch.bfloat16)).shape == (2, 2, OUTPUTS)


def test_a_second_start_measures_nothing(tmp_path: Path) -> None:
    """Turns red when what was measured is not found again, or is taken from another GPU."""
    path = tmp_path / "folder" / "c.json"
    first, second, elsewhere = Bench(ours_for_few), Bench(ours_for_few), Bench(ours_for_few)
    choices = first.chooser(path).choose(matrix())
    assert second.chooser(path).choose(matrix()) == choices
    assert not second.measured
    assert second.chooser(path).choose(matrix(2 * OUTPUTS))
    assert second.measured
    assert first.chooser(path).choose(matrix()) == choices
    elsewhere.chooser(path, {**HERE, "gpu": "B"}).choose(matrix())
    assert elsewhere.measured
    assert [file.name for file in path.parent.iterdir()] == ["c.json"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"environment": ENV}', '"x"', '{"environment": ENV, "choices": {"a": 1}}',
     '{"environment": ENV, "choices": {"a": {"1": {"rows": -1}}}}',
     '{"environment": ENV, "choices": {"a": {"1": {"spam": 1}}}}', "\\xff"],
)  # fmt: skip
def test_a_broken_file_is_ignored_with_a_line_in_the_log(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Turns red when a half-written file keeps the engine from starting."""
    path = tmp_path / "c.json"
    path.write_bytes(text.replace("ENV", json.dumps(HERE)).encode("latin-1"))
    bench = Bench(ours_for_few)
    with caplog.at_level(logging.WARNING):
        bench.chooser(path).choose(matrix())
    assert bench.measured
    assert "measured again" in caplog.text
    again = Bench(ours_for_few)
    again.chooser(path).choose(matrix())
    assert not again.measured


def test_choices_for_other_numbers_of_rows_are_measured_again(tmp_path: Path) -> None:
    """Turns red when a file that knows fewer rows leaves some without a product."""
    path = tmp_path / "c.json"
    choices = Bench(ours_for_few).chooser(path).choose(matrix())
    name = f"{OUTPUTS} x {DEPTH} bfloat16"
    ChoiceCache(path, HERE).put(name, {1: None})
    assert Bench(ours_for_few).chooser(path).choose(matrix()) == choices


def test_a_folder_that_cannot_be_written_costs_only_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Turns red when a read-only home keeps the engine from starting."""
    (tmp_path / "file").write_text("not a folder")
    bench = Bench(ours_for_few)
    with caplog.at_level(logging.WARNING):
        choices = bench.chooser(tmp_path / "file" / "c.json").choose(matrix())
    assert choices[1] is not None
    assert "not kept" in caplog.text


def test_tiles_that_do_not_run_here_are_left_out(tmp_path: Path) -> None:
    """Turns red when a GPU with less shared memory cannot start."""

    def speeds(rows: int, tiles: Tiles | None) -> float:
        return float("inf") if tiles and tiles.columns == 32 else ours_for_few(rows, tiles)

    bench = Bench(speeds)
    assert {tiles.columns for tiles in candidates(1, OUTPUTS, DEPTH, PROCESSORS)} == {32, 64, 128}
    choices = bench.chooser(tmp_path / "c.json").choose(matrix())
    assert choices[1] is not None
    assert choices[1].columns == 64


def test_a_gain_within_the_noise_keeps_the_vendor(tmp_path: Path) -> None:
    """Turns red when two products of one speed take turns from start to start."""
    bench = Bench(lambda rows, tiles: 1.0 if tiles is None else 0.98)
    assert set(bench.chooser(tmp_path / "c.json").choose(matrix()).values()) == {None}


def test_small_matrices_and_float32_are_not_measured(tmp_path: Path) -> None:
    """Turns red when every odd matrix of a test costs a measurement."""
    bench = Bench(ours_for_few)
    chooser = bench.chooser(tmp_path / "c.json")
    for each in (matrix(outputs=8), matrix(dtype=torch.float32)):
        assert set(chooser.choose(each).values()) == {None}
    assert not bench.measured


def test_copies_of_the_weight_do_not_fit_a_cache(tmp_path: Path) -> None:
    """Turns red when the weight would be read from the L2 cache, which no real step finds warm."""
    seen: list[int] = []

    def time(calls: Sequence[Callable[[], object]]) -> float:
        assert isinstance(calls[0], partial)
        weights = {
            (call.func if isinstance(call.func, VendorMatrix) else call.args[0]).weight.data_ptr()
            for call in calls
            if isinstance(call, partial)
        }
        seen.append(len(weights))
        return 1.0

    cache = ChoiceCache(tmp_path / "c.json", HERE)
    chooser = ProductChooser(time, Bench(ours_for_few).multiply, cache, PROCESSORS)
    big = matrix(outputs=16 * OUTPUTS)
    chooser.choose(big)
    assert min(seen) * big.weight.nbytes > 2**27


def test_the_cache_lies_where_caches_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Turns red when XDG_CACHE_HOME is not respected."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert env.cache_folder() == tmp_path / "quire"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert env.cache_folder() == Path.home() / ".cache" / "quire"
