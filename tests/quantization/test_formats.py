"""Format of each matrix, and the plan's words about it."""

from __future__ import annotations

import json
import logging
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire import LLM
from quire.base.errors import ConfigError
from quire.base.platform import detect_platform
from quire.bundled import bundled_model_path
from quire.compute.models.registry import find_model
from quire.compute.quantization import QuantizedFormats, WeightFormat
from quire.config import MatrixShape, ModelSpec, read_checkpoint, read_model_spec
from quire.config.memory.plan import weight_bytes
from quire.config.quantization import (
    INT4_FORMATS,
    INT4_GROUP_SIZE,
    INT8_MAX_INPUTS,
    QUANTIZATIONS,
    choose_format,
    matrix_bytes,
)
from quire.config.render_plan import render_plan
from quire.config.resolve import resolve
from quire.config.settings import EngineSettings
from quire.entrypoints.cli.main import main
from quire.ops import build_op_set, force_isa
from quire.ops.linear.int4.contract import GROUP_SIZES
from quire.ops.linear.plain.cpu_matrix import CpuMatrix
from tests.config.specs import make_platform
from tests.models.families import CASES, Case, write_checkpoint
from tests.models.harness import new_factory

OPS = build_op_set(detect_platform(), force_isa("none"))


@pytest.mark.parametrize(
    ("quantization", "shape", "expected"),
    [
        (None, MatrixShape(8, 64), "plain"),
        ("int8", MatrixShape(8, 63), "int8"),
        ("int8", MatrixShape(8, INT8_MAX_INPUTS), "int8"),
        ("int8", MatrixShape(8, INT8_MAX_INPUTS + 1), "plain"),
        ("int4", MatrixShape(8, 64), "int4"),
        ("int4", MatrixShape(8, 64, is_head=True), "int8"),
        ("int4", MatrixShape(8, 48), "int8"),
        ("int4", MatrixShape(8, INT8_MAX_INPUTS + INT4_GROUP_SIZE), "int4"),
        ("int4", MatrixShape(8, INT8_MAX_INPUTS + 1), "plain"),
        ("int4-g64", MatrixShape(8, 128), "int4-g64"),
        ("int4-g64", MatrixShape(8, 96), "int4"),
        ("int4-g128", MatrixShape(8, 704), "int4-g64"),
        ("int4-sym", MatrixShape(8, 128), "int4-sym"),
        ("int4-g64-sym", MatrixShape(8, 96), "int4-sym"),
        ("int4-g128-sym", MatrixShape(8, 384), "int4-g128-sym"),
        ("int4-g128-sym", MatrixShape(8, 704), "int4-g64-sym"),
        ("int4-g128-sym", MatrixShape(8, 128, is_head=True), "int8"),
        ("int4-g128-sym", MatrixShape(8, 48), "int8"),
    ],
)
def test_choice(quantization: str | None, shape: MatrixShape, expected: str) -> None:
    """Catches a size that is sent to an operation that cannot hold it."""
    assert choose_format(quantization, shape).name == expected


def test_names_are_those_of_every_group_size_of_the_operation() -> None:
    """Catches a size that the plan counts and no kernel has, and a name that changes."""
    sizes = {(groups.size, groups.zero_points) for groups in INT4_FORMATS.values()}
    assert sizes == {(size, zero_points) for size in GROUP_SIZES for zero_points in (False, True)}
    assert QUANTIZATIONS == (
        "int8", "int4", "int4-g64", "int4-g128", "int4-sym", "int4-g64-sym", "int4-g128-sym"
    )  # fmt: skip


