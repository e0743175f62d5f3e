"""Layers take their weights part by part, into the right place."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch

from quire.base.errors import EngineError
from quire.base.platform import detect_platform
from quire.compute.attention import ReferenceAttention
from quire.compute.layers import LayerFactory
from quire.ops import PackedMatrix, build_op_set, force_isa

OPS = build_op_set(detect_platform(), force_isa("none"))


def make(dtype: torch.dtype = torch.float32) -> LayerFactory:
    return LayerFactory(OPS, {0: ReferenceAttention()}, dtype, torch.device("cpu"), 16)


def test_merged_linear() -> None:
    """Catches q, k and v in the wrong order or place."""
    factory = make()
    attention = factory.attention(0, (4, 2, 3))
    layer = factory.qkv_linear(5, attention, factory.rms_norm(5, 1e-6), bias=True)
    assert layer.weights.shapes() == {
        "q.weight": (12, 5),
        "k.weight": (6, 5),
        "v.weight": (6, 5),
        "q.bias": (12,),
        "k.bias": (6,),
        "v.bias": (6,),
    }
    parts = {part: torch.randn(shape) for part, shape in layer.weights.shapes().items()}
    for part in reversed(parts):
        layer.weights.load(part, parts[part])
    layer.weights.finish()
    x = torch.randn(3, 5)
    got = layer(x).split([12, 6, 6], dim=1)
    for name, out in zip("qkv", got, strict=True):
        expected = x @ parts[f"{name}.weight"].T + parts[f"{name}.bias"]
        torch.testing.assert_close(out, expected)


def test_transposed_linear() -> None:
    """Catches GPT-2's weights used the wrong way round where they happen to be square."""
    layer = make().replicated(4, 4, bias=False, transposed=True)
    weight, x = torch.randn(4, 4), torch.randn(2, 4)
    layer.weights.load("weight", weight)
    layer.weights.finish()
    torch.testing.assert_close(layer(x), x @ weight)
    assert layer.weights.matrix.weight.is_contiguous()


def test_tied_head_has_nothing_to_load() -> None:
    """Catches a second copy of the largest matrix of a small model."""
    embedding, head = make(torch.bfloat16).embedding_and_head(10, 4, tied=True)
    embedding.weights.load("weight", torch.randn(10, 4))
    embedding.weights.finish()
    assert head.weights.shapes() == {}
    assert torch.equal(embedding(torch.tensor([3])), embedding.weights.matrix.weight[3:4])
    logits = head(torch.randn(2, 4, dtype=torch.bfloat16))
    assert (logits.dtype, logits.shape) == (torch.float32, (2, 10))


def test_the_plain_matrix_is_let_go_when_it_is_packed() -> None:
    """Catches a model that holds every weight twice."""
    made: list[weakref.ref[torch.Tensor]] = []

    def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedMatrix:
        made.append(weakref.ref(weight))
        return OPS.linear(weight.clone(), bias)

    factory = LayerFactory(replace(OPS, linear=pack), {}, torch.float32, torch.device("cpu"), 16)
    layers = [
        factory.replicated(4, 4, bias=False),
        factory.merged_column(4, {"gate": 3, "up": 3}, bias=True),
        factory.embedding_and_head(4, 4, tied=False)[1],
        factory.embedding_and_head(4, 4, tied=True)[0],
    ]
    for layer in layers:
        for part, shape in layer.weights.shapes().items():
            layer.weights.load(part, torch.zeros(shape))
        layer.weights.finish()
    assert [weight() for weight in made] == [None] * len(layers)


def test_a_layer_without_weights_is_refused() -> None:
    """Catches a layer that runs on memory that was never written."""
    layer = make().replicated(4, 4, bias=False)
    with pytest.raises(EngineError, match="before its weights were loaded"):
        layer(torch.zeros(1, 4))
    with pytest.raises(EngineError, match="without its weight"):
        layer.weights.finish()
    layer.weights.load("weight", torch.zeros(4, 4))
    layer.weights.finish()
    with pytest.raises(EngineError, match="'weight' came after the last"):
        layer.weights.load("weight", torch.zeros(4, 4))


def test_norm_adds_before_it_norms() -> None:
    """Catches a residual that is lost, or counted twice."""
    for norm in (make().rms_norm(6, 1e-5), make().layer_norm(6, 1e-5)):
        for part, shape in norm.weights.shapes().items():
            norm.weights.load(part, torch.rand(shape))
        x, residual = torch.randn(2, 3, 6)
        normed, total = norm.add(x, residual)
        torch.testing.assert_close(total, x + residual)
        torch.testing.assert_close(normed, norm(x + residual))
        first, same = norm.add(x, None)
        torch.testing.assert_close(first, norm(x))
        assert same is x
