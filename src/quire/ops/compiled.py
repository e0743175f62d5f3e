"""Norms, activations and sums that torch's compiler generates from their references. They are for
GPUs on which they are faster than our kernels, or that our kernels do not support."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from quire.base.errors import ConfigError
from quire.ops.native.team import ALONE
from quire.ops.operation import Op, Provider
from quire.ops.registry import ALL_OPS, OpSet

__all__ = ["COMPILED_OPS", "compiled_provider", "with_compiled"]

COMPILED_OPS = (
    "rms_norm",
    "add_rms_norm",
    "layer_norm",
    "add_layer_norm",
    "activation",
    "activation_and_mul",
    "add",
)
"""Operations that the compiler can fuse. Products, attention and cache writes are opaque calls to
it."""

MAX_REASON = 300
"""Most characters shown of the compiler's messages, which may be pages."""


def compiled_provider(op: Op) -> Provider:
    """The provider `compiled`: the reference of an operation, compiled at its first call. The
    engine never chooses it by itself."""
    return Provider("compiled", lambda _: None, lambda _team=ALONE: _compile(op))


def with_compiled(ops: OpSet, device: torch.device) -> OpSet:
    """Return `ops` with these operations compiled. Raises ConfigError if the compiler does not
    work."""
    calls = {name: _compile(ALL_OPS[name]) for name in COMPILED_OPS}
    try:
        with torch.inference_mode():
            calls["add"](torch.zeros(2, 8, device=device), torch.zeros(2, 8, device=device))
    except Exception as error:  # a compiler, Triton or a writable folder may be missing
        reason = " ".join(str(error).split())[:MAX_REASON]
        raise ConfigError(
            f"torch_compile=True, but torch's compiler does not work here: {reason}. It needs "
            "Triton on a GPU and a C++ compiler on a CPU; or leave the setting out."
        ) from error
    chosen = {**ops.chosen, **dict.fromkeys(COMPILED_OPS, "compiled")}
    return replace(ops, **calls, chosen=MappingProxyType(chosen))


def _compile(op: Op) -> Any:
    """Compile one kernel for any number of rows, which rounds where the reference rounds."""
    return torch.compile(
        op.reference, dynamic=True, fullgraph=True, options={"emulate_precision_casts": True}
    )
