"""Triton's interpreter with what that of 3.6.0 gets wrong set right.

It drops the bits beyond bfloat16 instead of rounding them, takes integers for the bits of bfloat16
and these for integers where tiles are multiplied; its scalars cannot bound a loop under NumPy 2.4.
A sort goes from one element to the next in Python, which takes half a second for a thousand.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

__all__ = ["repair_interpreter"]

Handle = interpreter.TensorHandle


def repair_interpreter() -> None:
    """For the rest of this process."""
    patch = interpreter._patch_lang_tensor
    cast, dot = interpreter.InterpreterBuilder.cast_impl, interpreter.InterpreterBuilder.create_dot

    def cast_impl(self: interpreter.InterpreterBuilder, src: Handle, to: tl.dtype) -> Handle:
        if to.scalar == tl.bfloat16 and src.dtype.scalar != tl.bfloat16:
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

    def patch_tensor(tensor: type[tl.tensor], scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def sort(x: tl.tensor) -> tl.tensor:
        return tl.tensor(Handle(np.sort(x.handle.data), x.handle.dtype), x.type)

    tl.sort = sort
    interpreter._patch_lang_tensor = patch_tensor
    interpreter.InterpreterBuilder.cast_impl = cast_impl
    interpreter.InterpreterBuilder.create_dot = create_dot


def _wide(x: Handle) -> Handle:
    if x.dtype.scalar != tl.bfloat16:
        return x
    return Handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
