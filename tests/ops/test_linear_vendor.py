"""`linear` by the GPU vendor's products, as far as it can be seen without a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from quire.base.platform import detect_platform
from quire.ops import ALL_OPS, build_op_set
from quire.ops.check import compare
from quire.ops.linear.plain.reference import widened_product
from quire.ops.linear.plain.vendor import VendorMatrix, load_vendor, product_into_float32
from quire.ops.operation import FOR_GPUS

OP = ALL_OPS["linear"]
PLATFORM = detect_platform()


def test_every_case_equals_the_reference() -> None:
    """Turns red when an output has the wrong dtype or shape, or a bias is forgotten."""
    inputs = OP.make_inputs(torch.Generator().manual_seed(0))
    cases = [case for case in inputs if "gate" not in case.kwargs]
    assert cases
    for case in cases:
        assert compare(OP, partial(VendorMatrix, into_float32=widened_product), case) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_asked_for_in_float32(dtype: torch.dtype) -> None:
    """Turns red when torch no longer has the product, or when logits would be rounded to 16 bits
    on their way: on the meta device, which has shapes and dtypes of CUDA's product and no data."""
    weight = torch.empty(50, 40, dtype=dtype, device="meta")
    x = torch.empty(3, 2, 40, dtype=dtype, device="meta")
    y = VendorMatrix(weight, None, product_into_float32)(x, torch.float32)
    assert (y.dtype, y.shape) == (torch.float32, (3, 2, 50))


def test_no_rows_are_nothing_to_do() -> None:
    """Turns red when an empty batch has no shape."""
    assert VendorMatrix(torch.ones(5, 4).bfloat16())(
        torch.ones(2, 0, 4).bfloat16(), torch.float32
    ).shape == (2, 0, 5)


def test_float32_logits_are_not_rounded_between() -> None:
    """Turns red when a 16-bit product is widened after the fact."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 4, 64, generator=generator).bfloat16()
    y = VendorMatrix(weight)(x, torch.float32)
    assert not torch.equal(y, y.bfloat16().float())


def test_sums_of_split_products_stay_in_float32() -> None:
    """Turns red when cuBLAS may add parts of a sum in 16 bits."""
    flags = torch.backends.cuda.matmul
    names = (
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_reduced_precision_reduction",
    )
    before = [getattr(flags, name) for name in names]
    try:
        load_vendor()
        assert not any(getattr(flags, name) for name in names)
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(flags, name, value)


def test_it_serves_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns red when a GPU is left with the plain reference, or a CPU is not."""
    provider = OP.provider("torch")
    assert provider is not None
    assert provider.unavailable(PLATFORM) == FOR_GPUS
    cuda = replace(PLATFORM, device="cuda")
    assert "no GPU" in (provider.unavailable(cuda) or "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert provider.unavailable(cuda) is None
    assert build_op_set(PLATFORM).chosen["linear"] != "torch"
