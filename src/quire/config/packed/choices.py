"""Choices about quantized matrices, with their reasons: formats, and bits of activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from quire.config.model_spec import ModelSpec
from quire.config.packed.layout import PackedLayout
from quire.config.packed.table_format import TableFormat
from quire.config.quantization import choose_format

if TYPE_CHECKING:
    from quire.config.settings import EngineSettings

__all__ = [
    "ActivationBits",
    "choose_activation_bits",
    "describe_layouts",
    "describe_quantization",
    "holds_integers",
]


def describe_layouts(layouts: Sequence[PackedLayout], device: str) -> str:
    """Describe layouts by their kernels: "14 matrices by linear_int4, 2 widened as they are
    used"."""
    chosen = [layout.kernel_on(device) for layout in layouts]
    kernels = Counter(
        "widened as they are used" if kernel is None else f"by linear_{kernel.partition('-')[0]}"
        for kernel in chosen
    )
    words = [f"{count} {how}" for how, count in kernels.most_common()]
    return ", ".join(words).replace(" ", " matrices ", 1)


def describe_quantization(
    settings: EngineSettings, spec: ModelSpec, layouts: Sequence[PackedLayout], device: str
) -> tuple[str, str]:
    """Return the requested format, and the sizes of matrices that take another one; without a
    request, the checkpoint's format, and its kernels. layouts: layouts of matrices that are
    quantized on disk."""
    methods = " and ".join(sorted({layout.scheme.name for layout in layouts}))
    if settings.quantization is None:
        reason = describe_layouts(layouts, device) if layouts else "as in the checkpoint"
        return methods or "none", reason
    reasons = [f"as asked; made of {methods}" if layouts else "as asked"]
    for shape in spec.matrices:
        choice = choose_format(settings.quantization, shape)
        if choice.name != settings.quantization:
            of = "the head" if shape.is_head else f"{shape.inputs:,} inputs"
            name = spec.dtype if choice.name == "plain" else choice.name
            reasons.append(f"{of} in {name}")
    return settings.quantization, "; ".join(dict.fromkeys(reasons))


def holds_integers(settings: EngineSettings, layouts: Sequence[PackedLayout], device: str) -> bool:
    """Return whether some matrices are integers in memory. Unless 16 bits are asked for, these are
    multiplied by activations of 8 bits; all other matrices never are."""
    if settings.quantization is not None:
        return True
    kernels = {layout.kernel_on(device) for layout in layouts}
    return any(kernel is not None and TableFormat.named(kernel) is None for kernel in kernels)


class ActivationBits(NamedTuple):
    """reason: None where no matrix is integers."""

    value: int
    reason: str | None


def choose_activation_bits(
    settings: EngineSettings, layouts: Sequence[PackedLayout], device: str, dtype: str
) -> ActivationBits:
    """Choose activation_bits; 16 stands for activations in `dtype`, whatever that is."""
    if not holds_integers(settings, layouts, device):
        return ActivationBits(16, None)
    if settings.activation_bits == 16:
        return ActivationBits(16, f"as asked; integers become {dtype} for each product")
    reason = "products of integers are fastest; 16 keeps activations as they are"
    return ActivationBits(8, "as asked" if settings.activation_bits else reason)