def test_a_fallback_is_told_once_for_each_number_of_inputs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Catches silence, and a line for every layer of the model."""
    formats = QuantizedFormats("int4", OPS)
    with caplog.at_level(logging.WARNING, "quire.quantization"):
        for _ in range(3):
            for inputs in (64, 48, 40):
                formats.choose(MatrixShape(8, inputs))
                formats.choose(MatrixShape(16, inputs))
            formats.choose(MatrixShape(100, 64, is_head=True))
    assert [record.getMessage() for record in caplog.records] == [
        f"Matrices of {inputs} inputs are kept in int8, not in int4: "
        "int4 needs a multiple of 32 inputs."
        for inputs in (48, 40)
    ]


def test_smaller_groups_are_told_as_well(caplog: pytest.LogCaptureFixture) -> None:
    """Catches a model in another format than its user asked for, in silence."""
    formats = QuantizedFormats("int4-g128-sym", OPS)
    with caplog.at_level(logging.WARNING, "quire.quantization"):
        for inputs in (704, 256, 704, 200):
            formats.choose(MatrixShape(8, inputs))
    assert [record.getMessage() for record in caplog.records] == [
        "Matrices of 704 inputs are kept in int4-g64-sym, not in int4-g128-sym: "
        "int4-g128-sym needs a multiple of 128 inputs.",
        "Matrices of 200 inputs are kept in int8, not in int4-g128-sym: "
        "int4-g128-sym needs a multiple of 128 inputs, the smallest groups one of 32.",
    ]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    """A misspelt name would silently run without quantization."""
    known = ", ".join(QUANTIZATIONS)
    for name in ("fp8", "int4-g32", "int4-sym-g64"):
        with pytest.raises(
            ConfigError, match=rf"quantization cannot be '{name}'\. Give one of: {known}"
        ):
            LLM(quantization=name)


def test_the_flag_reaches_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a flag that is read and forgotten."""
    assert main(["plan", "--quantization", "int4", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["settings"]["quantization"] == "int4"
    assert plan["memory"]["fixed"]["weights"] == weight_bytes(bundled_spec(), None, "int4")


class Counting:
    """Formats that count what is asked of them."""

    def __init__(self) -> None:
        self.asked: Counter[MatrixShape] = Counter()
        self._plain = QuantizedFormats(None, OPS)

    def choose(self, shape: MatrixShape) -> WeightFormat:
        self.asked[shape] += 1
        return self._plain.choose(shape)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_spec_states_the_matrices_of_its_model(case: Case, tmp_path: Path) -> None:
    """Catches a memory plan for other matrices than those that are packed."""
    write_checkpoint(case, tmp_path)
    spec, formats = read_model_spec(tmp_path), Counting()
    find_model(spec.architecture)(spec, new_factory(spec, formats=formats))
    stated: Counter[MatrixShape] = Counter()
    for shape in spec.matrices:
        stated[replace(shape, count=1)] += shape.count
    assert stated == formats.asked


@pytest.mark.parametrize(
    ("name", "group_bits"),
    [
        ("int4", 20 / 32),
        ("int4-g64", 20 / 64),
        ("int4-g128", 20 / 128),
        ("int4-sym", 16 / 32),
        ("int4-g64-sym", 16 / 64),
        ("int4-g128-sym", 16 / 128),
    ],
)
def test_planned_bytes_are_those_of_values_scales_and_zero_points(
    name: str, group_bits: float
) -> None:
    """Per weight: 4 bits and its part of a group's; per output one scale."""
    outputs, inputs = 10, 384
    assert (
        matrix_bytes(name, outputs, inputs, dtype_bytes=2)
        == outputs * inputs * (4 + group_bits) / 8 + outputs * 4
    )


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_planned_bytes_are_the_bytes_of_packed_tensors(name: str) -> None:
    """Catches a plan for fewer bytes than a loaded model has. 32 outputs fill their panels."""
    shape = MatrixShape(32, 384)
    ops = build_op_set(detect_platform())
    packed = QuantizedFormats(name, ops).choose(shape).pack(torch.randn(32, 384).bfloat16(), None)
    if not isinstance(packed, CpuMatrix):
        pytest.skip("no C++ kernels here")
    held = sum(part.nbytes for part in packed._kept if part is not None)
    assert held == matrix_bytes(name, 32, 384, dtype_bytes=2)


def bundled_spec() -> ModelSpec:
    return read_model_spec(bundled_model_path())


def test_plan_counts_packed_weights() -> None:
    """Catches a plan that reserves 16 bits for what takes 8 or 4."""
    spec = bundled_spec()
    checkpoint = read_checkpoint(bundled_model_path())
    plain = weight_bytes(spec, checkpoint)
    norms = (2 * spec.num_layers + 1) * spec.hidden_size
    matrices = plain // 2 - norms
    outputs = sum(shape.outputs * shape.count for shape in spec.matrices)
    assert weight_bytes(spec, checkpoint, "int8") == matrices + 4 * outputs + 2 * norms
    head = spec.vocab_size * (spec.hidden_size + 4)
    body = matrices - spec.vocab_size * spec.hidden_size
    in_4_bits = body * 4.625 / 8 + 4 * (outputs - spec.vocab_size)
    assert weight_bytes(spec, None, "int4") == head + in_4_bits + 2 * norms


def test_plan_names_what_is_kept_wider() -> None:
    spec = bundled_spec()
    settings = EngineSettings(model="x", quantization="int4")
    text = render_plan(resolve(settings, spec, None, make_platform()))
    assert "as asked; the head in int8" in text
    assert "in bfloat16, matrices as quantization says" in text
    narrow = replace(spec, matrices=(*spec.matrices, MatrixShape(8, 48), MatrixShape(8, 2**20 + 1)))
    text = render_plan(resolve(settings, narrow, None, make_platform()))
    assert "the head in int8; 48 inputs in int8; 1,048,577 inputs in bfloat16" in text


def test_rows_of_a_tied_table_come_in_the_dtype_of_the_model() -> None:
    """Catches a residual stream that becomes float32 where the model computes in 16 bits."""
    for quantization in ("int8", "int4"):
        factory = new_factory(bundled_spec(), formats=QuantizedFormats(quantization, OPS))
        embedding, head = factory.embedding_and_head(10, 64, tied=True)
        table = torch.randn(10, 64)
        embedding.weights.load("weight", table)
        embedding.weights.finish()
        got = embedding(torch.tensor([3, 3, 9]))
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.float(), table[[3, 3, 9]], rtol=0.02, atol=0.03)
        assert head(torch.randn(2, 64, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_plain_matrix_is_let_go_when_it_is_packed(quantization: str) -> None:
    """Catches a quantized model that keeps its 16 bits too."""
    factory = new_factory(bundled_spec(), formats=QuantizedFormats(quantization, OPS))
    layers = [
        factory.merged_column(64, {"gate": 3, "up": 3}, bias=True),
        factory.embedding_and_head(4, 64, tied=False)[1],
        factory.embedding_and_head(4, 64, tied=True)[0],
    ]
    plain: list[weakref.ref[torch.Tensor]] = []
    for layer in layers:
        for part, shape in layer.weights.shapes().items():
            layer.weights.load(part, torch.zeros(shape))
        plain.append(weakref.ref(layer.weights._coming.weight))
        layer.weights.finish()
    assert [weight() for weight in plain] == [None] * len(layers)
