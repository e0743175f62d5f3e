"""Collectives of the ranks of one host by C++ kernels (csrc/exchange). Captured steps can contain
them. `quire.ops.distributed.PlainCollectives` is their reference."""

from quire.ops.exchange.native import NativeCollectives, join_region

__all__ = ["NativeCollectives", "join_region"]
