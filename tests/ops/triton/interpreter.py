"""Triton's interpreter with bfloat16 as GPUs compute it.

That of 3.6.0 drops the bits beyond bfloat16 instead of rounding them, and multiplies tiles of
bfloat16 as if their bits were integers.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

__all__ = ["repair_bfloat16"]

Handle = interpreter.TensorHandle


def repair_bfloat16() -> None:
    """For the rest of this process."""
    cast, dot = interpreter.InterpreterBuilder.cast_impl, interpreter.InterpreterBuilder.create_dot

    def cast_impl(self: interpreter.InterpreterBuilder, src: Handle, to: tl.dtype) -> Handle:
        if src.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16()
            return Handle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
        return cast(self, src, to)

    def create_dot(
        self: interpreter.InterpreterBuilder,
        a: Handle,
        b: Handle,
        d: Handle,
        input_precision: object,
        max_num_imprecise_acc: object,
    ) -> Handle:
        return dot(self, _wide(a), _wide(b), d, input_precision, max_num_imprecise_acc)

    interpreter.InterpreterBuilder.cast_impl = cast_impl
    interpreter.InterpreterBuilder.create_dot = create_dot


def _wide(x: Handle) -> Handle:
    if x.dtype.scalar != tl.bfloat16:
        return x
    return Handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
