"""Adapters that requests name, under the names of vLLM's modules."""

from quire.protocol.adapters import LoRARequest

__all__ = ["LoRARequest"]
