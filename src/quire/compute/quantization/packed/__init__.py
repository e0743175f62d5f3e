"""Matrices that a Hugging Face folder holds quantized: the meaning of their bits, and their
products."""

from quire.compute.quantization.packed.keep import keep, keep_partial
from quire.compute.quantization.packed.stored import StoredMatrix, numbers_of

__all__ = ["StoredMatrix", "keep", "keep_partial", "numbers_of"]
