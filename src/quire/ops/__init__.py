"""Operations: a folder each with contract, reference, inputs and providers; chosen at build."""

from quire.ops.check import CheckReport, check_provider
from quire.ops.linear import PackedMatrix
from quire.ops.operation import Case, Op, Provider, Tolerance
from quire.ops.registry import ALL_OPS, REFERENCE, OpSet, build_op_set, force_isa, select

__all__ = [
    "ALL_OPS",
    "REFERENCE",
    "Case",
    "CheckReport",
    "Op",
    "OpSet",
    "PackedMatrix",
    "Provider",
    "Tolerance",
    "build_op_set",
    "check_provider",
    "force_isa",
    "select",
]
