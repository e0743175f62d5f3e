"""Low-rank adapters of rows (LoRA, Hu et al. 2021, arXiv:2106.09685).

`quire.lora.bank` imports torch; `quire.lora.request` does not.
"""

from quire.protocol.adapters import LoRARequest

__all__ = ["LoRARequest"]
