"""`quire.lora.request`, with the name of vLLM's module.

from quire.lora.request import LoRARequest
"""

from quire.protocol.adapters import LoRARequest

__all__ = ["LoRARequest"]
