"""Matrices that a Hugging Face folder holds quantized: what the bits of each format mean, and how
they compute."""

from quire.quantization.packed.keep import keep, keep_partial
from quire.quantization.packed.stored import StoredMatrix, numbers_of

__all__ = ["StoredMatrix", "keep", "keep_partial", "numbers_of"]
