"""Collectives of the ranks of one host by C++ kernels (csrc/exchange), which captured steps call
too. `quire.distributed.PlainCollectives` is their reference."""

from quire.ops.exchange.native import NativeCollectives, join_region

__all__ = ["NativeCollectives", "join_region"]
