"""Compile kernels as a call would, for GPUs that are not here."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction, mangle_type

__all__ = ["AMD", "AMPERE", "HOPPER", "Launch", "compiled", "launches", "spilled_bytes"]

AMPERE, HOPPER = GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32)
AMD = GPUTarget("hip", "gfx942", 64)


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch that a call would have made. signature: type by argument. constants: constants of
    the kernel."""

    grid: tuple[int, ...]
    kernel: JITFunction[Any]
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def compiled_as(self) -> tuple[object, ...]:
        """Two launches that differ in this are compiled apart; but for arguments that are 1."""
        ignored = {
            param.name
            for param in self.kernel.params
            if param.do_not_specialize or param.do_not_specialize_on_alignment
        }
        divisible = [name for name in self.divisible if name not in ignored]
        return self.kernel, self.signature, self.constants, divisible, self.options

    @property
    def label(self) -> str:
        return f"{self.kernel.__name__} {self.signature} {self.constants} {self.options}"


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Kernels that are called within compute nothing; they are listed instead."""
    seen: list[Launch] = []

    def run(
        self: JITFunction[Any], *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any
    ) -> None:
        seen.append(_launch(self, grid, args, kwargs))

    original: Callable[..., Any] = JITFunction.run
    JITFunction.run = run
    try:
        yield seen
    finally:
        JITFunction.run = original


def compiled(launch: Launch, target: GPUTarget) -> CompiledKernel:
    """Down to machine code. Raises what Triton raises for a kernel that does not compile."""
    names = launch.kernel.arg_names
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in launch.divisible}
    source = ASTSource(launch.kernel, launch.signature, launch.constants, attributes)
    return triton.compile(source, target=target, options=launch.options)


def spilled_bytes(kernel: CompiledKernel, folder: Path) -> int:
    """Memory per thread that a kernel for NVIDIA takes beside its registers."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found = re.search(r"STACK:(\d+)", done.stdout)
    assert found, done.stdout
    return int(found.group(1))


def _launch(
    kernel: JITFunction[Any], grid: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Launch:
    values = dict(zip(kernel.arg_names, args, strict=False))
    values |= {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    constant = {param.name for param in kernel.params if param.is_constexpr}
    assert values.keys() == set(kernel.arg_names), f"{kernel.__name__} was called without some"
    signature = {
        name: "constexpr" if name in constant else mangle_type(values[name])
        for name in kernel.arg_names
    }
    return Launch(
        grid,
        kernel,
        signature,
        {name: value for name, value in values.items() if name in constant},
        tuple(name for name in values if name not in constant and _is_divisible(values[name])),
        {name: value for name, value in kwargs.items() if name not in kernel.arg_names},
    )


def _is_divisible(value: object) -> bool:
    """Return whether 16 divides a value, by the rule of Triton's own launches."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % 16 == 0
    return isinstance(value, int) and value % 16 == 0
