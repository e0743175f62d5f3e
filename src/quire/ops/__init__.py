"""Operations. Each has a folder with its contract, reference, inputs and providers; providers are
chosen when an engine is built."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.ops.check import CheckReport, check_provider
    from quire.ops.linear.plain import PackedMatrix, PartialMatrix
    from quire.ops.native.team import ALONE, Team
    from quire.ops.operation import Case, Op, Provider, Tolerance
    from quire.ops.registry import (
        ALL_OPS,
        REFERENCE,
        OpSet,
        build_op_set,
        force_gpu_kernels,
        force_invariance,
        force_isa,
        force_linear,
        select,
    )

__all__ = [
    "ALL_OPS",
    "ALONE",
    "REFERENCE",
    "Case",
    "CheckReport",
    "Op",
    "OpSet",
    "PackedMatrix",
    "PartialMatrix",
    "Provider",
    "Team",
    "Tolerance",
    "build_op_set",
    "check_provider",
    "force_gpu_kernels",
    "force_invariance",
    "force_isa",
    "force_linear",
    "select",
]

_HOMES = {
    **dict.fromkeys(("CheckReport", "check_provider"), "quire.ops.check"),
    **dict.fromkeys(("PackedMatrix", "PartialMatrix"), "quire.ops.linear.plain"),
    **dict.fromkeys(("Case", "Op", "Provider", "Tolerance"), "quire.ops.operation"),
    **dict.fromkeys(("ALONE", "Team"), "quire.ops.native.team"),
}


def __getattr__(name: str) -> Any:
    """Import names on first use: code that only compiles, loads or times kernels needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'quire.ops' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES.get(name, "quire.ops.registry")), name)
